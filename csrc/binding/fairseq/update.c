/* FairseqTrainer: from the gradients of an update to new parameters. */
#include "binding/fairseq/trainer.h"

#include <math.h>

const char FairseqTrainer_clip_grad_norm_doc[] =
    "clip_grad_norm($self, clip_norm, /)\n--\n\n"
    "Clip the gradients to clip_norm (0: do not); return their norm before that.";

PyObject *
FairseqTrainer_clip_grad_norm(PyObject *op, PyObject *clip_norm)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    PyObject *norm = optimizer == NULL
                         ? NULL
                         : PyObject_CallMethodOneArg(
                               optimizer, names->str_clip_grad_norm, clip_norm);
    Py_XDECREF(optimizer);
    return norm;
}

/* Adds up what workers hold, where a wrapper has left that to us. */
static int
all_reduce(PyObject *op, PyObject *optimizer, PyObject *owner)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *module = PyObject_GetAttr(op, owner);
    PyObject *answer =
        module == NULL
            ? NULL
            : PyObject_CallMethodOneArg(optimizer, names->str_all_reduce_grads, module);
    Py_XDECREF(module);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Gradients, which are means over the workers, times workers / sample_size; a
 * sample_size of 0 counts as 1. BMUF's are each worker's own, and so is the sample size
 * of an update without an exchange. */
static int
normalise(PyObject *op, PyObject *optimizer, const fairseq_update *u)
{
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    const double workers = u->synced || !s->bmuf ? (double)s->world_size : 1.0;
    PyObject *sample_size = u->sample_size, *factor = NULL, *answer = NULL;
    PyObject *numerator = PyFloat_FromDouble(workers);
    int nonzero = numerator == NULL ? -1 : PyObject_IsTrue(sample_size);
    if (nonzero >= 0) {
        factor = nonzero ? PyNumber_TrueDivide(numerator, sample_size)
                         : Py_NewRef(numerator);
    }
    if (factor != NULL) {
        answer = PyObject_CallMethodOneArg(
            optimizer, ctpy_state_borrow(op)->str_multiply_grads, factor);
    }
    Py_XDECREF(factor);
    Py_XDECREF(numerator);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Clips and keeps the norm in u; of one that is not finite amp makes an overflow. */
static int
clip(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    PyObject *limit = PyFloat_FromDouble(s->clip_norm);
    u->grad_norm =
        limit == NULL ? NULL
                      : PyObject_CallMethodOneArg(op, names->str_clip_grad_norm, limit);
    Py_XDECREF(limit);
    if (u->grad_norm == NULL) {
        return -1;
    }
    if (!s->slowmo && !s->bmuf) {
        PyObject *answer =
            PyObject_CallMethodOneArg(op, names->str__check_grad_norms, u->grad_norm);
        Py_XDECREF(answer);
        if (answer == NULL) {
            return -1;
        }
    }
    const double norm = PyFloat_AsDouble(u->grad_norm);
    if (norm == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    u->overflow = !isfinite(norm);
    if (u->overflow && !s->amp) {
        PyErr_SetString(PyExc_FloatingPointError, "gradients are Nan/Inf");
        return -1;
    }
    return 0;
}

static int
optimizer_step(PyObject *op, PyObject *optimizer)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *task = PyObject_GetAttr(op, names->str_task), *answer = NULL;
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *updates = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    PyObject *keywords = PyTuple_Pack(2, names->str_model, names->str_update_num);
    if (task != NULL && model != NULL && updates != NULL && keywords != NULL) {
        PyObject *stack[] = {task, optimizer, model, updates};
        answer =
            PyObject_VectorcallMethod(names->str_optimizer_step, stack, 2, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(updates);
    Py_XDECREF(model);
    Py_XDECREF(task);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
step(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    int failed = optimizer == NULL || all_reduce(op, optimizer, names->str_model) < 0 ||
                 (((FairseqTrainer *)op)->settings.criterion_trains &&
                  all_reduce(op, optimizer, names->str_criterion) < 0) ||
                 normalise(op, optimizer, u) < 0 || clip(op, u) < 0 ||
                 optimizer_step(op, optimizer) < 0;
    Py_XDECREF(optimizer);
    return failed ? -1 : 0;
}

/* amp: the batch that overflowed once more, with a smaller scale; or on without it. */
static int
retry(PyObject *op, fairseq_update *u, PyObject **again)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t retries;
    if (ctpy_get_int64(op, names->str__amp_retries, &retries) < 0) {
        return -1;
    }
    if (retries >= ((FairseqTrainer *)op)->settings.amp_batch_retries) {
        return fairseq_tell(op, "info", "AMP: skipping this batch.") < 0 ||
                       ctpy_set_int64(op, names->str__amp_retries, 0) < 0
                   ? -1
                   : 1;
    }
    if (ctpy_set_int64(op, names->str__amp_retries, retries + 1) < 0) {
        return -1;
    }
    PyObject *stack[] = {u->samples, u->raise_oom ? Py_True : Py_False};
    *again = ctpy_call_hook(op, names->str_train_step, stack, 2);
    return *again == NULL ? -1 : 0;
}

/* Do workers update on their own, so that others count on every update of this one? */
static bool
trains_apart(PyObject *op)
{
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    return s->world_size > 1 && (s->bmuf || s->slowmo);
}

/* BMUF counts an update that was not made. */
static int
skip_block_update(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    PyObject *answer =
        optimizer == NULL
            ? NULL
            : PyObject_CallMethodNoArgs(optimizer, names->str_count_update);
    Py_XDECREF(answer);
    Py_XDECREF(optimizer);
    return answer == NULL ? -1 : 0;
}

/* The scaler met an overflow: nothing was updated, and the run goes on. */
static int
accept_overflow(PyObject *op, fairseq_update *u)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    int failed = fairseq_tell(op, "info",
                              "NOTE: gradient overflow detected, ignoring gradient, %S",
                              value) < 0;
    Py_XDECREF(trace);
    Py_XDECREF(value);
    Py_XDECREF(type);
    u->overflow = true;
    if (failed || fairseq_do(op, ctpy_state_borrow(op)->str_zero_grad) < 0) {
        return -1;
    }
    return trains_apart(op) && ((FairseqTrainer *)op)->settings.bmuf
               ? skip_block_update(op)
               : 0;
}

int
fairseq_run_update(PyObject *op, fairseq_update *u, PyObject **again)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (step(op, u) == 0) {
        return u->overflow && !trains_apart(op) ? retry(op, u, again) : 1;
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return accept_overflow(op, u) < 0 ? -1 : 1;
    }
    if (fairseq_is_oom()) {
        PyObject *stack[] = {Py_True};
        fairseq_report(op, names->str__log_oom, stack, 1);
    }
    return -1;
}
