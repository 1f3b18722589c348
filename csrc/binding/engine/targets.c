/* How many targets a batch's loss is a mean over: training weighs micro-batches by the
 * count, and evaluation weighs batches. */
#include "binding/engine/targets.h"

#include "binding/engine/adapt.h"

#include "binding/runtime/buffer.h"

#include "core/data/targets.h"

/* The labels that the loss is a mean over, or NULL for a batch without labels. */
static PyObject *
batch_labels(PyObject *batch, ctpy_state *names, bool *shifted, int *failed)
{
    PyObject *found = ctpy_batch_entry(batch, names->str_shift_labels, failed);
    if (found != NULL) {
        *shifted = false; /* by the collator */
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

/* Targets among labels that are not plain int64 host memory, by the framework; -1
 * without an exception for labels that cannot be counted. */
static int64_t
count_by_framework(PyObject *op, PyObject *labels, bool shifted, ctpy_state *names)
{
    int64_t n = -1;
    PyObject *stack[] = {labels, shifted ? Py_True : Py_False};
    PyObject *answer = ctpy_ask_adapter(op, names->str_count_targets, stack, 2);
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
