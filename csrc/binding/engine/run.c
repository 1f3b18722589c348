/* What the loops of training and evaluation share: calls of hooks and the
 * adapter; the count of a batch's targets; the group of ranks.
 *
 * transformers has added parameters to hooks over the years, and an override written
 * before must run unchanged: a hook is called with the keywords that its signature
 * accepts. inspect.signature is asked once for each function object, so that
 * `t.compute_loss = f` works too. */
#include "binding/engine/run.h"

#include "binding/comm/communicator.h"
#include "binding/runtime/buffer.h"

#include "core/data/targets.h"

/* ---- hooks of every age, and the adapter ----------------------------------------- */

/* New reference: frozenset of the keywords that a callable of Python's accepts, None
 * for all, or False where it takes the value of the only one by position. */
static PyObject *
accepted_keywords(PyObject *op, PyObject *name, PyObject *callable)
{
    PyObject *cache = ((Trainer *)op)->signatures;
    PyObject *function =
        PyMethod_Check(callable) ? PyMethod_GET_FUNCTION(callable) : callable;
    PyObject *found = PyDict_GetItemWithError(cache, function);
    if (found != NULL || !ctpy_forgive()) { /* an unhashable callable: ask every time */
        return Py_XNewRef(found);
    }
    found = ctpy_call_function("ctrainer.runtime.hooks", "taken_keywords", "(OO)", name,
                               callable);
    if (found != NULL && PyDict_SetItem(cache, function, found) < 0 &&
        !ctpy_forgive()) {
        Py_CLEAR(found);
    }
    return found;
}

/* Moves the accepted keywords to the front; returns their names, a new reference. */
static PyObject *
keep_accepted(PyObject *accepted, PyObject *names, PyObject **values)
{
    PyObject *kept = PyList_New(0);
    Py_ssize_t n = PyTuple_GET_SIZE(names), to = 0;
    for (Py_ssize_t i = 0; kept != NULL && i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int known = PySequence_Contains(accepted, name);
        if (known < 0 || (known && PyList_Append(kept, name) < 0)) {
            Py_CLEAR(kept);
        }
        else if (known) {
            values[to++] = values[i];
        }
    }
    if (kept == NULL) {
        return NULL;
    }
    PyObject *result = PyList_AsTuple(kept);
    Py_DECREF(kept);
    return result;
}

PyObject *
ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args, size_t nargs,
                  PyObject *kwnames)
{
    PyObject *stack[1 + CTPY_HOOK_MAX_ARGS];
    size_t n_keywords = kwnames == NULL ? 0 : (size_t)PyTuple_GET_SIZE(kwnames);
    PyObject *result = NULL, *accepted = NULL, *names = Py_XNewRef(kwnames);
    PyObject *callable = PyObject_GetAttr(op, name);
    assert(nargs + n_keywords <= CTPY_HOOK_MAX_ARGS);
    if (callable == NULL) {
        goto done;
    }
    for (size_t i = 0; i < nargs + n_keywords; i++) {
        stack[1 + i] = args[i];
    }
    if (n_keywords > 0 && !PyCFunction_Check(callable)) { /* ours take every keyword */
        if ((accepted = accepted_keywords(op, name, callable)) == NULL) {
            goto done;
        }
        if (accepted == Py_False) {
            nargs += n_keywords;
            Py_CLEAR(names);
        }
        else if (accepted != Py_None) {
            Py_SETREF(names, keep_accepted(accepted, kwnames, &stack[1 + nargs]));
            if (names == NULL) {
                goto done;
            }
        }
    }
    result = PyObject_Vectorcall(callable, &stack[1],
                                 nargs | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
done:
    Py_XDECREF(accepted);
    Py_XDECREF(names);
    Py_XDECREF(callable);
    return result;
}

static const char Trainer__call_hook_doc[] =
    "_call_hook($self, name, /, *args, **keywords)\n--\n\n"
    "Call the method of that name with those of the keywords that it accepts, since\n"
    "overrides may have been written for another release. At most 11 values.";

static PyObject *
Trainer__call_hook(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    const Py_ssize_t n = nargs + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    if (nargs < 1 || !PyUnicode_Check(args[0]) || n > 1 + CTPY_HOOK_MAX_ARGS) {
        return PyErr_Format(PyExc_TypeError,
                            "expected the name of a method and up to %d values",
                            CTPY_HOOK_MAX_ARGS);
    }
    return ctpy_call_adapted(op, args[0], &args[1], (size_t)nargs - 1, kwnames);
}

PyObject *
ctpy_ask_adapter(PyObject *op, PyObject *name, PyObject *const *args, size_t n)
{
    PyObject *adapter = ctpy_field(((Trainer *)op)->adapter);
    if (adapter == NULL) {
        return PyErr_Format(PyExc_AttributeError,
                            "%.100s.__init__() has not been called",
                            Py_TYPE(op)->tp_name);
    }
    PyObject *answer = ctpy_call_hook(adapter, name, args, n);
    Py_DECREF(adapter);
    return answer;
}

/* ---- the count of targets that a loss is a mean over ----------------------------- */

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

/* ---- the group of ranks ---------------------------------------------------------- */

/* A forked child trains alone: the group is the parent's. */
static int
is_open(PyObject *group)
{
    const ct_comm *comm = group == NULL ? NULL : ((Communicator *)group)->comm;
    return comm != NULL && ct_comm_is_here(comm);
}

/* The group of the trainer's ranks, from _join_ranks() at the first call; owned by the
 * trainer. NULL with an exception. */
static ct_comm *
comm_borrow(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    if (!is_open(self->rank_group)) {
        PyObject *group = PyObject_CallMethodNoArgs(op, names->str__join_ranks);
        if (group == NULL || ctpy_comm_borrow(names, group) == NULL) {
            Py_XDECREF(group);
            return NULL;
        }
        Py_XSETREF(self->rank_group, group);
    }
    return ctpy_comm_borrow(names, self->rank_group);
}

int
ctpy_trainer_world_size(PyObject *op)
{
    const ct_comm *comm = comm_borrow(op);
    return comm == NULL ? -1 : comm->world_size;
}

int
ctpy_trainer_reduce_span(PyObject *op, const ct_span *span, ct_reduce_op how)
{
    const ct_request request = {.what = CT_ALL_REDUCE, .op = how, .in = *span};
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->rank_group);
    int result = ctpy_comm_run(ctpy_state_borrow(op), group, &request);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how)
{
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->rank_group);
    int result =
        ctpy_comm_reduce_numbers(ctpy_state_borrow(op), group, NULL, values, n, how);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n)
{
    return ctpy_trainer_reduce_span(op, &(ct_span){values, n, CT_I64}, CT_REDUCE_SUM);
}

bool
ctpy_trainer_is_alone(const PyObject *op)
{
    PyObject *group = ((const Trainer *)op)->rank_group;
    return !is_open(group) || ((Communicator *)group)->comm->world_size == 1;
}

static ct_status
check_group(PyObject *op, PyObject *group, ct_error *err)
{
    const ctpy_state *state = ctpy_state_borrow(op);
    if (group == NULL || !PyObject_TypeCheck(group, state->Communicator) ||
        !is_open(group)) {
        return CT_OK;
    }
    ct_comm *comm = ((Communicator *)group)->comm;
    ct_comm *on_gpu = comm->on_gpu == NULL ? comm : comm->on_gpu;
    return ct_comm_check(on_gpu, err);
}

int
ctpy_trainer_check_collectives(PyObject *op)
{
    const Trainer *self = (const Trainer *)op;
    ct_error err;
    ct_status status = check_group(op, self->rank_group, &err);
    if (status == CT_OK) {
        status = check_group(op, self->shard_group, &err);
    }
    if (status == CT_OK) {
        status = check_group(op, self->replica_group, &err);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

PyObject *
ctpy_trainer_get_communicator(PyObject *op, void *Py_UNUSED(closure))
{
    return comm_borrow(op) == NULL ? NULL : Py_NewRef(((Trainer *)op)->rank_group);
}

static const char Trainer__leave_ranks_doc[] =
    "_leave_ranks($self, /)\n--\n\n"
    "Close the group, if the trainer has joined other ranks, so that none waits for\n"
    "this rank. Raises RuntimeError while a collective is under way.";

static PyObject *
Trainer__leave_ranks(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return ctpy_trainer_is_alone(op)
               ? Py_NewRef(Py_None)
               : PyObject_CallMethod(((Trainer *)op)->rank_group, "close", NULL);
}

static const char Trainer__sum_over_ranks_doc[] =
    "_sum_over_ranks($self, a, b, /)\n--\n\n"
    "Return the sums over all ranks, which all have to call it, of two numbers.";

static PyObject *
Trainer__sum_over_ranks(PyObject *op, PyObject *args)
{
    double sums[2];
    return PyArg_ParseTuple(args, "dd:_sum_over_ranks", &sums[0], &sums[1]) &&
                   ctpy_trainer_reduce(op, sums, 2, CT_REDUCE_SUM) == 0
               ? Py_BuildValue("(dd)", sums[0], sums[1])
               : NULL;
}

PyMethodDef Trainer_engine_run_methods[] = {
    {"_call_hook",      (PyCFunction)(void (*)(void))Trainer__call_hook,
     METH_FASTCALL | METH_KEYWORDS,                                                    Trainer__call_hook_doc  },
    {"_leave_ranks",    Trainer__leave_ranks,                            METH_NOARGS,  Trainer__leave_ranks_doc},
    {"_sum_over_ranks", Trainer__sum_over_ranks,                         METH_VARARGS,
     Trainer__sum_over_ranks_doc                                                                               },
    {NULL,              NULL,                                            0,            NULL                    },
};
