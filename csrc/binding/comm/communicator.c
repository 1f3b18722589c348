/* ctrainer._C.Communicator: a group of ranks, as core/comm/comm.h has them. */
#include "binding/comm/communicator.h"

#include "core/comm/history.h"

/* ---- lifetime ----------------------------------------------------------------------
 */

/* A group whose ranks do not compare their requests keeps a history of them. 0, or -1
 * with an exception. */
static int
keep_history(ct_comm *comm)
{
    /* A wrong word is told of on any backend. */
    const int compares = comm->world_size == 1 ? 1 : ctpy_comm_wants_comparison();
    if (compares != 0 || comm->ops->compares) {
        return compares < 0 ? -1 : 0;
    }
    comm->history = ct_history_new();
    if (comm->history == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void
free_comm(ct_comm *comm)
{
    if (comm != NULL) {
        ct_history_free(comm->history);
        comm->ops->free(comm);
    }
}

PyObject *
ctpy_communicator_steal(PyTypeObject *type, ct_comm *comm)
{
    PyObject *op = keep_history(comm) < 0 ? NULL : type->tp_alloc(type, 0);
    if (op == NULL) {
        free_comm(comm);
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
    free_comm(comm);
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

const char Communicator_close_doc[] =
    "close($self, /)\n--\n\n"
    "Leave the group; the others' collectives then fail. Closing twice is "
    "fine.\n\n"
    "Raises RuntimeError while a collective is under way.";

PyObject *
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

#define METHOD_FLAGS_NOARGS METH_NOARGS
#define METHOD_FLAGS_O METH_O
#define METHOD_FLAGS_KEYWORDS (METH_VARARGS | METH_KEYWORDS)

static PyMethodDef Communicator_methods[] = {
#define CTPY_METHOD(name, flags)                                                       \
    {#name, (PyCFunction)(void (*)(void))Communicator_##name, METHOD_FLAGS_##flags,    \
     Communicator_##name##_doc},
#include "binding/comm/communicator_methods.def"
#undef CTPY_METHOD
    { NULL, NULL, 0, NULL},
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
