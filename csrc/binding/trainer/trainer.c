/* ctrainer._C.Trainer: the type, its private state and its method table. */
#include "binding/trainer/trainer_noise.h"
#include "binding/engine/ranks.h"

static PyObject *
Trainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    PyObject *none = PyTuple_New(0);
    /* object's own refuses a class with abstract methods. */
    PyObject *op = none == NULL ? NULL : PyBaseObject_Type.tp_new(type, none, NULL);
    Py_XDECREF(none);
    if (op != NULL) {
        Trainer *self = (Trainer *)op;
        self->grad_norm = Py_NAN;
        self->signatures = PyDict_New();
        if (self->signatures == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

/* Takes whatever a cooperative __init__ passes on: ctrainer.Trainer has used it. */
static int
Trainer_init(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args),
             PyObject *Py_UNUSED(kw))
{
    return 0;
}

static int
Trainer_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((Trainer *)op)->signatures);
    Py_VISIT(((Trainer *)op)->device_loss);
    Py_VISIT(((Trainer *)op)->grad_metrics);
    Py_VISIT(((Trainer *)op)->noise.device_copies);
    Py_VISIT(((Trainer *)op)->writer);
    Py_VISIT(((Trainer *)op)->staged);
    Py_VISIT(((Trainer *)op)->group);
    return 0;
}

static int
Trainer_clear(PyObject *op)
{
    Py_CLEAR(((Trainer *)op)->signatures);
    Py_CLEAR(((Trainer *)op)->device_loss);
    Py_CLEAR(((Trainer *)op)->grad_metrics);
    Py_CLEAR(((Trainer *)op)->noise.device_copies);
    Py_CLEAR(((Trainer *)op)->writer);
    Py_CLEAR(((Trainer *)op)->staged);
    Py_CLEAR(((Trainer *)op)->group);
    return 0;
}

static void
Trainer_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)Trainer_clear(op);
    ctpy_noise_end(op);
    type->tp_free(op);
    Py_DECREF(type);
}

#define METHOD_FLAGS_NOARGS METH_NOARGS
#define METHOD_FLAGS_O METH_O
#define METHOD_FLAGS_KEYWORDS (METH_VARARGS | METH_KEYWORDS)

static PyMethodDef Trainer_methods[] = {
#define CTPY_METHOD(name, flags)                                                       \
    {#name, (PyCFunction)(void (*)(void))Trainer_##name, METHOD_FLAGS_##flags,         \
     Trainer_##name##_doc},
#include "binding/trainer/trainer_methods.def"
#undef CTPY_METHOD
    { NULL, NULL, 0, NULL},
};

static PyGetSetDef Trainer_getset[] = {
    {"_communicator", ctpy_trainer_get_communicator, NULL,
     "The Communicator of the run's ranks, joined when it is first asked for.", NULL},
    {NULL,            NULL,                          NULL, NULL,                NULL},
};

PyDoc_STRVAR(
    Trainer_doc,
    "Trainer(*args, **kwargs)\n--\n\n"
    "The loops of training and evaluation; ctrainer.Trainer is its public face.\n"
    "\n"
    "Every hook is called by attribute lookup on the instance, so overrides,\n"
    "mixins and functions set on an instance win.");

static PyType_Slot Trainer_slots[] = {
    {Py_tp_doc,      (void *)Trainer_doc},
    {Py_tp_new,      Trainer_new        },
    {Py_tp_init,     Trainer_init       },
    {Py_tp_traverse, Trainer_traverse   },
    {Py_tp_clear,    Trainer_clear      },
    {Py_tp_dealloc,  Trainer_dealloc    },
    {Py_tp_methods,  Trainer_methods    },
    {Py_tp_getset,   Trainer_getset     },
    {0,              NULL               },
};

PyType_Spec Trainer_spec = {
    .name = "ctrainer._C.Trainer",
    .basicsize = sizeof(Trainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Trainer_slots,
};
