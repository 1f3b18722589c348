/* Trainer: the outputs of an evaluation on their way into host memory. */
#include "binding/evaluate/evaluate.h"

static const char *const kind_names[CTPY_EVAL_KINDS] = {"predictions", "label_ids",
                                                        "inputs", "losses"};

/* Does the model run in host memory? Trainers without a notion of devices do. */
static int
runs_on_host(PyObject *op, const ctpy_state *names, int *on_host)
{
    int failed;
    PyObject *found = ctpy_get_optional(op, names->str__inputs_stay, &failed);
    *on_host = failed ? -1 : found == NULL ? 1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return *on_host < 0 ? -1 : 0;
}

/* A setting that only our own arguments have; None with transformers'. */
static PyObject *
own_setting(PyObject *args, PyObject *name)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, name, &failed);
    return failed ? NULL : found != NULL ? found : Py_NewRef(Py_None);
}

static int
own_flag(PyObject *args, PyObject *name, int *value)
{
    PyObject *found = own_setting(args, name);
    *value = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return *value < 0 ? -1 : 0;
}

/* How many batches may stay on the device: as many as args say, else the one whose
 * copy overlaps with the next one's forward. */
static int
read_waiting(PyObject *op, PyObject *args, const ctpy_state *names, Py_ssize_t *n)
{
    int on_host;
    *n = 0;
    if (runs_on_host(op, names, &on_host) < 0 || on_host) {
        return on_host < 0 ? -1 : 0;
    }
    PyObject *steps = PyObject_GetAttr(args, names->str_eval_accumulation_steps);
    if (steps == NULL) {
        return -1;
    }
    *n = steps == Py_None ? 1 : PyLong_AsSsize_t(steps);
    Py_DECREF(steps);
    return *n < 0 && PyErr_Occurred() ? -1 : 0;
}

static int
read_keeps_losses(PyObject *args, const ctpy_state *names, int *keeps)
{
    PyObject *wanted = PyObject_GetAttr(args, names->str_include_for_metrics);
    *keeps = wanted == NULL ? -1 : PySequence_Contains(wanted, names->str_loss);
    Py_XDECREF(wanted);
    return *keeps < 0 ? -1 : 0;
}

int
ctpy_eval_store_init(ctpy_eval_store *store, PyObject *op, PyObject *args,
                     Py_ssize_t n_rows)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    *store = (ctpy_eval_store){0};
    if (ctpy_get_bool(args, names->str_eval_do_concat_batches, &store->concat) < 0 ||
        read_keeps_losses(args, names, &store->keep_losses) < 0 ||
        own_flag(args, names->str_eval_loss_by_token, &store->by_token) < 0 ||
        read_waiting(op, args, names, &store->max_waiting) < 0 ||
        (store->spill_bytes = own_setting(args, names->str_eval_spill_bytes)) == NULL ||
        (store->waiting = PyList_New(0)) == NULL ||
        (store->expected_rows =
             n_rows < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(n_rows)) == NULL) {
        ctpy_eval_store_fini(store);
        return -1;
    }
    return 0;
}

void
ctpy_eval_store_fini(ctpy_eval_store *store)
{
    for (int i = 0; i < CTPY_EVAL_KINDS; i++) {
        Py_CLEAR(store->sinks[i]);
    }
    Py_CLEAR(store->expected_rows);
    Py_CLEAR(store->spill_bytes);
    Py_CLEAR(store->waiting);
}

static PyObject *
accumulator_new(const ctpy_eval_store *store, const ctpy_state *names, int kind)
{
    PyObject *result = NULL, *none = PyTuple_New(0), *options = NULL, *folder = NULL;
    PyObject *module = PyImport_ImportModule("tempfile");
    if (module != NULL && none != NULL &&
        (folder = PyObject_CallMethod(module, "gettempdir", NULL)) != NULL &&
        (options =
             Py_BuildValue("{s:O,s:s,s:O,s:O}", "n_rows_hint", store->expected_rows,
                           "name", kind_names[kind], "spill_bytes", store->spill_bytes,
                           "spill_folder", folder)) != NULL) {
        result = PyObject_Call((PyObject *)names->ArrayAccumulator, none, options);
    }
    Py_XDECREF(options);
    Py_XDECREF(folder);
    Py_XDECREF(module);
    Py_XDECREF(none);
    return result;
}

static PyObject *
sink_borrow(ctpy_eval_store *store, const ctpy_state *names, int kind)
{
    if (store->sinks[kind] == NULL) {
        store->sinks[kind] =
            store->concat ? accumulator_new(store, names, kind) : PyList_New(0);
    }
    return store->sinks[kind];
}

static int
keep(ctpy_eval_store *store, const ctpy_state *names, int kind, PyObject *value)
{
    PyObject *sink = sink_borrow(store, names, kind);
    if (sink == NULL) {
        return -1;
    }
    if (store->concat) {
        PyObject *answer = PyObject_CallMethodOneArg(sink, names->str_append, value);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    PyObject *arrays = ctpy_numpify_all(value, names);
    int result = arrays == NULL ? -1 : PyList_Append(sink, arrays);
    Py_XDECREF(arrays);
    return result;
}

int
ctpy_eval_loss_value(PyObject *loss, const ctpy_state *names, double *value)
{
    int failed;
    PyObject *mean = NULL, *shape = ctpy_get_optional(loss, names->str_shape, &failed);
    if (shape != NULL && PyObject_Length(shape) > 0) {
        mean = PyObject_CallMethodNoArgs(loss, names->str_mean);
        failed = mean == NULL;
    }
    Py_XDECREF(shape);
    if (failed || PyErr_Occurred()) {
        return -1;
    }
    *value = PyFloat_AsDouble(mean == NULL ? loss : mean);
    Py_XDECREF(mean);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* numpy.full(rows, value, float32): the loss as compute_metrics gets it. */
static int
keep_row_losses(ctpy_eval_store *store, const ctpy_state *names, double value,
                Py_ssize_t rows)
{
    int result = -1;
    PyObject *numpy = PyImport_ImportModule("numpy"), *losses = NULL;
    if (numpy != NULL) {
        losses = PyObject_CallMethod(numpy, "full", "nds", rows, value, "float32");
        Py_DECREF(numpy);
    }
    if (losses != NULL) {
        result = keep(store, names, CTPY_EVAL_LOSSES, losses);
        Py_DECREF(losses);
    }
    return result;
}

static int
add_loss(ctpy_eval_store *store, const ctpy_state *names, const ctpy_eval_batch *batch)
{
    double value;
    if (ctpy_eval_loss_value(batch->loss, names, &value) < 0) {
        return -1;
    }
    store->has_loss = 1;
    store->loss_sum += value * (double)batch->rows;
    store->loss_rows += (double)batch->rows;
    if (batch->targets > 0) { /* without targets the mean is 0 / 0 */
        store->token_sum += value * (double)batch->targets;
        store->token_count += (double)batch->targets;
    }
    return store->keep_losses ? keep_row_losses(store, names, value, batch->rows) : 0;
}

/* Puts the batch of one rank into the sinks. */
static int
commit_one(ctpy_eval_store *store, const ctpy_state *names,
           const ctpy_eval_batch *batch)
{
    store->n_rows += batch->rows;
    if (batch->loss != Py_None && add_loss(store, names, batch) < 0) {
        return -1;
    }
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        if (batch->values[kind] != Py_None &&
            keep(store, names, kind, batch->values[kind]) < 0) {
            return -1;
        }
    }
    return 0;
}

typedef struct visit_context {
    ctpy_eval_store *store;
    const ctpy_state *names;
} visit_context;

static int
visit_commit(void *context, const ctpy_eval_batch *batch, bool Py_UNUSED(last))
{
    visit_context *c = context;
    return commit_one(c->store, c->names, batch);
}

/* Puts this rank's batch, and those that the others have in this round, into the sinks.
 */
static int
commit(ctpy_eval_store *store, ctpy_state *names, const ctpy_eval_batch *batch)
{
    visit_context context = {store, names};
    return store->ranks == NULL ? commit_one(store, names, batch)
                                : ctpy_eval_share(store->ranks, names, batch, false,
                                                  visit_commit, &context);
}

/* Brings the first n waiting batches into host memory. */
static int
commit_waiting(ctpy_eval_store *store, ctpy_state *names, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        ctpy_eval_batch batch = {.whole = Py_None};
        long long targets;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(store->waiting, i), "OOOOnL",
                              &batch.values[0], &batch.values[1], &batch.values[2],
                              &batch.loss, &batch.rows, &targets)) {
            return -1;
        }
        batch.targets = targets;
        if (commit(store, names, &batch) < 0) {
            return -1;
        }
    }
    return PyList_SetSlice(store->waiting, 0, n, NULL);
}

int
ctpy_eval_store_add(ctpy_eval_store *store, ctpy_state *names,
                    const ctpy_eval_batch *batch)
{
    if (store->max_waiting == 0) {
        return commit(store, names, batch);
    }
    PyObject *item =
        Py_BuildValue("(OOOOnL)", batch->values[0], batch->values[1], batch->values[2],
                      batch->loss, batch->rows, (long long)batch->targets);
    int result = item == NULL ? -1 : PyList_Append(store->waiting, item);
    Py_XDECREF(item);
    const Py_ssize_t n = PyList_GET_SIZE(store->waiting);
    return result < 0               ? -1
           : n > store->max_waiting ? commit_waiting(store, names, store->max_waiting)
                                    : 0;
}

int
ctpy_eval_store_flush(ctpy_eval_store *store, ctpy_state *names)
{
    return commit_waiting(store, names, PyList_GET_SIZE(store->waiting));
}

PyObject *
ctpy_eval_store_take(ctpy_eval_store *store, int kind)
{
    PyObject *sink = store->sinks[kind];
    store->sinks[kind] = NULL;
    if (sink == NULL) {
        Py_RETURN_NONE;
    }
    if (!store->concat) {
        return sink;
    }
    PyObject *result = PyObject_CallMethod(sink, "result", NULL);
    Py_DECREF(sink);
    return result;
}
