/* ctrainer._C.Communicator: a group of ranks, as core/ct_comm.h has them. */
#include "binding/communicator.h"

#include "binding/buffer.h"

#include <stdbool.h>
#include <string.h>

/* ---- lifetime ----------------------------------------------------------------------
 */

PyObject *
ctpy_communicator_steal(PyTypeObject *type, ct_comm *comm)
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op == NULL) {
        comm->ops->free(comm);
        return NULL;
    }
    ((Communicator *)op)->comm = comm;
    return op;
}

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

static void
leave(Communicator *self)
{
    ct_comm *comm = self->comm;
    self->comm = NULL;
    if (comm != NULL) {
        comm->ops->free(comm);
    }
}

static void
Communicator_dealloc(PyObject *op)
{
    leave((Communicator *)op);
    ctpy_leaf_dealloc(op);
}

ct_comm *
ctpy_comm_borrow(ctpy_state *state, PyObject *op)
{
    if (!PyObject_TypeCheck(op, state->Communicator)) {
        PyErr_Format(PyExc_TypeError, "expected a ctrainer.Communicator, got a %.200s",
                     Py_TYPE(op)->tp_name);
        return NULL;
    }
    ct_comm *comm = ((Communicator *)op)->comm;
    if (comm == NULL) {
        PyErr_SetString(PyExc_ValueError, "this Communicator has been closed");
    }
    return comm;
}

PyDoc_STRVAR(close_doc,
             "close($self, /)\n--\n\n"
             "Leave the group; the others' collectives then fail. Closing twice is "
             "fine.\n\n"
             "Raises RuntimeError while a collective is under way.");

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

/* ---- running a request -------------------------------------------------------------
 */

int
ctpy_comm_run(ctpy_state *state, PyObject *op, const ct_request *request)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_run(comm, request, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Waits for work that nobody can be given, and leaves the exception that says so. */
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
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return NULL;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_start(comm, request, &work, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *made = ctpy_work_new(state, op, tensors, work);
    if (made == NULL) {
        abandon(op, comm, work);
    }
    return made;
}

/* Fills *span from a tensor or array that the result is written into. */
static int
span_of(ctpy_state *state, PyObject *op, const char *what, ct_span *span)
{
    const ctpy_place place = {.what = what, .group = -1};
    ctpy_view view;
    if (ctpy_view_of(state, op, &place, &view) < 0) {
        return -1;
    }
    if (view.readonly) {
        PyErr_Format(PyExc_ValueError, "%s is read-only; a collective writes into it",
                     what);
        return -1;
    }
    *span = view.span;
    return 0;
}

static int
op_of(const char *name, ct_reduce_op *op)
{
    static const struct {
        const char *name;
        ct_reduce_op op;
    } ops[] = {
        {"sum",  CT_REDUCE_SUM },
        {"mean", CT_REDUCE_MEAN},
        {"max",  CT_REDUCE_MAX },
        {"min",  CT_REDUCE_MIN },
    };
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        if (strcmp(ops[i].name, name) == 0) {
            *op = ops[i].op;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op is '%s'; expected sum, mean, max or min", name);
    return -1;
}

/* Runs the request on one tensor or two, or begins it. */
static PyObject *
collect(PyObject *op, ct_request *request, PyObject *out, PyObject *in, int begins)
{
    ctpy_state *state = ctpy_state_borrow(op);
    if (span_of(state, in, out == NULL ? "tensor" : "in_", &request->in) < 0 ||
        (out != NULL && span_of(state, out, "out", &request->out) < 0)) {
        return NULL;
    }
    if (!begins) {
        return ctpy_comm_run(state, op, request) < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *tensors = PyTuple_Pack(2, in, out == NULL ? Py_None : out);
    PyObject *work = tensors == NULL ? NULL : start(state, op, request, tensors);
    Py_XDECREF(tensors);
    return work;
}

/* ---- the collectives ---------------------------------------------------------------
 */

PyDoc_STRVAR(all_reduce_doc,
             "all_reduce($self, tensor, op='sum', *, async_op=False)\n--\n\n"
             "Replace the elements of tensor by their sum, mean, max or min over all "
             "ranks.\n\n"
             "tensor: a tensor or array without gaps in host memory, of the same "
             "length and\ndtype on every rank; float64, float32, bfloat16, float16, "
             "int64 and what else\nthe backend has. async_op: return a CollectiveWork "
             "at once.\n\n"
             "Raises ValueError for operands that do not fit, RuntimeError naming the\n"
             "collective and the rank when other ranks fail or stay away.");

static PyObject *
Communicator_all_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor", "op", "async_op", NULL};
    ct_request request = {.what = CT_ALL_REDUCE};
    const char *reduce = "sum";
    PyObject *tensor;
    int begins = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s$p:all_reduce", names, &tensor,
                                     &reduce, &begins) ||
        op_of(reduce, &request.op) < 0) {
        return NULL;
    }
    return collect(op, &request, NULL, tensor, begins);
}

PyDoc_STRVAR(
    all_gather_doc,
    "all_gather($self, out, in_, *, async_op=False)\n--\n\n"
    "Fill out with in_ of every rank, in rank order: world_size times as long.");

static PyObject *
Communicator_all_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"out", "in_", "async_op", NULL};
    ct_request request = {.what = CT_ALL_GATHER};
    PyObject *out, *in;
    int begins = false;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:all_gather", names, &out,
                                       &in, &begins)
               ? collect(op, &request, out, in, begins)
               : NULL;
}

PyDoc_STRVAR(reduce_scatter_doc,
             "reduce_scatter($self, out, in_, op='sum', *, async_op=False)\n--\n\n"
             "Reduce in_ over all ranks and keep this rank's part, len(in_) / "
             "world_size.");

static PyObject *
Communicator_reduce_scatter(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"out", "in_", "op", "async_op", NULL};
    ct_request request = {.what = CT_REDUCE_SCATTER};
    const char *reduce = "sum";
    PyObject *out, *in;
    int begins = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|s$p:reduce_scatter", names, &out,
                                     &in, &reduce, &begins) ||
        op_of(reduce, &request.op) < 0) {
        return NULL;
    }
    return collect(op, &request, out, in, begins);
}

PyDoc_STRVAR(all_to_all_doc,
             "all_to_all($self, out, in_, *, async_op=False)\n--\n\n"
             "Send part r of in_ to rank r, and receive its part for this rank as part "
             "r of\nout. Both have a part of the same length for every rank.");

static PyObject *
Communicator_all_to_all(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"out", "in_", "async_op", NULL};
    ct_request request = {.what = CT_ALL_TO_ALL};
    PyObject *out, *in;
    int begins = false;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:all_to_all", names, &out,
                                       &in, &begins)
               ? collect(op, &request, out, in, begins)
               : NULL;
}

PyDoc_STRVAR(broadcast_doc,
             "broadcast($self, tensor, root=0, *, async_op=False)\n--\n\n"
             "Replace the elements of tensor by those of rank root.");

static PyObject *
Communicator_broadcast(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor", "root", "async_op", NULL};
    ct_request request = {.what = CT_BROADCAST};
    PyObject *tensor;
    int begins = false;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|i$p:broadcast", names, &tensor,
                                       &request.root, &begins)
               ? collect(op, &request, NULL, tensor, begins)
               : NULL;
}

PyDoc_STRVAR(barrier_doc, "barrier($self, /)\n--\n\nWait until every rank has come.");

static PyObject *
Communicator_barrier(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const ct_request request = {.what = CT_BARRIER};
    return ctpy_comm_run(ctpy_state_borrow(op), op, &request) < 0 ? NULL
                                                                  : Py_NewRef(Py_None);
}

/* ---- attributes and tables ---------------------------------------------------------
 */

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

static PyGetSetDef Communicator_getset[] = {
    {"backend",    Communicator_backend,    NULL, "What carries it: 'self', 'python', ...",
     NULL                                                                                       },
    {"rank",       Communicator_rank,       NULL, "This rank, in [0, world_size).",         NULL},
    {"world_size", Communicator_world_size, NULL, "How many ranks there are.",              NULL},
    {NULL,         NULL,                    NULL, NULL,                                     NULL},
};

#define KEYWORDS(name)                                                                 \
    {#name, (PyCFunction)(void (*)(void))Communicator_##name,                          \
     METH_VARARGS | METH_KEYWORDS, name##_doc}

static PyMethodDef Communicator_methods[] = {
    KEYWORDS(all_gather),
    KEYWORDS(all_reduce),
    KEYWORDS(all_to_all),
    {"barrier",         Communicator_barrier,                                      METH_NOARGS, barrier_doc                     },
    KEYWORDS(broadcast),
    {"broadcast_bytes", (PyCFunction)(void (*)(void))Communicator_broadcast_bytes,
                  METH_VARARGS | METH_KEYWORDS,                                                              Communicator_broadcast_bytes_doc},
    {"close",           Communicator_close,                                        METH_NOARGS, close_doc                       },
    {"gather_bytes",    Communicator_gather_bytes,                                 METH_O,      Communicator_gather_bytes_doc   },
    KEYWORDS(reduce_scatter),
    {NULL,              NULL,                                                      0,           NULL                            },
};

PyDoc_STRVAR(
    Communicator_doc,
    "Communicator(backend=None)\n--\n\n"
    "A group of ranks and its collectives, which every rank calls in the same order.\n"
    "\n"
    "backend: None, a group of this process alone; or an object with rank, world_size\n"
    "and begin(what, out, in_, dtype, op, root), as\n"
    "ctrainer.comm.process_group.ProcessGroupBackend is for torch.distributed.");

static PyType_Slot Communicator_slots[] = {
    {Py_tp_doc,      (void *)Communicator_doc},
    {Py_tp_new,      Communicator_new        },
    {Py_tp_traverse, ctpy_leaf_traverse      },
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
