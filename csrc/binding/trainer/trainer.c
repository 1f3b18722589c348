/* ctrainer._C.Trainer: the type and the fields that it shares with Python.
 *
 * A field is declared once, in fields.def: struct, members and garbage collection are
 * made from that table. */
#include "binding/trainer/trainer.h"

#include "binding/runtime/ctpy.h"

PyDoc_STRVAR(
    Trainer_doc,
    "Trainer(*args, **kwargs)\n--\n\n"
    "The loops of training and evaluation; ctrainer.Trainer is its public class.\n"
    "\n"
    "Every hook is called by attribute lookup on the instance, so overrides,\n"
    "mixins and functions set on an instance win.");

static PyObject *
Trainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    PyObject *none = PyTuple_New(0);
    /* object's own rejects a class with abstract methods. */
    PyObject *op = none == NULL ? NULL : PyBaseObject_Type.tp_new(type, none, NULL);
    Py_XDECREF(none);
    if (op != NULL) {
        Trainer *self = (Trainer *)op;
        self->last_grad_norm = Py_NAN;
        self->inputs_stay = true;
        self->syncs_gradients = true;
        self->saved_step = -1;
        self->signatures = PyDict_New();
        if (self->signatures == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

/* Ignores the arguments of a cooperative __init__, which ctrainer.Trainer has read. */
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
#define CTPY_OBJECT(name) Py_VISIT(((Trainer *)op)->name);
#include "binding/engine/fields.def"
    return 0;
}

static int
Trainer_clear(PyObject *op)
{
    Py_CLEAR(((Trainer *)op)->signatures);
#define CTPY_OBJECT(name) Py_CLEAR(((Trainer *)op)->name);
#include "binding/engine/fields.def"
    return 0;
}

static void
Trainer_dealloc(PyObject *op)
{
    ctpy_dealloc(op, Trainer_clear);
}

#define CTPY_MEMBER_bool T_BOOL
#define CTPY_MEMBER_double T_DOUBLE
#define CTPY_MEMBER_int64_t T_LONGLONG
#define CTPY_OBJECT(name) {"_" #name, T_OBJECT, offsetof(Trainer, name), 0, NULL},
#define CTPY_VALUE(type, name)                                                         \
    {"_" #name, CTPY_MEMBER_##type, offsetof(Trainer, name), 0, NULL},
static PyMemberDef Trainer_members[] = {
#include "binding/engine/fields.def"
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Trainer_getset[] = {
    {"_communicator", ctpy_trainer_get_communicator, NULL,
     "The Communicator of the run's ranks, joined when it is first asked for.", NULL},
    {NULL,            NULL,                          NULL, NULL,                NULL},
};

static PyType_Slot Trainer_slots[] = {
    {Py_tp_doc,      (void *)Trainer_doc},
    {Py_tp_new,      Trainer_new        },
    {Py_tp_init,     Trainer_init       },
    {Py_tp_traverse, Trainer_traverse   },
    {Py_tp_clear,    Trainer_clear      },
    {Py_tp_dealloc,  Trainer_dealloc    },
    {Py_tp_members,  Trainer_members    },
    {Py_tp_getset,   Trainer_getset     },
    {0,              NULL               },
};

PyType_Spec Trainer_spec = {
    .name = "ctrainer._C.Trainer",
    .basicsize = sizeof(Trainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Trainer_slots,
};

/* ---- Run: one train() ------------------------------------------------------------ */

static PyObject *
Run_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    ctpy_run *self = (ctpy_run *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->owner = ct_owner_here();
        self->accumulation = 1;
    }
    return (PyObject *)self;
}

static int
Run_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
#define CTPY_OBJECT(name) Py_VISIT(((ctpy_run *)op)->name);
#include "binding/engine/run.def"
    return 0;
}

static int
Run_clear(PyObject *op)
{
    if (!ct_owner_is_here(((ctpy_run *)op)->owner)) {
        ((ctpy_run *)op)->loader = NULL; /* its workers are the parent's */
    }
#define CTPY_OBJECT(name) Py_CLEAR(((ctpy_run *)op)->name);
#include "binding/engine/run.def"
    return 0;
}

static void
Run_dealloc(PyObject *op)
{
    ctpy_dealloc(op, Run_clear);
}

#define CTPY_OBJECT(name) {#name, T_OBJECT, offsetof(ctpy_run, name), 0, NULL},
#define CTPY_VALUE(type, name)                                                         \
    {#name, CTPY_MEMBER_##type, offsetof(ctpy_run, name), 0, NULL},
static PyMemberDef Run_members[] = {
#include "binding/engine/run.def"
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Run_slots[] = {
    {Py_tp_doc,      "One train(): its length, its place, and the model that it trains."},
    {Py_tp_new,      Run_new                                                            },
    {Py_tp_traverse, Run_traverse                                                       },
    {Py_tp_clear,    Run_clear                                                          },
    {Py_tp_dealloc,  Run_dealloc                                                        },
    {Py_tp_members,  Run_members                                                        },
    {0,              NULL                                                               },
};

PyType_Spec Run_spec = {
    .name = "ctrainer._C.Run",
    .basicsize = sizeof(ctpy_run),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = Run_slots,
};
