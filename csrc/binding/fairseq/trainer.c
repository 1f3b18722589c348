/* ctrainer._C.FairseqTrainer: the type, its lazy attributes and its method table. */
#include "binding/fairseq/trainer.h"

/* The keywords of task.train_step, in the order of fairseq_task_step. */
static PyObject *
step_keywords(PyObject *op)
{
    ctpy_state *s = ctpy_state_borrow(op);
    return PyTuple_Pack(7, s->str_sample, s->str_model, s->str_criterion,
                        s->str_optimizer, s->str_update_num, s->str_ignore_grad,
                        s->str_ema_model);
}

static PyObject *
FairseqTrainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                   PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ((FairseqTrainer *)op)->step_keywords = step_keywords(op);
        if (((FairseqTrainer *)op)->step_keywords == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

static int
FairseqTrainer_init(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args),
                    PyObject *Py_UNUSED(kw))
{
    return 0;
}

static int
FairseqTrainer_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((FairseqTrainer *)op)->step_keywords);
    return 0;
}

static int
FairseqTrainer_clear(PyObject *op)
{
    Py_CLEAR(((FairseqTrainer *)op)->step_keywords);
    return 0;
}

static void
FairseqTrainer_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)FairseqTrainer_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- what is made on first use -----------------------------------------------------
 */

/* op.slot, which the hook op.maker() fills while it is None. */
static PyObject *
lazily(PyObject *op, PyObject *slot, PyObject *maker)
{
    PyObject *value = PyObject_GetAttr(op, slot);
    if (value == NULL || value != Py_None) {
        return value;
    }
    Py_DECREF(value);
    if (fairseq_do(op, maker) < 0) {
        return NULL;
    }
    value = PyObject_GetAttr(op, slot);
    if (value == Py_None) {
        PyErr_Format(PyExc_RuntimeError, "%U() of this trainer left %U None", maker,
                     slot);
        Py_CLEAR(value);
    }
    return value;
}

#define LAZY(name, slot, maker)                                                        \
    static PyObject *FairseqTrainer_##name(PyObject *op, void *Py_UNUSED(closure))     \
    {                                                                                  \
        ctpy_state *names = ctpy_state_borrow(op);                                     \
        return lazily(op, names->str_##slot, names->str_##maker);                      \
    }
LAZY(model, _wrapped_model, _wrap_model)
LAZY(criterion, _wrapped_criterion, _wrap_criterion)
LAZY(optimizer, _optimizer, _build_optimizer)
LAZY(lr_scheduler, _lr_scheduler, _build_optimizer)
LAZY(ema, _ema, _build_ema)
#undef LAZY

static PyGetSetDef FairseqTrainer_getset[] = {
    {"criterion",    FairseqTrainer_criterion,    NULL,
     "The criterion, wrapped for the distributed backend where it needs that.",               NULL},
    {"ema",          FairseqTrainer_ema,          NULL, "The average of the weights.",        NULL},
    {"lr_scheduler", FairseqTrainer_lr_scheduler, NULL, "The learning-rate schedule.",
     NULL                                                                                         },
    {"model",        FairseqTrainer_model,        NULL,
     "The model, wrapped for the distributed backend where it needs that.",                   NULL},
    {"optimizer",    FairseqTrainer_optimizer,    NULL, "The optimizer, built on first use.",
     NULL                                                                                         },
    {NULL,           NULL,                        NULL, NULL,                                 NULL},
};

#define METHOD_FLAGS_NOARGS METH_NOARGS
#define METHOD_FLAGS_O METH_O
#define METHOD_FLAGS_KEYWORDS (METH_VARARGS | METH_KEYWORDS)

static PyMethodDef FairseqTrainer_methods[] = {
#define CTPY_METHOD(name, flags)                                                       \
    {#name, (PyCFunction)(void (*)(void))FairseqTrainer_##name, METHOD_FLAGS_##flags,  \
     FairseqTrainer_##name##_doc},
#include "binding/fairseq/trainer_methods.def"
#undef CTPY_METHOD
    { NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    FairseqTrainer_doc,
    "FairseqTrainer(*args, **kwargs)\n--\n\n"
    "fairseq's training step; ctrainer.fairseq.Trainer is its public face.\n"
    "\n"
    "Every method is called by attribute lookup on the instance, so overrides\n"
    "win.");

static PyType_Slot FairseqTrainer_slots[] = {
    {Py_tp_doc,      (void *)FairseqTrainer_doc},
    {Py_tp_new,      FairseqTrainer_new        },
    {Py_tp_init,     FairseqTrainer_init       },
    {Py_tp_traverse, FairseqTrainer_traverse   },
    {Py_tp_clear,    FairseqTrainer_clear      },
    {Py_tp_dealloc,  FairseqTrainer_dealloc    },
    {Py_tp_methods,  FairseqTrainer_methods    },
    {Py_tp_getset,   FairseqTrainer_getset     },
    {0,              NULL                      },
};

PyType_Spec FairseqTrainer_spec = {
    .name = "ctrainer._C.FairseqTrainer",
    .basicsize = sizeof(FairseqTrainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FairseqTrainer_slots,
};
