/* ctrainer._C.Communicator, a group of ranks as core/comm/comm.h has it, and
 * CollectiveWork, a collective that has begun.
 *
 * A communicator counts the calls that are under way (`busy`) and cannot be closed
 * meanwhile. A work keeps the tensors alive until the collective has ended, because the
 * backend may write up to then. */
#include "binding/comm/communicator.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"

#include <stdbool.h>
#include <string.h>

/* ---- lifetime -------------------------------------------------------------------- */

static PyObject *
Communicator_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"backend", NULL};
    PyObject *backend = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:Communicator", names,
                                     &backend)) {
        return NULL;
    }
    ct_comm *comm =
        backend == Py_None ? ct_comm_self_new() : ctpy_comm_python_new(backend);
    if (comm == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return ctpy_communicator_steal(type, comm);
}

PyDoc_STRVAR(
    Communicator_doc,
    "Communicator(backend=None)\n--\n\n"
    "A group of ranks and its collectives, which every rank calls in the same order.\n"
    "\n"
    "Args:\n"
    "    backend: None, a group of this process alone; or an object with rank,\n"
    "        world_size and begin(what, out, in_, dtype, op, root), as\n"
    "        ctrainer.comm.process_group.ProcessGroupBackend is for "
    "torch.distributed.\n"
    "\n"
    "Args of every method:\n"
    "    tensor, in_, out: Tensors or arrays without gaps in host memory, of the same\n"
    "        length and dtype on every rank.\n"
    "    op (str): 'sum', 'mean', 'max' or 'min'.\n"
    "    root (int): A rank.\n"
    "    async_op (bool): Return a CollectiveWork at once, and None otherwise.\n\n"
    "Example:\n"
    "    >>> from ctrainer import Communicator\n"
    "    >>> Communicator().world_size\n"
    "    1");

static void
leave(Communicator *self)
{
    ct_comm *comm = self->comm;
    /* Before the call, as a Python backend may run code there: nobody may find a group
     * that is being freed. */
    self->comm = NULL;
    ctpy_comm_free(comm);
}

static int
Communicator_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((Communicator *)op)->over);
    return 0;
}

static int
Communicator_clear(PyObject *op)
{
    Py_CLEAR(((Communicator *)op)->over);
    return 0;
}

static void
Communicator_dealloc(PyObject *op)
{
    leave((Communicator *)op);
    ctpy_dealloc(op, Communicator_clear);
}

static const char Communicator_close_doc[] =
    "close($self, /)\n--\n\n"
    "Leave the group; the others' collectives then fail. Closing twice is "
    "fine.\n\n"
    "Raises RuntimeError while a collective is under way.";

static PyObject *
Communicator_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    Communicator *self = (Communicator *)op;
    if (self->busy > 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "cannot close a Communicator while %zd of its collectives are "
                     "under way; wait for them first",
                     self->busy);
        return NULL;
    }
    leave(self);
    Py_RETURN_NONE;
}

static const char Communicator_serve_gpu_doc[] =
    "serve_gpu($self, group, /)\n--\n\n"
    "Use a group over NCCL of the same ranks for tensors in the memory of its GPU.\n\n"
    "group: closed by this call, as it belongs to this one.\n\n"
    "Raises ValueError for a group of other ranks, one for the host's memory, or "
    "where\n"
    "there is one already.";

static PyObject *
Communicator_serve_gpu(PyObject *op, PyObject *group)
{
    ctpy_state *state = ctpy_state_borrow(op);
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_comm *on_gpu = comm == NULL ? NULL : ctpy_comm_borrow(state, group);
    if (on_gpu == NULL) {
        return NULL;
    }
    if (comm->ops->takes_device_memory || !on_gpu->ops->takes_device_memory ||
        comm->on_gpu != NULL || ((Communicator *)group)->busy > 0 ||
        comm->rank != on_gpu->rank || comm->world_size != on_gpu->world_size) {
        return PyErr_Format(
            PyExc_ValueError,
            "rank %d of %d, by %s, cannot serve a GPU through rank %d of %d, by %s: "
            "expected an idle group over NCCL of the same ranks, and only one",
            comm->rank, comm->world_size, comm->ops->name, on_gpu->rank,
            on_gpu->world_size, on_gpu->ops->name);
    }
    ((Communicator *)group)->comm = NULL;
    on_gpu->owned_by = comm;
    comm->on_gpu = on_gpu;
    Py_RETURN_NONE;
}

/* ---- attributes ------------------------------------------------------------------ */

static PyObject *
Communicator_gpu(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    return comm == NULL           ? NULL
           : comm->on_gpu == NULL ? Py_NewRef(Py_None)
                                  : PyLong_FromLong(comm->on_gpu->gpu);
}

static PyObject *
Communicator_rank(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    return comm == NULL ? NULL : PyLong_FromLong(comm->rank);
}

static PyObject *
Communicator_world_size(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    return comm == NULL ? NULL : PyLong_FromLong(comm->world_size);
}

static PyObject *
Communicator_backend(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    return comm == NULL ? NULL : PyUnicode_FromString(comm->ops->name);
}

static PyObject *
Communicator_compares(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    return comm == NULL ? NULL : PyBool_FromLong(comm->history == NULL);
}

/* ---- CollectiveWork -------------------------------------------------------------- */

typedef struct CollectiveWork {
    PyObject_HEAD
    PyObject *communicator, *tensors; /* NULL once it has ended */
    ct_work *work;                    /* NULL: ended at the start */
} CollectiveWork;

PyDoc_STRVAR(
    CollectiveWork_doc,
    "A collective that has begun: what Communicator returns for async_op=True.\n"
    "\n"
    "It keeps the tensors alive; dropping it waits for the collective.");

static PyObject *
work_new(ctpy_state *state, PyObject *communicator, PyObject *tensors, ct_work *work)
{
    PyTypeObject *type = state->CollectiveWork;
    CollectiveWork *self = (CollectiveWork *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->communicator = Py_NewRef(communicator);
        self->tensors = Py_NewRef(tensors);
        /* Owned from here on; the caller waits for the work itself if this fails. */
        self->work = work;
        ((Communicator *)communicator)->busy++;
    }
    return (PyObject *)self;
}

/* Waits without the GIL. 0, or -1 with *err filled. */
static int
end(CollectiveWork *self, ct_error *err)
{
    Communicator *group = (Communicator *)self->communicator;
    ct_work *work = self->work;
    /* Before the GIL is released: nobody waits for the same work twice. */
    self->work = NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const ct_status status = ct_comm_wait(group->comm, work, err);
    PyEval_RestoreThread(thread);
    group->busy--;
    return status == CT_OK ? 0 : -1;
}

static int
CollectiveWork_traverse(PyObject *op, visitproc visit, void *arg)
{
    CollectiveWork *self = (CollectiveWork *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->communicator);
    Py_VISIT(self->tensors);
    return 0;
}

/* Waits first, because the backend may still write into the tensors. In a forked child
 * nothing is under way. */
static int
CollectiveWork_clear(PyObject *op)
{
    CollectiveWork *self = (CollectiveWork *)op;
    ct_error err;
    Communicator *group = (Communicator *)self->communicator;
    if (group != NULL && !ct_comm_is_here(group->comm)) {
        group->busy--;
    }
    else if (group != NULL && end(self, &err) < 0) {
        /* A finalizer cannot raise, and a failed collective must not pass in
         * silence. */
        (void)ctpy_raise(&err);
        PyErr_WriteUnraisable(op);
    }
    Py_CLEAR(self->communicator);
    Py_CLEAR(self->tensors);
    return 0;
}

static void
CollectiveWork_dealloc(PyObject *op)
{
    ctpy_dealloc(op, CollectiveWork_clear);
}

PyDoc_STRVAR(
    wait_doc,
    "wait($self, /)\n--\n\n"
    "Wait until the collective has ended; its tensors then hold the result.\n\n"
    "Nothing happens where it has ended before. Raises RuntimeError, with the\n"
    "collective and the rank, when other ranks failed to come.");

static PyObject *
CollectiveWork_wait(PyObject *op, PyObject *Py_UNUSED(unused))
{
    CollectiveWork *self = (CollectiveWork *)op;
    ct_error err;
    if (self->communicator == NULL) {
        Py_RETURN_NONE;
    }
    const int failed = end(self, &err) < 0;
    Py_CLEAR(self->communicator);
    Py_CLEAR(self->tensors);
    return failed ? ctpy_raise(&err) : Py_NewRef(Py_None);
}

/* ---- collectives of tensors ------------------------------------------------------ */

/* Waits for work that cannot be returned to Python; the exception stays set. */
static void
abandon(PyObject *op, ct_comm *comm, ct_work *work)
{
    PyObject *type, *value, *trace;
    ct_error err;
    PyErr_Fetch(&type, &value, &trace);
    if (ct_comm_wait(comm, work, &err) != CT_OK) {
        (void)ctpy_raise(&err);
        PyErr_WriteUnraisable(op);
    }
    PyErr_Restore(type, value, trace);
}

static PyObject *
start(ctpy_state *state, PyObject *op, const ct_request *request, PyObject *tensors)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_work *work = NULL;
    ct_error err;
    if (comm == NULL) {
        return NULL;
    }
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status = ct_comm_start(comm, request, &work, &err);
    ctpy_comm_leave(op, thread);
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *made = work_new(state, op, tensors, work);
    if (made == NULL) {
        /* Without an object nobody would wait, and the backend would write into freed
         * memory. */
        abandon(op, comm, work);
    }
    return made;
}

/* The core's names, so that messages and arguments agree. */
static int
op_of(const char *name, ct_reduce_op *op)
{
    for (int i = CT_REDUCE_SUM; i <= CT_REDUCE_MIN; i++) {
        if (strcmp(ct_reduce_op_name((ct_reduce_op)i), name) == 0) {
            *op = (ct_reduce_op)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op is '%s'; expected sum, mean, max or min", name);
    return -1;
}

/* Runs or begins the request on a tensor, or on two. */
static PyObject *
collect(PyObject *op, ct_request *request, PyObject *out, PyObject *in, int begins)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const ct_comm *comm = ctpy_comm_borrow(state, op);
    if (comm == NULL ||
        ctpy_comm_span(state, comm, in, out == NULL ? "tensor" : "in_", &request->in) <
            0 ||
        (out != NULL && ctpy_comm_span(state, comm, out, "out", &request->out) < 0)) {
        return NULL;
    }
    if (!begins) {
        return ctpy_comm_run(state, op, request) < 0 ? NULL : Py_NewRef(Py_None);
    }
    /* Owned by the work: the caller may drop the tensors at once. */
    PyObject *tensors = PyTuple_Pack(2, in, out == NULL ? Py_None : out);
    PyObject *work = tensors == NULL ? NULL : start(state, op, request, tensors);
    Py_XDECREF(tensors);
    return work;
}

/* Parses the arguments that `names` and `format` list, and runs or begins the
 * collective. */
static PyObject *
parse_and_collect(PyObject *op, PyObject *args, PyObject *kwargs, ct_collective what,
                  const char *format, char **names)
{
    ct_request request = {.what = what};
    PyObject *out = NULL, *in = NULL;
    const char *reduce = "sum";
    int begins = false;
    void *to[4] = {NULL};
    for (int i = 0; names[i] != NULL; i++) {
        /* One function for all methods: names decide where each argument goes. */
        to[i] = strcmp(names[i], "out") == 0        ? (void *)&out
                : strcmp(names[i], "op") == 0       ? (void *)&reduce
                : strcmp(names[i], "root") == 0     ? (void *)&request.root
                : strcmp(names[i], "async_op") == 0 ? (void *)&begins
                                                    : (void *)&in;
    }
    return PyArg_ParseTupleAndKeywords(args, kwargs, format, names, to[0], to[1], to[2],
                                       to[3]) &&
                   op_of(reduce, &request.op) == 0
               ? collect(op, &request, out, in, begins)
               : NULL;
}

/* The method of a collective, whose arguments `format` and the names behind it list. */
#define COLLECTIVE(name, what, format, ...)                                            \
    static PyObject *Communicator_##name(PyObject *op, PyObject *args,                 \
                                         PyObject *kwargs)                             \
    {                                                                                  \
        static char *names[] = {__VA_ARGS__, NULL};                                    \
        return parse_and_collect(op, args, kwargs, what, format ":" #name, names);     \
    }

static const char Communicator_all_reduce_doc[] =
    "all_reduce($self, tensor, op='sum', *, async_op=False)\n--\n\n"
    "Replace the elements of tensor by their sum, mean, max or min over all "
    "ranks.\n\n"
    "tensor: a tensor or array without gaps in host memory, of the same "
    "length and\ndtype on every rank; float64, float32, bfloat16, float16, "
    "int64 and what else\nthe backend has. async_op: return a CollectiveWork "
    "at once.\n\n"
    "Raises ValueError for operands that do not fit, RuntimeError naming the\n"
    "collective and the rank when other ranks fail or stay away.";

COLLECTIVE(all_reduce, CT_ALL_REDUCE, "O|s$p", "tensor", "op", "async_op")

static const char Communicator_all_gather_doc[] =
    "all_gather($self, out, in_, *, async_op=False)\n--\n\n"
    "Fill out with in_ of every rank, in rank order: world_size times as long.";

COLLECTIVE(all_gather, CT_ALL_GATHER, "OO|$p", "out", "in_", "async_op")

static const char Communicator_reduce_scatter_doc[] =
    "reduce_scatter($self, out, in_, op='sum', *, async_op=False)\n--\n\n"
    "Reduce in_ over all ranks and keep this rank's part, len(in_) / "
    "world_size.";

COLLECTIVE(reduce_scatter, CT_REDUCE_SCATTER, "OO|s$p", "out", "in_", "op", "async_op")

static const char Communicator_all_to_all_doc[] =
    "all_to_all($self, out, in_, *, async_op=False)\n--\n\n"
    "Send part r of in_ to rank r, and receive its part for this rank as part "
    "r of\nout. Both have a part of the same length for every rank.";

COLLECTIVE(all_to_all, CT_ALL_TO_ALL, "OO|$p", "out", "in_", "async_op")

static const char Communicator_broadcast_doc[] =
    "broadcast($self, tensor, root=0, *, async_op=False)\n--\n\n"
    "Replace the elements of tensor by those of rank root.";

COLLECTIVE(broadcast, CT_BROADCAST, "O|i$p", "tensor", "root", "async_op")

static const char Communicator_reduce_doc[] =
    "reduce($self, tensor, root=0, op='sum', *, async_op=False)\n--\n\n"
    "On rank root replace the elements of tensor by their sum, mean, max or min over\n"
    "all ranks. What the other ranks' tensors hold afterwards is not said.";

COLLECTIVE(reduce, CT_REDUCE, "O|is$p", "tensor", "root", "op", "async_op")
#undef COLLECTIVE

static const char Communicator_barrier_doc[] =
    "barrier($self, /)\n--\n\nWait until every rank has come.";

static PyObject *
Communicator_barrier(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const ct_request request = {.what = CT_BARRIER};
    return ctpy_comm_run(ctpy_state_borrow(op), op, &request) < 0 ? NULL
                                                                  : Py_NewRef(Py_None);
}

static const char Communicator_check_doc[] =
    "check($self, /)\n--\n\n"
    "Raise RuntimeError where a collective that a stream waited for has failed, so "
    "that\n"
    "the stream continued with wrong values: for a host that has waited for the "
    "stream.";

static PyObject *
Communicator_check(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    ct_error err;
    if (comm == NULL) {
        return NULL;
    }
    return ct_comm_check(comm->on_gpu == NULL ? comm : comm->on_gpu, &err) == CT_OK
               ? Py_NewRef(Py_None)
               : ctpy_raise(&err);
}

/* ---- numbers --------------------------------------------------------------------- */

static const char Communicator_sum_numbers_doc[] =
    "sum_numbers($self, step, values, /)\n--\n\n"
    "Return the sums of a list of floats over all ranks, as a list.\n\n"
    "step: what this rank is doing, or None. values: as many floats on all ranks.\n"
    "Ranks in different steps all raise a ValueError that says which rank is in which.";

static int
read_numbers(PyObject *list, double *values)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        values[i] = PyFloat_AsDouble(PyList_GET_ITEM(list, i));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
list_numbers(const double *values, Py_ssize_t n)
{
    PyObject *made = PyList_New(n);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        PyObject *number = PyFloat_FromDouble(values[i]);
        if (number == NULL) {
            Py_CLEAR(made);
            break;
        }
        PyList_SET_ITEM(made, i, number);
    }
    return made;
}

static PyObject *
Communicator_sum_numbers(PyObject *op, PyObject *args)
{
    PyObject *list, *made = NULL;
    const char *step;
    ct_label label = {.is_step = true};
    if (!PyArg_ParseTuple(args, "zO!:sum_numbers", &step, &PyList_Type, &list)) {
        return NULL;
    }
    const Py_ssize_t n = PyList_GET_SIZE(list);
    double *values = ct_calloc((size_t)n, sizeof *values);
    if (values == NULL) {
        return PyErr_NoMemory();
    }
    if (step != NULL) {
        ct_label_set(&label, step, 0);
        label.is_step = true;
    }
    if (read_numbers(list, values) == 0 &&
        ctpy_comm_reduce_numbers(ctpy_state_borrow(op), op,
                                 step == NULL ? NULL : &label, values, (size_t)n,
                                 CT_REDUCE_SUM) == 0) {
        made = list_numbers(values, n);
    }
    ct_free(values);
    return made;
}

/* ---- bytes of any length --------------------------------------------------------- */

static PyObject *
list_gathered(const ct_gathered *gathered, int world_size)
{
    PyObject *list = PyList_New(world_size);
    for (Py_ssize_t r = 0; list != NULL && r < world_size; r++) {
        const char *data = (const char *)gathered->data + (size_t)r * gathered->stride;
        /* A rank without bytes may have no address. */
        PyObject *bytes = PyBytes_FromStringAndSize(gathered->n[r] == 0 ? "" : data,
                                                    (Py_ssize_t)gathered->n[r]);
        if (bytes == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, r, bytes);
        }
    }
    return list;
}

static const char Communicator_gather_bytes_doc[] =
    "gather_bytes($self, data, /)\n--\n\n"
    "Return what every rank gave, a list of bytes in rank order, on every rank.\n"
    "\n"
    "Each rank's data may have its own length.";

PyObject *
Communicator_gather_bytes(PyObject *op, PyObject *data)
{
    ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    Py_buffer view;
    if (comm == NULL || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    ct_gathered gathered;
    ct_error err;
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status =
        ct_comm_gather_bytes(comm, view.buf, (size_t)view.len, &gathered, &err);
    ctpy_comm_leave(op, thread);
    /* The view kept the bytes in place while the GIL was released. */
    PyBuffer_Release(&view);
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *list = list_gathered(&gathered, comm->world_size);
    ct_gathered_fini(&gathered);
    return list;
}

/* The root's length on every rank, or -1 with an exception. */
static Py_ssize_t
agree_on_length(ctpy_state *state, PyObject *op, Py_ssize_t length, int root)
{
    int64_t n = length;
    const ct_request request = {
        .what = CT_BROADCAST, .root = root, .in = {&n, 1, CT_I64}
    };
    return ctpy_comm_run(state, op, &request) < 0 ? -1 : (Py_ssize_t)n;
}

/* Sends the bytes of `view` on the root; elsewhere view is NULL. */
static PyObject *
broadcast(PyObject *op, const Py_buffer *view, int root)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const Py_ssize_t n = agree_on_length(state, op, view == NULL ? 0 : view->len, root);
    /* The root sends a copy: the caller's buffer is read-only to the collective. */
    PyObject *made =
        n < 0 ? NULL : PyBytes_FromStringAndSize(view == NULL ? NULL : view->buf, n);
    if (made == NULL) {
        return NULL;
    }
    const ct_request request = {
        .what = CT_BROADCAST,
        .root = root,
        .in = {PyBytes_AS_STRING(made), (size_t)n, CT_U8},
    };
    if (n > 0 && ctpy_comm_run(state, op, &request) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

static const char Communicator_broadcast_bytes_doc[] =
    "broadcast_bytes($self, data, root=0)\n--\n\n"
    "Return the bytes of rank root on every rank; data of the others is not looked at.";

static PyObject *
Communicator_broadcast_bytes(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "root", NULL};
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    PyObject *data;
    Py_buffer view;
    int root = 0;
    if (comm == NULL || !PyArg_ParseTupleAndKeywords(
                            args, kwargs, "O|i:broadcast_bytes", names, &data, &root)) {
        return NULL;
    }
    if (comm->rank != root) {
        return broadcast(op, NULL, root);
    }
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *made = broadcast(op, &view, root);
    PyBuffer_Release(&view);
    return made;
}

/* ---- smaller groups -------------------------------------------------------------- */

static const char Communicator_split_doc[] =
    "split($self, color=None, key=0, *, ranks=None)\n--\n\n"
    "Make a smaller group of the ranks that give the same color.\n\n"
    "color: 0 or more; None: this rank is in no group, and gets None. key: ranks of a\n"
    "group are in the order of their keys, and of their ranks where these are equal.\n"
    "ranks: instead of a color, the ranks of one group in their order, the same on "
    "all\n"
    "ranks. Every rank of this group calls it; the new group stands by itself, with "
    "the\n"
    "same backend and time-out.\n\n"
    "Raises ValueError for colors below 0, ranks that are out of range or repeated, "
    "and\n"
    "backends that have no smaller groups; RuntimeError when other ranks fail.";

/* The color and the key that this rank gives. */
typedef struct wish {
    long long color, key;
} wish;

/* The place of this rank in `ranks` becomes its key. 0 or -1. */
static int
wish_among(const ct_comm *comm, PyObject *ranks, wish *w)
{
    PyObject *list = PySequence_List(ranks), *seen = PySet_New(NULL);
    int status = list == NULL || seen == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        const long rank = PyLong_AsLong(item);
        if ((rank == -1 && PyErr_Occurred()) || PySet_Add(seen, item) < 0) {
            status = -1;
        }
        else if (rank < 0 || rank >= comm->world_size ||
                 PySet_GET_SIZE(seen) != i + 1) {
            PyErr_Format(PyExc_ValueError,
                         "ranks must be different and in [0, %d), got %R",
                         comm->world_size, list);
            status = -1;
        }
        else if (rank == comm->rank) {
            *w = (wish){0, i};
        }
    }
    Py_XDECREF(seen);
    Py_XDECREF(list);
    return status;
}

static int
wish_of(const ct_comm *comm, PyObject *color, PyObject *ranks, wish *w)
{
    if (ranks != Py_None && color != Py_None) {
        PyErr_SetString(PyExc_ValueError, "give a color or ranks, not both");
        return -1;
    }
    if (ranks != Py_None) {
        return wish_among(comm, ranks, w);
    }
    /* The color stays -1: this rank takes part and gets no group. */
    if (color == Py_None) {
        return 0;
    }
    w->color = PyLong_AsLongLong(color);
    if (w->color < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "color must be 0 or more, or None, got %lld",
                     w->color);
    }
    return w->color < 0 ? -1 : 0;
}

static PyObject *
Communicator_split(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"color", "key", "ranks", NULL};
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *color = Py_None, *ranks = Py_None;
    wish w = {.color = -1};
    ct_comm *made = NULL;
    ct_error err;
    ct_comm *comm = ctpy_comm_borrow(state, op);
    if (comm == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OL$O:split", names, &color, &w.key,
                                     &ranks) ||
        wish_of(comm, color, ranks, &w) < 0) {
        return NULL;
    }
    /* Every rank comes here, also for no group: the split is collective. */
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status = ct_comm_split(comm, w.color, w.key, &made, &err);
    ctpy_comm_leave(op, thread);
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    return made == NULL ? Py_NewRef(Py_None)
                        : ctpy_communicator_steal(state->Communicator, made);
}

/* ---- parts of different lengths -------------------------------------------------- */

static PyObject *
gather_padded(PyObject *op, ct_comm *comm, const ct_span *out, const ct_span *in)
{
    /* Before the collective, so that a lack of memory leaves none half done. */
    int64_t *lengths = ct_calloc((size_t)comm->world_size, sizeof *lengths);
    ct_error err;
    if (lengths == NULL) {
        return PyErr_NoMemory();
    }
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status = ct_comm_gather_padded(comm, out, in, lengths, &err);
    ctpy_comm_leave(op, thread);
    PyObject *all = status == CT_OK ? ctpy_int64_tuple(lengths, comm->world_size)
                                    : ctpy_raise(&err);
    PyObject *list = all == NULL ? NULL : PySequence_List(all);
    Py_XDECREF(all);
    ct_free(lengths);
    return list;
}

static const char Communicator_all_gather_padded_doc[] =
    "all_gather_padded($self, out, in_)\n--\n\n"
    "Gather parts of different lengths; return the lengths, a list in rank order.\n"
    "\n"
    "in_: a tensor or array of this rank's length. out: of the same dtype, with a "
    "part\n"
    "for every rank that is as long as the longest in_, or longer; behind a shorter\n"
    "in_, a part of out is filled with zeros. They do not overlap.\n"
    "\n"
    "Raises ValueError on every rank where the operands of one do not fit.";

static PyObject *
Communicator_all_gather_padded(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"out", "in_", NULL};
    ctpy_state *state = ctpy_state_borrow(op);
    const ctpy_place place = {.what = "in_", .group = -1};
    PyObject *out, *in;
    ctpy_view view;
    ct_span to;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:all_gather_padded", names, &out,
                                     &in) ||
        ctpy_view_of(state, in, &place, &view) < 0 ||
        ctpy_comm_span(state, NULL, out, "out", &to) < 0) {
        return NULL;
    }
    ct_comm *comm = ctpy_comm_borrow(state, op);
    return comm == NULL ? NULL : gather_padded(op, comm, &to, &view.span);
}

/* ---- tables ---------------------------------------------------------------------- */

static PyGetSetDef Communicator_getset[] = {
    {"backend",    Communicator_backend,    NULL, "What carries it: 'self', 'python', ...",
     NULL                                                                                       },
    {"compares",   Communicator_compares,   NULL,
     "Do ranks that call for different collectives all raise, without a hang?",             NULL},
    {"gpu",        Communicator_gpu,        NULL, "The GPU of serve_gpu(), or None.",       NULL},
    {"rank",       Communicator_rank,       NULL, "This rank, in [0, world_size).",         NULL},
    {"world_size", Communicator_world_size, NULL, "How many ranks there are.",              NULL},
    {NULL,         NULL,                    NULL, NULL,                                     NULL},
};

#define METHOD(name, flags)                                                            \
    {#name, (PyCFunction)(void (*)(void))Communicator_##name, flags,                   \
     Communicator_##name##_doc}
static PyMethodDef Communicator_methods[] = {
    METHOD(all_gather, METH_VARARGS | METH_KEYWORDS),
    METHOD(all_gather_padded, METH_VARARGS | METH_KEYWORDS),
    METHOD(all_reduce, METH_VARARGS | METH_KEYWORDS),
    METHOD(all_to_all, METH_VARARGS | METH_KEYWORDS),
    METHOD(barrier, METH_NOARGS),
    METHOD(check, METH_NOARGS),
    METHOD(broadcast, METH_VARARGS | METH_KEYWORDS),
    METHOD(broadcast_bytes, METH_VARARGS | METH_KEYWORDS),
    METHOD(close, METH_NOARGS),
    METHOD(gather_bytes, METH_O),
    METHOD(reduce, METH_VARARGS | METH_KEYWORDS),
    METHOD(reduce_scatter, METH_VARARGS | METH_KEYWORDS),
    METHOD(serve_gpu, METH_O),
    METHOD(split, METH_VARARGS | METH_KEYWORDS),
    METHOD(sum_numbers, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
#undef METHOD

static PyType_Slot Communicator_slots[] = {
    {Py_tp_doc,      (void *)Communicator_doc},
    {Py_tp_new,      Communicator_new        },
    {Py_tp_traverse, Communicator_traverse   },
    {Py_tp_clear,    Communicator_clear      },
    {Py_tp_dealloc,  Communicator_dealloc    },
    {Py_tp_methods,  Communicator_methods    },
    {Py_tp_getset,   Communicator_getset     },
    {0,              NULL                    },
};

PyType_Spec Communicator_spec = {
    .name = "ctrainer._C.Communicator",
    .basicsize = sizeof(Communicator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Communicator_slots,
};

static PyMethodDef CollectiveWork_methods[] = {
    {"wait", CollectiveWork_wait, METH_NOARGS, wait_doc},
    {NULL,   NULL,                0,           NULL    },
};

static PyType_Slot CollectiveWork_slots[] = {
    {Py_tp_doc,      (void *)CollectiveWork_doc},
    {Py_tp_traverse, CollectiveWork_traverse   },
    {Py_tp_clear,    CollectiveWork_clear      },
    {Py_tp_dealloc,  CollectiveWork_dealloc    },
    {Py_tp_methods,  CollectiveWork_methods    },
    {0,              NULL                      },
};

PyType_Spec CollectiveWork_spec = {
    .name = "ctrainer._C.CollectiveWork",
    .basicsize = sizeof(CollectiveWork),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = CollectiveWork_slots,
};
