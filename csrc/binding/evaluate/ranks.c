/* Trainer: the exchange between the ranks of an evaluation.
 *
 * All ranks run the same number of batches, since a hook or a wrapped model may contain
 * collectives: a rank without a batch runs the last batch again, as a dummy batch of no
 * rows. After each batch a small collective shows the ranks that continue from those
 * that have failed; the values follow. A failure of a rank is raised on all. */
#include "binding/evaluate/evaluate.h"

#include "binding/comm/communicator.h"
#include "binding/data/gather.h"

static const char doing[] = "evaluation"; /* for messages */

enum {
    RANK_DONE,
    RANK_HAS_BATCH,
    RANK_STOPPED,
    RANK_FAILED
};

static int
raise_for(int64_t state, int rank)
{
    if (state == RANK_STOPPED) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
    else {
        PyErr_Format(PyExc_RuntimeError, "%s: rank %d failed; its own error says why",
                     doing, rank);
    }
    return -1;
}

/* ---- the values of a round ------------------------------------------------------- */

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

/* The batch as bytes: a pickled tuple of rows, targets, loss and nodes. */
static PyObject *
message_of(const ctpy_eval_batch *batch, const ctpy_state *names)
{
    double value;
    PyObject *loss = NULL, *message = NULL, *bytes = NULL, *nodes = PyList_New(0);
    if (batch->loss == Py_None) {
        loss = Py_NewRef(Py_None);
    }
    else if (ctpy_eval_loss_value(batch->loss, names, &value) == 0) {
        loss = PyFloat_FromDouble(value);
    }
    int result = nodes == NULL || loss == NULL ? -1 : 0;
    for (int kind = 0; batch->rows > 0 && result == 0 && kind < CTPY_EVAL_KINDS;
         kind++) {
        result = ctpy_flatten(nodes, batch->values[kind], names);
    }
    if (batch->rows > 0 && result == 0) {
        result = ctpy_flatten(nodes, batch->whole, names);
    }
    if (result == 0 &&
        (message = Py_BuildValue("(nLOO)", batch->rows, (long long)batch->targets, loss,
                                 nodes)) != NULL) {
        bytes = ctpy_pickle(message);
    }
    Py_XDECREF(message);
    Py_XDECREF(loss);
    Py_XDECREF(nodes);
    return bytes;
}

/* The messages of all ranks. A rank that cannot send its batch sends an empty message
 * as a sign of failure, and keeps the exception. */
static PyObject *
exchange(ctpy_eval_ranks *ranks, ctpy_state *names, const ctpy_eval_batch *batch)
{
    PyObject *type = NULL, *value = NULL, *trace = NULL, *parts = NULL;
    PyObject *message = message_of(batch, names);
    if (message == NULL) {
        PyErr_Fetch(&type, &value, &trace);
        message = PyBytes_FromStringAndSize("", 0);
    }
    ranks->reported = true;
    if (message != NULL &&
        (parts = ctpy_exchange(names, ranks->group, message)) == NULL) {
        ctpy_name_doing(doing);
    }
    Py_XDECREF(message);
    if (type != NULL) {
        Py_CLEAR(parts);
        PyErr_Restore(type, value, trace);
    }
    return parts;
}

static int
check_messages(PyObject *parts)
{
    for (Py_ssize_t r = 0; r < PyList_GET_SIZE(parts); r++) {
        if (PyBytes_GET_SIZE(PyList_GET_ITEM(parts, r)) == 0) {
            return raise_for(RANK_FAILED, (int)r);
        }
    }
    return 0;
}

/* A rank's batch, out of the message. */
typedef struct arrival {
    PyObject *message; /* owned */
    PyObject *loss;    /* borrowed from the message */
    long long targets;
    ctpy_nodes nodes;
} arrival;

/* Opens each rank's message and releases the bytes. Returns the last rank with rows to
 * keep, -1 for none, -2 with an exception. */
static int
open_messages(ctpy_eval_ranks *ranks, PyObject *parts, bool as_tensors, arrival *from)
{
    int last = -1;
    for (int r = 0; r < (int)PyList_GET_SIZE(parts); r++) {
        ctpy_nodes *nodes = &from[r].nodes;
        *nodes = (ctpy_nodes){.rank = r, .tensors = as_tensors};
        from[r].message = ctpy_unpickle(PyList_GET_ITEM(parts, r), r);
        if (from[r].message == NULL ||
            !PyArg_ParseTuple(from[r].message, "nLOO!", &nodes->rows, &from[r].targets,
                              &from[r].loss, &PyList_Type, &nodes->list) ||
            PyList_SetItem(parts, r, Py_NewRef(Py_None)) < 0) {
            return -2;
        }
        nodes->kept = nodes->rows;
        if (ranks->left >= 0) {
            nodes->kept = nodes->kept > ranks->left ? ranks->left : nodes->kept;
            ranks->left -= nodes->kept;
        }
        last = nodes->kept > 0 ? r : last;
    }
    return last;
}

/* The loss of another rank, a tensor if this rank's is a tensor. */
static PyObject *
loss_like(const arrival *from, PyObject *like)
{
    const int tensor =
        from->nodes.tensors && from->loss != Py_None ? ctpy_is_tensor(like) : 0;
    return tensor < 0 ? NULL
           : tensor   ? ctpy_tensor_like(like, from->loss)
                      : Py_NewRef(from->loss);
}

static int
visit_arrival(arrival *from, const ctpy_eval_batch *own, bool last, ctpy_state *names,
              ctpy_eval_visit *visit, void *context)
{
    PyObject *values[CTPY_EVAL_KINDS + 1] = {NULL};
    ctpy_eval_batch batch = {.rows = from->nodes.kept, .targets = from->targets};
    int result = -1;
    for (int kind = 0; kind <= CTPY_EVAL_KINDS; kind++) {
        PyObject *like = kind < CTPY_EVAL_KINDS ? own->values[kind] : own->whole;
        PyObject **slot = kind < CTPY_EVAL_KINDS ? &batch.values[kind] : &batch.whole;
        if ((*slot = values[kind] = ctpy_unflatten(&from->nodes, like, names)) ==
            NULL) {
            goto done;
        }
    }
    if ((batch.loss = loss_like(from, own->loss)) != NULL) {
        result = visit(context, &batch, last);
        Py_DECREF(batch.loss);
    }
done:
    for (int kind = 0; kind <= CTPY_EVAL_KINDS; kind++) {
        Py_XDECREF(values[kind]);
    }
    return result;
}

static int
visit_all(ctpy_eval_ranks *ranks, ctpy_state *names, PyObject *parts,
          const ctpy_eval_batch *own, bool as_tensors, ctpy_eval_visit *visit,
          void *context)
{
    const Py_ssize_t n = PyList_GET_SIZE(parts);
    arrival *from = PyMem_Calloc((size_t)n, sizeof *from);
    if (from == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int last = open_messages(ranks, parts, as_tensors, from);
    int result = last == -2 ? -1 : 0;
    for (int r = 0; result == 0 && r <= last; r++) {
        if (from[r].nodes.kept > 0) {
            result = visit_arrival(&from[r], own, r == last && !ranks->gathered, names,
                                   visit, context);
        }
    }
    for (Py_ssize_t r = 0; r < n; r++) {
        Py_XDECREF(from[r].message);
    }
    PyMem_Free(from);
    return result;
}

int
ctpy_eval_exchange(ctpy_eval_ranks *ranks, ctpy_state *names,
                   const ctpy_eval_batch *batch, bool as_tensors,
                   ctpy_eval_visit *visit, void *context)
{
    ctpy_eval_batch sent = *batch;
    for (int kind = 0; ranks->gathered && kind < CTPY_EVAL_KINDS; kind++) {
        sent.values[kind] = Py_None; /* every rank has the joined values already */
    }
    PyObject *parts = exchange(ranks, names, &sent);
    int result = parts == NULL ? -1 : check_messages(parts);
    if (result == 0) {
        ranks->reported = false;
        result = visit_all(ranks, names, parts, &sent, as_tensors, visit, context);
    }
    Py_XDECREF(parts);
    if (result == 0 && ranks->gathered) {
        ctpy_eval_batch joined = *batch;
        joined.loss = Py_None; /* counted above */
        joined.rows = 0;
        result = visit(context, &joined, true);
    }
    return result;
}

/* ---- the ranks that continue ----------------------------------------------------- */

static int64_t
own_state(bool has_batch)
{
    if (!PyErr_Occurred()) {
        return has_batch ? RANK_HAS_BATCH : RANK_DONE;
    }
    return PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) ? RANK_STOPPED : RANK_FAILED;
}

/* How many ranks continue; an exception of this rank's own stays. */
static int
judge(const int64_t *states, int n, int *first)
{
    int continuing = 0;
    *first = -1;
    for (int r = 0; r < n; r++) {
        if (states[r] >= RANK_STOPPED) {
            return PyErr_Occurred() ? -1 : raise_for(states[r], r);
        }
        if (states[r] == RANK_HAS_BATCH) {
            *first = *first < 0 ? r : *first;
            continuing++;
        }
    }
    return continuing;
}

/* Gathers under the exception that may be set. */
static int
gather_states(PyObject *group, ctpy_state *names, int64_t own, int64_t *states,
              size_t n)
{
    PyObject *type, *value, *trace;
    const ct_request request = {
        .what = CT_ALL_GATHER, .in = {&own,   1, CT_I64},
             .out = {states, n, CT_I64}
    };
    PyErr_Fetch(&type, &value, &trace);
    int result = ctpy_comm_run(names, group, &request);
    if (result < 0) {
        ctpy_name_doing(doing);
    }
    if (type != NULL) { /* the first failure is reported */
        PyErr_Restore(type, value, trace);
    }
    return result;
}

int
ctpy_eval_sync_round(ctpy_eval_ranks *ranks, ctpy_state *names, bool has_batch,
                     int *first)
{
    const ct_comm *comm = ctpy_comm_borrow(names, ranks->group);
    if (comm == NULL) {
        return -1;
    }
    const int n = comm->world_size;
    int64_t *states = PyMem_Calloc((size_t)n, sizeof *states);
    int result = -1;
    if (states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    ranks->reported = true; /* a failure of this collective is raised on all ranks */
    if (gather_states(ranks->group, names, own_state(has_batch), states, (size_t)n) ==
        0) {
        result = judge(states, n, first);
    }
    ranks->reported = result < 0;
    PyMem_Free(states);
    return result;
}

/* ---- a batch for ranks that have none at all ------------------------------------- */

PyObject *
ctpy_eval_broadcast_batch(ctpy_eval_ranks *ranks, ctpy_state *names, PyObject *inputs,
                          int root)
{
    const ct_comm *comm = ctpy_comm_borrow(names, ranks->group);
    if (comm == NULL) {
        return NULL;
    }
    const bool is_root = comm->rank == root;
    PyObject *data = is_root ? ctpy_pickle(inputs) : Py_NewRef(Py_None), *bytes = NULL;
    PyObject *received = NULL;
    if (data == NULL) {
        PyErr_WriteUnraisable(inputs); /* the others must not wait for the batch */
        data = PyBytes_FromStringAndSize("", 0);
    }
    ranks->reported = true;
    if (data == NULL || (bytes = PyObject_CallMethod(ranks->group, "broadcast_bytes",
                                                     "Oi", data, root)) == NULL) {
        ctpy_name_doing(doing);
    }
    else if (PyBytes_GET_SIZE(bytes) == 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %d has the only batch of this evaluation, and pickle cannot "
                     "send it to the others; give each rank a batch of its own",
                     root);
    }
    else {
        ranks->reported = false;
        received = is_root ? Py_NewRef(inputs) : ctpy_unpickle(bytes, root);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(data);
    return received;
}
