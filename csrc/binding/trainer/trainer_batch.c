/* Trainer: the micro-batches of one update, and what each weighs in it. */
#include "binding/optim/grads.h"
#include "binding/runtime/nested.h"
#include "binding/engine/ranks.h"
#include "core/data/targets.h"

/* The labels that the loss is a mean over, or NULL where the batch has none. */
static PyObject *
batch_labels(PyObject *batch, ctpy_state *names, bool *shifted, int *failed)
{
    PyObject *found = ctpy_batch_entry(batch, names->str_shift_labels, failed);
    if (found != NULL) {
        *shifted = false; /* the collator has shifted them */
        return found;
    }
    return *failed ? NULL : ctpy_batch_entry(batch, names->str_labels, failed);
}

/* The length of the last dimension of a tensor or array; 0 for a scalar. */
static int
last_dimension(PyObject *op, ctpy_state *names, size_t *length)
{
    PyObject *shape = PyObject_GetAttr(op, names->str_shape);
    Py_ssize_t n = shape == NULL ? -1 : PySequence_Size(shape);
    *length = 0;
    if (n > 0) {
        PyObject *last = PySequence_GetItem(shape, n - 1);
        *length = last == NULL ? 0 : PyLong_AsSize_t(last);
        Py_XDECREF(last);
    }
    Py_XDECREF(shape);
    return n < 0 || PyErr_Occurred() ? -1 : 0;
}

/* Targets among labels that are not plain int64 host memory: asked of the framework.
 * -1 without an exception where they cannot be counted. */
static int64_t
count_by_framework(PyObject *op, PyObject *labels, bool shifted, ctpy_state *names)
{
    int64_t n = -1;
    PyObject *stack[] = {op, labels, shifted ? Py_True : Py_False};
    PyObject *answer =
        PyObject_VectorcallMethod(names->str__count_targets, stack, 3, NULL);
    if (answer != NULL && answer != Py_None) {
        n = PyLong_AsLongLong(answer);
    }
    Py_XDECREF(answer);
    return n;
}

int64_t
ctpy_count_targets(PyObject *op, PyObject *batch, int *failed)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ct_span span;
    size_t row = 0;
    int64_t n = -1;
    int shifts = 0;
    *failed = ctpy_get_bool(op, names->str__loss_shifts_labels, &shifts) < 0;
    bool shifted = shifts != 0;
    PyObject *labels = *failed ? NULL : batch_labels(batch, names, &shifted, failed);
    if (labels == NULL) {
        return -1;
    }
    if (ctpy_span_from(names, labels, "labels", 0, &span) == 0 &&
        span.dtype == CT_I64 && last_dimension(labels, names, &row) == 0) {
        n = (int64_t)ct_count_targets(span.data, span.n, row, shifted);
    }
    else if (ctpy_forgive()) {
        n = count_by_framework(op, labels, shifted, names);
    }
    Py_DECREF(labels);
    *failed = PyErr_Occurred() != NULL;
    return n;
}

int64_t
ctpy_count_batches(PyObject *op, PyObject *batches, int *failed)
{
    int64_t sum = 0;
    *failed = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batches); i++) {
        const int64_t n = ctpy_count_targets(op, PyList_GET_ITEM(batches, i), failed);
        if (*failed || n < 0) {
            return -1;
        }
        sum += n;
    }
    return PyList_GET_SIZE(batches) > 0 ? sum : -1;
}

int
ctpy_batch_shares(PyObject *op, const ctpy_run *run, PyObject *batches, double *shares)
{
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    const bool of_all = run->targets > 0; /* ranks' */
    double total = 0.0;
    int failed = 0;
    for (Py_ssize_t i = 0; (n > 1 || of_all) && i < n; i++) {
        int64_t targets = ctpy_count_targets(op, PyList_GET_ITEM(batches, i), &failed);
        if (failed) {
            return -1;
        }
        if (targets < 0) {
            total = 0.0;
            break;
        }
        shares[i] = (double)targets;
        total += shares[i];
    }
    if (of_all) {
        total = (double)run->targets / (double)ctpy_trainer_world_size(op);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        shares[i] = n == 1 && !of_all ? 1.0
                    : total > 0.0     ? shares[i] / total
                                      : 1.0 / (double)n;
    }
    return 0;
}

/* Their targets, of all ranks where args.average_tokens_across_devices says so; -1
 * without batches or where one rank cannot count them. */
static int
count_on_ranks(PyObject *op, PyObject *batches, int64_t *total)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int failed = 0, of_all;
    int64_t values[2] = {ctpy_count_batches(op, batches, &failed), 0};
    if (failed ||
        ctpy_field_bool(op, names->str_args, names->str_average_tokens_across_devices,
                        &of_all) < 0) {
        return -1;
    }
    if (of_all) {
        values[1] = values[0] < 0;
        values[0] = values[0] < 0 ? 0 : values[0];
        if (ctpy_trainer_sum(op, values, 2) < 0) {
            return -1;
        }
    }
    *total = values[1] > 0 ? -1 : values[0];
    return 0;
}

const char Trainer__get_num_items_in_batch_doc[] =
    "_get_num_items_in_batch($self, batch_samples, device=None)\n--\n\n"
    "Count the predicted targets of a list of batches: labels that are not -100.\n\n"
    "On several ranks those of all, with average_tokens_across_devices.\n"
    "A loss that shifts its labels has none in the first column. Returns None where "
    "no\n"
    "loss takes the count or the batches have no labels.";

PyObject *
Trainer__get_num_items_in_batch(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"batch_samples", "device", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *batches, *device = Py_None, *function;
    int accepts;
    int64_t total;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O:_get_num_items_in_batch",
                                     keywords, &PyList_Type, &batches, &device) ||
        ctpy_get_bool(op, names->str_model_accepts_loss_kwargs, &accepts) < 0 ||
        (function = PyObject_GetAttr(op, names->str_compute_loss_func)) == NULL) {
        return NULL;
    }
    bool wanted = accepts || function != Py_None;
    Py_DECREF(function);
    if (!wanted) {
        Py_RETURN_NONE;
    }
    if (count_on_ranks(op, batches, &total) < 0) {
        return NULL;
    }
    if (total < 0) {
        Py_RETURN_NONE;
    }
    PyObject *n = PyLong_FromLongLong(total);
    if (n == NULL) {
        return NULL;
    }
    PyObject *stack[] = {op, n, device};
    PyObject *count = PyObject_VectorcallMethod(names->str__item_count, stack, 3, NULL);
    Py_DECREF(n);
    return count;
}

const char Trainer_get_batch_samples_doc[] =
    "get_batch_samples($self, epoch_iterator, num_batches, device=None)\n--\n\n"
    "Take up to num_batches batches; return them and their count of targets.\n\n"
    "The list is shorter, or empty, where the iterator ends.";

PyObject *
Trainer_get_batch_samples(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"epoch_iterator", "num_batches", "device", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *iterator, *device = Py_None, *result = NULL;
    Py_ssize_t n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|O:get_batch_samples", keywords,
                                     &iterator, &n, &device)) {
        return NULL;
    }
    PyObject *batches = PyList_New(0);
    for (Py_ssize_t i = 0; batches != NULL && i < n; i++) {
        PyObject *batch = PyIter_Next(iterator);
        if (batch == NULL) {
            break;
        }
        if (PyList_Append(batches, batch) < 0) {
            Py_CLEAR(batches);
        }
        Py_DECREF(batch);
    }
    if (batches == NULL || PyErr_Occurred()) {
        Py_XDECREF(batches);
        return NULL;
    }
    PyObject *stack[] = {op, batches, device};
    PyObject *count =
        PyObject_VectorcallMethod(names->str__get_num_items_in_batch, stack, 3, NULL);
    if (count != NULL) {
        result = PyTuple_Pack(2, batches, count);
        Py_DECREF(count);
    }
    Py_DECREF(batches);
    return result;
}

/* What the hook returned, checked, since overrides come from anywhere. */
static int
unpack_batches(PyObject *pair, PyObject **batches, PyObject **count)
{
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
        !PyList_Check(PyTuple_GET_ITEM(pair, 0))) {
        PyErr_Format(PyExc_TypeError,
                     "get_batch_samples must return (list of batches, number of items "
                     "or None), got %.200R",
                     pair);
        Py_DECREF(pair);
        return -1;
    }
    *batches = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    *count = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return 0;
}

int
ctpy_next_batches(PyObject *op, ctpy_run *run, PyObject *iterator, PyObject **batches,
                  PyObject **count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t left = run->steps_in_epoch - run->micro_step;
    PyObject *pair = NULL, *device = NULL, *args = NULL;
    PyObject *n =
        PyLong_FromLongLong(left < run->accumulation ? left : run->accumulation);
    if (n != NULL && (args = PyObject_GetAttr(op, names->str_args)) != NULL &&
        (device = PyObject_GetAttr(args, names->str_device)) != NULL) {
        PyObject *stack[] = {iterator, n, device};
        pair = ctpy_call_adapted(op, names->str_get_batch_samples, stack, 2,
                                 names->kw_device);
    }
    Py_XDECREF(device);
    Py_XDECREF(args);
    Py_XDECREF(n);
    return unpack_batches(pair, batches, count);
}
