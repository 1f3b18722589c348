/* FairseqOptimizer: the norm of the gradients, clipping, and the update.
 *
 * Source of the rules: fairseq, optim/fp16_optimizer.py, amp_optimizer.py and
 * utils.clip_grad_norm_. */
#include "binding/fairseq/optimizer.h"
#include "binding/trainer/trainer.h"

#include <math.h>

/* All the same whether a gradient is finite: the rules decide, not the engine. */
static const ct_step_config AS_TOLD = {.nonfinite = CT_NONFINITE_KEEP};

/* ---- the norm ----------------------------------------------------------------------
 */

static int
measure_grads(FairseqOptimizer *self, ctpy_state *names)
{
    const ct_clip clip = {0};
    ctpy_grads grads = {0};
    int failed =
        ctpy_grads_open(names, self->inner, true, &grads) < 0 ||
        ctpy_grads_measure(&grads, &clip, self->divisor, &self->result.grad_norm) < 0;
    ctpy_grads_close(&grads);
    return failed ? -1 : 0;
}

/* The norm of gradients in a device's memory, by the hook _device_norm(). */
static int
measure_on_device(FairseqOptimizer *self, ctpy_state *names)
{
    PyObject *norm =
        PyObject_CallMethodNoArgs((PyObject *)self, names->str__device_norm);
    if (norm == NULL) {
        return -1;
    }
    self->result.grad_norm = PyFloat_AsDouble(norm) / self->divisor;
    Py_DECREF(norm);
    return PyErr_Occurred() ? -1 : 0;
}

/* The norm of all gradients, divided by the divisor. */
static int
measure(FairseqOptimizer *self)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *engine = NULL;
    int native = self->on_host ? ctpy_optimizer_engine(names, self->inner, &engine) : 0;
    int failed = native < 0;
    if (native == 1) {
        failed = ctpy_engine_measure(engine, self->inner, &AS_TOLD, self->divisor,
                                     &self->result) < 0;
    }
    else if (native == 0) {
        failed = (self->on_host ? measure_grads(self, names)
                                : measure_on_device(self, names)) < 0;
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

/* norm = aggregate(norm), where the gradients are spread over processes. */
static int
aggregate_norm(FairseqOptimizer *self, PyObject *aggregate)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *norm = PyFloat_FromDouble(self->result.grad_norm);
    PyObject *tensor =
        norm == NULL
            ? NULL
            : PyObject_CallMethodOneArg((PyObject *)self, names->str__scalar, norm);
    PyObject *answer = tensor == NULL ? NULL : PyObject_CallOneArg(aggregate, tensor);
    Py_XDECREF(norm);
    Py_XDECREF(tensor);
    if (answer == NULL) {
        return -1;
    }
    self->result.grad_norm = PyFloat_AsDouble(answer);
    self->result.finite = isfinite(self->result.grad_norm);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- what the rules make of it -----------------------------------------------------
 */

/* Tells the scaler of an overflow; what it raises, if the scale is too low, stands. */
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
        self->divisor *= max_norm > 0.0 && norm > max_norm ? norm / max_norm : 1.0;
        return 0;
    }
    if (self->result.finite) {
        self->divisor /= ct_clip_coef(max_norm, norm);
    }
    return 0;
}

const char FairseqOptimizer_clip_grad_norm_doc[] =
    "clip_grad_norm($self, max_norm, aggregate_norm_fn=None)\n--\n\n"
    "Clip the gradients to max_norm (0: do not) and return their norm before that,\n"
    "a tensor of no dimension.\n\n"
    "aggregate_norm_fn makes the norm of all processes of that of this one. With\n"
    "fp16's rules an Inf or NaN lowers the loss scale and raises OverflowError, or\n"
    "FloatingPointError where the scale cannot fall any more.";

PyObject *
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
    if (measure(self) < 0 ||
        (aggregate != Py_None && aggregate_norm(self, aggregate) < 0)) {
        return NULL;
    }
    PyObject *norm = PyFloat_FromDouble(self->result.grad_norm);
    if (norm == NULL || clip(self, max_norm) < 0) {
        Py_XDECREF(norm);
        return NULL;
    }
    PyObject *tensor =
        PyObject_CallMethodOneArg(op, ctpy_state_borrow(op)->str__scalar, norm);
    Py_DECREF(norm);
    return tensor;
}

/* ---- the update --------------------------------------------------------------------
 */

/* Divides the gradients of another's optimizer in place. */
static int
divide_grads(FairseqOptimizer *self, ctpy_state *names)
{
    if (self->divisor == 1.0) {
        return 0;
    }
    if (!self->on_host) {
        PyObject *by = PyFloat_FromDouble(self->divisor);
        PyObject *answer =
            by == NULL ? NULL
                       : PyObject_CallMethodOneArg((PyObject *)self,
                                                   names->str__device_divide, by);
        Py_XDECREF(by);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    const ct_clip none = {0};
    ctpy_grads grads = {0};
    double norm;
    int failed = ctpy_grads_open(names, self->inner, true, &grads) < 0 ||
                 ctpy_grads_measure(&grads, &none, self->divisor, &norm) < 0 ||
                 ctpy_grads_clip(&grads, &none, self->divisor) < 0;
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
    PyObject *answer = PyObject_CallMethodNoArgs(self->inner, names->str_step);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
update(FairseqOptimizer *self)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *engine = NULL;
    ct_step_result result = {.clip_coef = 1.0, .finite = true};
    int native = self->on_host ? ctpy_optimizer_engine(names, self->inner, &engine) : 0;
    result.grad_norm = self->result.grad_norm;
    int failed = native == 1 ? ctpy_engine_apply(engine, self->inner, &AS_TOLD,
                                                 self->divisor, &result)
                             : (native == 0 ? step_foreign(self, names) : -1);
    Py_XDECREF(engine);
    return failed;
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
    if (skip < 0 || (!skip && update(self) < 0)) {
        return -1;
    }
    if (self->scaler == NULL) {
        return 0;
    }
    PyObject *scale = scaler_update(self, skip);
    Py_XDECREF(scale);
    return scale == NULL ? -1 : 0;
}

const char FairseqOptimizer_step_doc[] =
    "step($self, closure=None, scale=1.0, groups=None)\n--\n\n"
    "Update the parameters with the gradients divided by scale.\n\n"
    "closure is called first and its result returned. groups has to be None: no\n"
    "optimizer here updates some of its groups alone.";

PyObject *
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
