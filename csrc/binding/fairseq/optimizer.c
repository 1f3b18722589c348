/* ctrainer._C.FairseqOptimizer: fairseq's interface of an optimizer over one of ours.
 *
 * Gradients are multiplied when they are used: multiply_grads() and the clipping of
 * clip_grad_norm() change a divisor, by which the update divides in its own pass. */
#include "binding/fairseq/optimizer.h"
#include "binding/trainer/trainer.h"

/* ---- life --------------------------------------------------------------------------
 */

static PyObject *
FairseqOptimizer_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                     PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ((FairseqOptimizer *)op)->divisor = 1.0;
        ((FairseqOptimizer *)op)->on_host = true;
    }
    return op;
}

static int
parse_rules(const char *word, fairseq_rules *rules)
{
    static const char *const words[] = {"plain", "fp16", "amp"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(word, words[i]) == 0) {
            *rules = (fairseq_rules)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "rules is '%.50s'; expected plain, fp16 or amp",
                 word);
    return -1;
}

static int
FairseqOptimizer_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"optimizer", "scaler", "rules", "on_host", NULL};
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    PyObject *inner, *scaler = Py_None;
    const char *word = "plain";
    int on_host = true;
    fairseq_rules rules;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$Osp:FairseqOptimizer", names,
                                     &inner, &scaler, &word, &on_host) ||
        parse_rules(word, &rules) < 0) {
        return -1;
    }
    if (scaler != Py_None &&
        !PyObject_TypeCheck(scaler, ctpy_state_borrow(op)->LossScaler)) {
        PyErr_Format(PyExc_TypeError,
                     "scaler is a %.100s; expected a LossScaler or None",
                     Py_TYPE(scaler)->tp_name);
        return -1;
    }
    Py_XSETREF(self->inner, Py_NewRef(inner));
    Py_XSETREF(self->scaler, scaler == Py_None ? NULL : Py_NewRef(scaler));
    self->rules = rules;
    self->on_host = on_host;
    self->measured = self->in_backward = false;
    self->divisor = 1.0;
    return 0;
}

static int
FairseqOptimizer_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((FairseqOptimizer *)op)->inner);
    Py_VISIT(((FairseqOptimizer *)op)->scaler);
    return 0;
}

static int
FairseqOptimizer_clear(PyObject *op)
{
    Py_CLEAR(((FairseqOptimizer *)op)->inner);
    Py_CLEAR(((FairseqOptimizer *)op)->scaler);
    return 0;
}

static void
FairseqOptimizer_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)FairseqOptimizer_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

int
fairseq_optimizer_ready(const FairseqOptimizer *self)
{
    if (self->inner != NULL) {
        return 0;
    }
    PyErr_SetString(PyExc_RuntimeError,
                    "__init__ of this optimizer was not called; call "
                    "super().__init__(optimizer)");
    return -1;
}

int
fairseq_loss_scale(FairseqOptimizer *self, double *scale)
{
    *scale = 1.0;
    if (self->scaler == NULL) {
        return 0;
    }
    return ctpy_get_double(self->scaler, ctpy_state_borrow((PyObject *)self)->str_scale,
                           scale);
}

/* ---- gradients ---------------------------------------------------------------------
 */

PyDoc_STRVAR(backward_doc,
             "backward($self, loss, /)\n--\n\n"
             "Add the gradients of loss, a tensor of one element, times the loss scale "
             "if there is one.");

static PyObject *
FairseqOptimizer_backward(PyObject *op, PyObject *loss)
{
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    PyObject *scaled = Py_NewRef(loss), *answer = NULL;
    double scale;
    if (fairseq_loss_scale(self, &scale) < 0) {
        goto done;
    }
    if (self->scaler != NULL) {
        PyObject *factor = PyFloat_FromDouble(scale);
        Py_SETREF(scaled, factor == NULL ? NULL : PyNumber_Multiply(loss, factor));
        Py_XDECREF(factor);
        if (scaled == NULL) {
            return NULL;
        }
    }
    self->in_backward = true;
    answer = PyObject_CallMethodNoArgs(scaled, ctpy_state_borrow(op)->str_backward);
    self->in_backward = answer == NULL;
done:
    Py_DECREF(scaled);
    return answer;
}

PyDoc_STRVAR(zero_grad_doc, "zero_grad($self, /)\n--\n\n"
                            "Set .grad of every parameter to None.");

static PyObject *
FairseqOptimizer_zero_grad(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    double scale;
    if (fairseq_optimizer_ready(self) < 0 || fairseq_loss_scale(self, &scale) < 0 ||
        ctpy_grads_drop(ctpy_state_borrow(op), self->inner) < 0) {
        return NULL;
    }
    self->divisor = scale;
    self->measured = self->in_backward = false;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(multiply_grads_doc,
             "multiply_grads($self, c, /)\n--\n\n"
             "Multiply the gradients by c, a number or a tensor of one element.\n\n"
             "They are multiplied when they are used: .grad shows the old values.");

static PyObject *
FairseqOptimizer_multiply_grads(PyObject *op, PyObject *arg)
{
    double factor = PyFloat_AsDouble(arg);
    if (factor == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!(factor > 0.0)) {
        PyErr_Format(PyExc_ValueError, "multiply_grads() got %R; expected a number > 0",
                     arg);
        return NULL;
    }
    ((FairseqOptimizer *)op)->divisor /= factor;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(all_reduce_grads_doc,
             "all_reduce_grads($self, module, /)\n--\n\n"
             "Call module.all_reduce_grads() where it has one, as wrappers that leave "
             "the exchange of gradients to the trainer do.");

static PyObject *
FairseqOptimizer_all_reduce_grads(PyObject *op, PyObject *module)
{
    PyObject *name = ctpy_state_borrow(op)->str_all_reduce_grads, *found;
    int has = ctpy_lookup(module, name, &found);
    if (has < 1) {
        return has < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *answer = PyObject_CallNoArgs(found);
    Py_DECREF(found);
    return answer;
}

/* ---- the learning rate -------------------------------------------------------------
 */

static PyObject *
param_groups(PyObject *op)
{
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    if (fairseq_optimizer_ready(self) < 0) {
        return NULL;
    }
    PyObject *groups =
        PyObject_GetAttr(self->inner, ctpy_state_borrow(op)->str_param_groups);
    if (groups != NULL && !PyList_Check(groups)) {
        PyErr_Format(PyExc_TypeError, "param_groups is a %.100s; expected a list",
                     Py_TYPE(groups)->tp_name);
        Py_CLEAR(groups);
    }
    return groups;
}

PyDoc_STRVAR(get_lr_doc, "get_lr($self, /)\n--\n\n"
                         "Return the learning rate of the first parameter group.");

static PyObject *
FairseqOptimizer_get_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *groups = param_groups(op), *rate = NULL;
    PyObject *first = groups == NULL ? NULL : PySequence_GetItem(groups, 0);
    if (first != NULL) {
        rate = PyObject_GetItem(first, ctpy_state_borrow(op)->str_lr);
    }
    Py_XDECREF(first);
    Py_XDECREF(groups);
    return rate;
}

PyDoc_STRVAR(set_lr_doc, "set_lr($self, lr, /)\n--\n\n"
                         "Set the learning rate of every parameter group.");

static PyObject *
FairseqOptimizer_set_lr(PyObject *op, PyObject *rate)
{
    PyObject *groups = param_groups(op);
    int failed = groups == NULL;
    for (Py_ssize_t g = 0; !failed && g < PyList_GET_SIZE(groups); g++) {
        PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, g));
        failed = PyObject_SetItem(group, ctpy_state_borrow(op)->str_lr, rate) < 0;
        Py_DECREF(group);
    }
    Py_XDECREF(groups);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- what Python sees --------------------------------------------------------------
 */

static PyObject *
FairseqOptimizer_get_groups(PyObject *op, void *Py_UNUSED(closure))
{
    return param_groups(op);
}

static PyObject *
FairseqOptimizer_get_inner(PyObject *op, void *Py_UNUSED(closure))
{
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    return fairseq_optimizer_ready(self) < 0 ? NULL : Py_NewRef(self->inner);
}

static PyGetSetDef FairseqOptimizer_getset[] = {
    {"optimizer",    FairseqOptimizer_get_inner,  NULL,
     "The torch.optim.Optimizer, or the like, that updates.", NULL},
    {"param_groups", FairseqOptimizer_get_groups, NULL,
     "The parameter groups of optimizer, a list of dicts.",   NULL},
    {NULL,           NULL,                        NULL, NULL, NULL},
};

static PyMemberDef FairseqOptimizer_members[] = {
    {"divisor", T_DOUBLE, offsetof(FairseqOptimizer, divisor), READONLY,
     "What the gradients are divided by when they are used."},
    {"in_backward", T_BOOL, offsetof(FairseqOptimizer, in_backward), READONLY,
     "True from the start of a backward pass that failed until zero_grad(): the "
     "gradients may hold a part of it."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef FairseqOptimizer_methods[] = {
    {"all_reduce_grads", FairseqOptimizer_all_reduce_grads,                            METH_O,
     all_reduce_grads_doc                                                                                                              },
    {"backward",         FairseqOptimizer_backward,                                    METH_O,      backward_doc                       },
    {"clip_grad_norm",   (PyCFunction)(void (*)(void))FairseqOptimizer_clip_grad_norm,
     METH_VARARGS | METH_KEYWORDS,                                                                  FairseqOptimizer_clip_grad_norm_doc},
    {"get_lr",           FairseqOptimizer_get_lr,                                      METH_NOARGS, get_lr_doc                         },
    {"multiply_grads",   FairseqOptimizer_multiply_grads,                              METH_O,      multiply_grads_doc                 },
    {"set_lr",           FairseqOptimizer_set_lr,                                      METH_O,      set_lr_doc                         },
    {"step",             (PyCFunction)(void (*)(void))FairseqOptimizer_step,
     METH_VARARGS | METH_KEYWORDS,                                                                  FairseqOptimizer_step_doc          },
    {"zero_grad",        FairseqOptimizer_zero_grad,                                   METH_NOARGS, zero_grad_doc                      },
    {NULL,               NULL,                                                         0,           NULL                               },
};

PyDoc_STRVAR(
    FairseqOptimizer_doc,
    "FairseqOptimizer(optimizer, *, scaler=None, rules='plain', on_host=True)\n--\n\n"
    "fairseq's interface of an optimizer over a torch.optim.Optimizer or the like.\n"
    "\n"
    "scaler: a LossScaler, whose scale backward() multiplies by, or None.\n"
    "rules: what happens when the norm is Inf or NaN: 'plain', nothing; 'fp16',\n"
    "OverflowError from clip_grad_norm(); 'amp', the next step() is skipped.\n"
    "on_host: every parameter is in host memory.");

static PyType_Slot FairseqOptimizer_slots[] = {
    {Py_tp_doc,      (void *)FairseqOptimizer_doc},
    {Py_tp_new,      FairseqOptimizer_new        },
    {Py_tp_init,     FairseqOptimizer_init       },
    {Py_tp_traverse, FairseqOptimizer_traverse   },
    {Py_tp_clear,    FairseqOptimizer_clear      },
    {Py_tp_dealloc,  FairseqOptimizer_dealloc    },
    {Py_tp_methods,  FairseqOptimizer_methods    },
    {Py_tp_getset,   FairseqOptimizer_getset     },
    {Py_tp_members,  FairseqOptimizer_members    },
    {0,              NULL                        },
};

PyType_Spec FairseqOptimizer_spec = {
    .name = "ctrainer._C.FairseqOptimizer",
    .basicsize = sizeof(FairseqOptimizer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FairseqOptimizer_slots,
};
