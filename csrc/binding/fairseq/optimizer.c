/* ctrainer._C.FairseqOptimizer: fairseq's interface of an optimizer.
 *
 * The norm of the gradients, clipping and the update, over an engine of ours or any
 * torch.optim.Optimizer.
 *
 * Invariant: .grad keeps the sums of autograd. `divisor` holds the loss scale, the
 * sample size and the clipping, and the engine's pass divides by the product; only for
 * an optimizer of another package are gradients divided in place before the step.
 *
 * Source of the rules: fairseq, optim/fp16_optimizer.py, amp_optimizer.py and
 * utils.clip_grad_norm_. */
#include "binding/fairseq/optimizer.h"

#include "binding/optim/optim.h"
#include "binding/runtime/objects.h"

#include <math.h>
#include <stdbool.h>

/* The treatment of a norm that is not finite, and the rule of clipping. */
typedef enum fairseq_rules {
    FAIRSEQ_PLAIN, /* nothing; max / (norm + 1e-6), at most 1 */
    FAIRSEQ_FP16,  /* OverflowError from clip_grad_norm(); max / norm */
    FAIRSEQ_AMP    /* the next step() is skipped; as plain */
} fairseq_rules;

typedef struct FairseqOptimizer {
    PyObject_HEAD
    PyObject *inner;    /* the torch-like optimizer; NULL before __init__ */
    PyObject *scaler;   /* LossScaler, or NULL: the loss is not scaled */
    PyObject *tools;    /* ctrainer.adapters.torch_fairseq, or None */
    PyObject *enqueued; /* the engine of the update that step() has enqueued, or NULL */
    fairseq_rules rules;
    bool in_backward;      /* a backward pass has begun and not ended */
    bool measured;         /* clip_grad_norm() was called since the last zero_grad() */
    bool deferred;         /* step() measures, and clips to deferred_norm */
    double deferred_norm;  /* 0: does not clip */
    double divisor;        /* of the gradients, in the next update; > 0 */
    ct_step_result result; /* of the last measurement */
} FairseqOptimizer;

PyDoc_STRVAR(
    FairseqOptimizer_doc,
    "FairseqOptimizer(optimizer, *, scaler=None, rules='plain', tools=None)\n--\n\n"
    "fairseq's interface of an optimizer over a torch.optim.Optimizer or the like.\n"
    "\n"
    "scaler: a LossScaler, whose scale backward() multiplies by, or None.\n"
    "rules: what happens when the norm is Inf or NaN: 'plain', nothing; 'fp16',\n"
    "OverflowError from clip_grad_norm(); 'amp', the next step() is skipped.\n"
    "tools: has scalar(value), a tensor of a norm, and for gradients where no kernels\n"
    "of ctrainer work grad_norm(groups) and divide_grads(groups, by).");

static PyObject *
FairseqOptimizer_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                     PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ((FairseqOptimizer *)op)->divisor = 1.0;
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
    static char *names[] = {"optimizer", "scaler", "rules", "tools", NULL};
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    PyObject *inner, *scaler = Py_None, *tools = Py_None;
    const char *word = "plain";
    fairseq_rules rules;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OsO:FairseqOptimizer", names,
                                     &inner, &scaler, &word, &tools) ||
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
    Py_XSETREF(self->tools, Py_NewRef(tools));
    self->rules = rules;
    Py_CLEAR(self->enqueued);
    self->measured = self->in_backward = self->deferred = false;
    self->divisor = 1.0;
    return 0;
}

#define OPTIMIZER_OBJECTS(V) V(inner) V(scaler) V(tools) V(enqueued)
CTPY_LIFETIME(FairseqOptimizer, OPTIMIZER_OBJECTS)

/* 0, or -1 with a RuntimeError before __init__. */
static int
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

/* The factor of the loss before backward(); 1 without a scaler. */
static int
fairseq_loss_scale(FairseqOptimizer *self, double *scale)
{
    *scale = 1.0;
    if (self->scaler == NULL) {
        return 0;
    }
    return ctpy_get_double(self->scaler, ctpy_state_borrow((PyObject *)self)->str_scale,
                           scale);
}

/* ---- gradients ------------------------------------------------------------------- */

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
    /* Stays set after an exception: gradients may be there in part. */
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
    /* New gradients will be sums of scaled losses. */
    self->divisor = scale;
    self->measured = self->in_backward = self->deferred = false;
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
    /* Collected in one number: a pass over the gradients for each factor would be
     * memory traffic for nothing. */
    ((FairseqOptimizer *)op)->divisor /= factor;
    Py_RETURN_NONE;
}

/* ---- the parameter groups ------------------------------------------------------- */

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

/* ---- the norm of the gradients, and clipping ------------------------------------- */

/* All the same whether a gradient is finite: the rules decide, not the engine. */
static const ct_step_config RULES_DECIDE = {.nonfinite = CT_NONFINITE_KEEP};

/* The norm by torch. */
static int
measure_by_tools(FairseqOptimizer *self)
{
    PyObject *groups = param_groups((PyObject *)self);
    PyObject *norm = groups == NULL
                         ? NULL
                         : PyObject_CallMethod(self->tools, "grad_norm", "O", groups);
    Py_XDECREF(groups);
    if (norm == NULL) {
        return -1;
    }
    self->result.grad_norm = PyFloat_AsDouble(norm) / self->divisor;
    Py_DECREF(norm);
    return PyErr_Occurred() ? -1 : 0;
}

static int
measure_grads(FairseqOptimizer *self, ctpy_state *names)
{
    const ct_clip clip = {0};
    ctpy_grads grads = {0};
    int failed = ctpy_grads_open(names, self->inner, &grads) < 0 ||
                 (grads.elsewhere ? measure_by_tools(self)
                                  : ctpy_grads_measure(&grads, &clip, self->divisor,
                                                       &self->result.grad_norm)) < 0;
    ctpy_grads_close(&grads);
    return failed ? -1 : 0;
}

/* The norm of all gradients, divided by the divisor. */
static int
measure(FairseqOptimizer *self)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *engine = NULL;
    int native = ctpy_optimizer_engine(names, self->inner, &engine);
    int failed = native < 0;
    if (native == 1) {
        failed = ctpy_engine_measure(engine, self->inner, &RULES_DECIDE, self->divisor,
                                     &self->result) < 0;
    }
    else if (native == 0) {
        failed = measure_grads(self, names) < 0;
    }
    Py_XDECREF(engine);
    if (failed) {
        return -1;
    }
    self->result.clip_coef = 1.0;
    self->result.finite = isfinite(self->result.grad_norm);
    self->measured = true;
    return 0;
}

/* The norm as a tensor of no dimension. */
static PyObject *
norm_tensor(FairseqOptimizer *self)
{
    PyObject *name = ctpy_state_borrow((PyObject *)self)->str_scalar;
    PyObject *norm = PyFloat_FromDouble(self->result.grad_norm);
    PyObject *tensor =
        norm == NULL ? NULL : PyObject_CallMethodOneArg(self->tools, name, norm);
    Py_XDECREF(norm);
    return tensor;
}

/* norm = aggregate(norm), for gradients that are sharded over processes. */
static int
aggregate_norm(FairseqOptimizer *self, PyObject *aggregate)
{
    PyObject *tensor = norm_tensor(self);
    PyObject *answer = tensor == NULL ? NULL : PyObject_CallOneArg(aggregate, tensor);
    Py_XDECREF(tensor);
    if (answer == NULL) {
        return -1;
    }
    self->result.grad_norm = PyFloat_AsDouble(answer);
    self->result.finite = isfinite(self->result.grad_norm);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* Reports an overflow, or none, to the scaler, which raises if the scale is too low. */
static PyObject *
scaler_update(FairseqOptimizer *self, bool overflow)
{
    return PyObject_CallMethodOneArg(self->scaler,
                                     ctpy_state_borrow((PyObject *)self)->str_update,
                                     overflow ? Py_True : Py_False);
}

static int
raise_overflow(FairseqOptimizer *self)
{
    PyObject *scale = scaler_update(self, true);
    if (scale != NULL) {
        PyErr_Format(PyExc_OverflowError, "setting loss scale to: %S", scale);
        Py_DECREF(scale);
    }
    return -1;
}

static int
clip(FairseqOptimizer *self, double max_norm)
{
    const double norm = self->result.grad_norm;
    if (self->rules == FAIRSEQ_FP16 && self->scaler != NULL) {
        if (!self->result.finite) {
            return raise_overflow(self);
        }
        /* Without the 1e-6 of the plain rule: fairseq's fp16 optimizer has none. */
        self->divisor *= max_norm > 0.0 && norm > max_norm ? norm / max_norm : 1.0;
        return 0;
    }
    if (self->result.finite) {
        self->divisor /= ct_clip_coef(max_norm, norm);
    }
    return 0;
}

static const char FairseqOptimizer_clip_grad_norm_doc[] =
    "clip_grad_norm($self, max_norm, aggregate_norm_fn=None)\n--\n\n"
    "Clip the gradients to max_norm (0: do not) and return their norm before that,\n"
    "a tensor of no dimension.\n\n"
    "aggregate_norm_fn makes the norm of all processes of that of this one. With\n"
    "fp16's rules an Inf or NaN lowers the loss scale and raises OverflowError, or\n"
    "FloatingPointError where the scale cannot fall any more.";

static PyObject *
FairseqOptimizer_clip_grad_norm(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"max_norm", "aggregate_norm_fn", NULL};
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    PyObject *aggregate = Py_None;
    double max_norm;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:clip_grad_norm", names,
                                     &max_norm, &aggregate) ||
        fairseq_optimizer_ready(self) < 0) {
        return NULL;
    }
    if (!(max_norm >= 0.0)) {
        return PyErr_Format(PyExc_ValueError, "max_norm is %R; expected >= 0",
                            PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0)
                                                       : Py_None);
    }
    self->deferred = false;
    if (measure(self) < 0 ||
        (aggregate != Py_None && aggregate_norm(self, aggregate) < 0)) {
        return NULL;
    }
    return clip(self, max_norm) < 0 ? NULL : norm_tensor(self);
}

/* ---- the update ------------------------------------------------------------------ */

static int
divide_by_tools(FairseqOptimizer *self)
{
    PyObject *groups = param_groups((PyObject *)self);
    PyObject *answer = groups == NULL
                           ? NULL
                           : PyObject_CallMethod(self->tools, "divide_grads", "Od",
                                                 groups, self->divisor);
    Py_XDECREF(groups);
    return ctpy_drop_steal(answer);
}

/* Divides the gradients of another's optimizer in place. */
static int
divide_grads(FairseqOptimizer *self, ctpy_state *names)
{
    if (self->divisor == 1.0) {
        return 0;
    }
    const ct_clip none = {0};
    ctpy_grads grads = {0};
    int failed = ctpy_grads_open(names, self->inner, &grads) < 0 ||
                 (grads.elsewhere ? divide_by_tools(self)
                                  : ctpy_grads_clip(&grads, &none, self->divisor)) < 0;
    ctpy_grads_close(&grads);
    return failed ? -1 : 0;
}

static int
step_foreign(FairseqOptimizer *self, ctpy_state *names)
{
    if (divide_grads(self, names) < 0) {
        return -1;
    }
    self->divisor = 1.0;
    return ctpy_drop_steal(PyObject_CallMethodNoArgs(self->inner, names->str_step));
}

static int
update(FairseqOptimizer *self)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *engine = NULL;
    ct_step_result result = {.clip_coef = 1.0, .finite = true};
    int native = ctpy_optimizer_engine(names, self->inner, &engine);
    result.grad_norm = self->result.grad_norm;
    int failed = native == 1 ? ctpy_engine_apply(engine, self->inner, &RULES_DECIDE,
                                                 self->divisor, &result)
                             : (native == 0 ? step_foreign(self, names) : -1);
    Py_XDECREF(engine);
    return failed;
}

/* The plain rule on the device: an update whose gradients are not finite is skipped. */
static ct_step_config
deferred_config(double max_norm)
{
    return (ct_step_config){.clip.max_norm = max_norm, .nonfinite = CT_NONFINITE_SKIP};
}

int
ctpy_fairseq_can_defer(ctpy_state *names, PyObject *optimizer, double max_norm)
{
    FairseqOptimizer *self = (FairseqOptimizer *)optimizer;
    PyObject *engine = NULL;
    if (!PyObject_TypeCheck(optimizer, names->FairseqOptimizer)) {
        return 0;
    }
    const ct_step_config config = deferred_config(max_norm);
    int can = fairseq_optimizer_ready(self) < 0
                  ? -1
                  : ctpy_is_default(optimizer, names->str_clip_grad_norm);
    if (can > 0) {
        can = self->scaler == NULL && self->rules != FAIRSEQ_AMP
                  ? ctpy_optimizer_engine(names, self->inner, &engine)
                  : 0;
    }
    if (can > 0) {
        can = ctpy_engine_can_enqueue(engine, &config);
    }
    Py_XDECREF(engine);
    return can;
}

int
ctpy_fairseq_defer(ctpy_state *names, PyObject *optimizer, double max_norm)
{
    if (!PyObject_TypeCheck(optimizer, names->FairseqOptimizer)) {
        PyErr_Format(PyExc_TypeError,
                     "the optimizer is a %.100s; expected the FairseqOptimizer that it "
                     "was before the backward pass",
                     Py_TYPE(optimizer)->tp_name);
        return -1;
    }
    ((FairseqOptimizer *)optimizer)->deferred = true;
    ((FairseqOptimizer *)optimizer)->deferred_norm = max_norm;
    return 0;
}

/* Deferred work, measured and clipped by the host after all. */
static int
clip_now(FairseqOptimizer *self)
{
    self->deferred = false;
    if (measure(self) < 0) {
        return -1;
    }
    if (!self->result.finite) {
        PyErr_SetString(PyExc_FloatingPointError, "gradients are Nan/Inf");
        return -1;
    }
    return clip(self, self->deferred_norm);
}

static int
update_deferred(FairseqOptimizer *self)
{
    const ct_step_config config = deferred_config(self->deferred_norm);
    ct_step_scale scale = {.now = self->divisor};
    PyObject *engine = NULL;
    int done = ctpy_optimizer_engine(ctpy_state_borrow((PyObject *)self), self->inner,
                                     &engine);
    if (done == 1) {
        done = ctpy_engine_enqueue(engine, self->inner, &config, &scale, NULL);
    }
    if (done == 0) {
        Py_XDECREF(engine);
        return clip_now(self) < 0 ? -1 : update(self);
    }
    self->deferred = false;
    Py_XSETREF(self->enqueued, engine);
    return done < 0 ? -1 : 0;
}

int
ctpy_fairseq_take_enqueued(PyObject *optimizer, PyObject **engine, double *norm)
{
    FairseqOptimizer *self = (FairseqOptimizer *)optimizer;
    if (self->deferred && clip_now(self) < 0) { /* step() was not called */
        return -1;
    }
    *engine = self->enqueued;
    self->enqueued = NULL;
    *norm = self->result.grad_norm;
    return 0;
}

/* Of amp: whether the gradients are finite, looked at if nobody has. */
static int
skips(FairseqOptimizer *self)
{
    if (self->rules != FAIRSEQ_AMP) {
        return 0;
    }
    if (!self->measured && measure(self) < 0) {
        return -1;
    }
    return !self->result.finite;
}

static int
step(FairseqOptimizer *self)
{
    int skip = skips(self);
    if (skip < 0 ||
        (!skip && (self->deferred ? update_deferred(self) : update(self)) < 0)) {
        return -1;
    }
    if (self->scaler == NULL) {
        return 0;
    }
    PyObject *scale = scaler_update(self, skip);
    Py_XDECREF(scale);
    return scale == NULL ? -1 : 0;
}

static const char FairseqOptimizer_step_doc[] =
    "step($self, closure=None, scale=1.0, groups=None)\n--\n\n"
    "Update the parameters with the gradients divided by scale.\n\n"
    "closure is called first and its result returned. groups has to be None: no\n"
    "optimizer here updates some of its groups alone.";

static PyObject *
FairseqOptimizer_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"closure", "scale", "groups", NULL};
    FairseqOptimizer *self = (FairseqOptimizer *)op;
    PyObject *closure = Py_None, *groups = Py_None, *loss;
    double scale = 1.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OdO:step", names, &closure, &scale,
                                     &groups) ||
        fairseq_optimizer_ready(self) < 0) {
        return NULL;
    }
    if (groups != Py_None || !(scale > 0.0)) {
        return PyErr_Format(PyExc_ValueError,
                            groups != Py_None
                                ? "groups is given; this optimizer updates all of its "
                                  "groups or none: pass None"
                                : "scale is not above 0");
    }
    loss = closure == Py_None ? Py_NewRef(Py_None) : PyObject_CallNoArgs(closure);
    if (loss == NULL) {
        return NULL;
    }
    self->divisor *= scale;
    if (step(self) < 0) {
        Py_CLEAR(loss);
    }
    return loss;
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
    {"backward",       FairseqOptimizer_backward,                                    METH_O,      backward_doc                       },
    {"clip_grad_norm", (PyCFunction)(void (*)(void))FairseqOptimizer_clip_grad_norm,
     METH_VARARGS | METH_KEYWORDS,                                                                FairseqOptimizer_clip_grad_norm_doc},
    {"multiply_grads", FairseqOptimizer_multiply_grads,                              METH_O,      multiply_grads_doc                 },
    {"step",           (PyCFunction)(void (*)(void))FairseqOptimizer_step,
     METH_VARARGS | METH_KEYWORDS,                                                                FairseqOptimizer_step_doc          },
    {"zero_grad",      FairseqOptimizer_zero_grad,                                   METH_NOARGS, zero_grad_doc                      },
    {NULL,             NULL,                                                         0,           NULL                               },
};

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
