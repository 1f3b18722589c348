/* ctrainer._C.CollectiveWork: a collective that has begun and is to be waited for. */
#include "binding/comm/communicator.h"

typedef struct CollectiveWork {
    PyObject_HEAD
    PyObject *communicator, *tensors; /* NULL once it has ended */
    ct_work *work;                    /* NULL: it ended when it began */
} CollectiveWork;

PyObject *
ctpy_work_new(ctpy_state *state, PyObject *communicator, PyObject *tensors,
              ct_work *work)
{
    PyTypeObject *type = state->CollectiveWork;
    CollectiveWork *self = (CollectiveWork *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->communicator = Py_NewRef(communicator);
        self->tensors = Py_NewRef(tensors);
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
    ct_status status;
    self->work = NULL;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_wait(group->comm, work, err);
    Py_END_ALLOW_THREADS
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

/* The backend may still write into the tensors: they must not go before it has ended.
 * In a forked child nothing is under way. */
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
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)CollectiveWork_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
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

static PyMethodDef CollectiveWork_methods[] = {
    {"wait", CollectiveWork_wait, METH_NOARGS, wait_doc},
    {NULL,   NULL,                0,           NULL    },
};

PyDoc_STRVAR(
    CollectiveWork_doc,
    "A collective that has begun: what Communicator returns for async_op=True.\n"
    "\n"
    "It keeps the tensors alive; dropping it waits for the collective.");

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
