/* FairseqTrainer: from the gradients of an update to new parameters. */
#include "binding/fairseq/trainer.h"

#include <math.h>

static const char FairseqTrainer_clip_grad_norm_doc[] =
    "clip_grad_norm($self, clip_norm, /)\n--\n\n"
    "Clip the gradients to clip_norm (0: do not); return their norm before that.";

static PyObject *
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

/* FairseqTrainer: what an update leaves in the metrics, and the end of it. */

/* ---- _reduce_and_log_stats() -------------------------------------------------------
 */

/* ups, gnorm and clip, of a norm that is finite. */
static int
log_norm(PyObject *op, PyObject *grad_norm)
{
    const double limit = ((FairseqTrainer *)op)->settings.clip_norm;
    const double norm = PyFloat_AsDouble(grad_norm);
    if (norm == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!isfinite(norm)) {
        return 0;
    }
    if (fairseq_metric(op, "log_speed", "(sdii)", "ups", 1.0, 100, 2) < 0 ||
        fairseq_metric(op, "log_scalar", "(sdiii)", "gnorm", norm, 1, 400, 3) < 0) {
        return -1;
    }
    return limit > 0.0 ? fairseq_metric(op, "log_scalar", "(sdiii)", "clip",
                                        norm > limit ? 100.0 : 0.0, 1, 500, 1)
                       : 0;
}

static int
reduce_metrics(PyObject *op, PyObject *outputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (outputs == Py_None) {
        return 0;
    }
    PyObject *task = PyObject_GetAttr(op, names->str_task), *answer = NULL;
    PyObject *criterion = PyObject_CallMethodNoArgs(op, names->str_get_criterion);
    if (task != NULL && criterion != NULL) {
        PyObject *stack[] = {outputs, criterion};
        answer = ctpy_call_hook(task, names->str_reduce_metrics, stack, 2);
    }
    Py_XDECREF(criterion);
    Py_XDECREF(task);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* A criterion that logs no loss gets one of -1, and one warning in a run. */
static int
check_loss(PyObject *op, PyObject *meters)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int logged = PySequence_Contains(meters, names->str_loss);
    if (logged != 0) {
        return logged < 0 ? -1 : 0;
    }
    PyObject *told = PyObject_GetAttr(op, names->str__warn_once);
    int before = told == NULL ? -1 : PySequence_Contains(told, names->str_loss);
    int failed =
        before < 0 ||
        (before == 0 &&
         (PySet_Add(told, names->str_loss) < 0 ||
          fairseq_tell(op, "warning",
                       "Criterion.reduce_metrics did not log a 'loss' value, which may "
                       "break some functionality") < 0)) ||
        fairseq_metric(op, "log_scalar", "(si)", "loss", -1) < 0;
    Py_XDECREF(told);
    return failed ? -1 : 0;
}

/* The smoothed values and sample_size, without the speeds. */
static PyObject *
logging_output(PyObject *op, PyObject *meters, PyObject *sample_size)
{
    static const char *const hidden[] = {"ppl", "wps", "wpb", "bsz"};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *made = PyObject_CallMethodNoArgs(meters, names->str_get_smoothed_values);
    int failed =
        made == NULL || PyObject_SetItem(made, names->str_sample_size, sample_size) < 0;
    for (size_t i = 0; !failed && i < sizeof(hidden) / sizeof(hidden[0]); i++) {
        PyObject *key = PyUnicode_FromString(hidden[i]);
        int has = key == NULL ? -1 : PySequence_Contains(made, key);
        failed = has < 0 || (has && PyObject_DelItem(made, key) < 0);
        Py_XDECREF(key);
    }
    if (failed) {
        Py_CLEAR(made);
    }
    return made;
}

static const char FairseqTrainer__reduce_and_log_stats_doc[] =
    "_reduce_and_log_stats($self, logging_outputs, sample_size, grad_norm=None)\n--\n\n"
    "Log speed, norm and share of clipped updates, let task.reduce_metrics() log the\n"
    "rest, and return what was logged as a dict.";

static PyObject *
FairseqTrainer__reduce_and_log_stats(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"logging_outputs", "sample_size", "grad_norm", NULL};
    PyObject *outputs, *sample_size, *grad_norm = Py_None, *meters = NULL, *made = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:_reduce_and_log_stats", names,
                                     &outputs, &sample_size, &grad_norm) ||
        (grad_norm != Py_None && log_norm(op, grad_norm) < 0)) {
        return NULL;
    }
    PyObject *context = fairseq_enter(op, NULL, &meters);
    if (context == NULL) {
        return NULL;
    }
    if (reduce_metrics(op, outputs) == 0 && check_loss(op, meters) == 0) {
        made = logging_output(op, meters, sample_size);
    }
    if (fairseq_leave(op, context) < 0) {
        Py_CLEAR(made);
    }
    Py_DECREF(meters);
    Py_DECREF(context);
    return made;
}

/* ---- the end of an update ----------------------------------------------------------
 */

/* Some wrappers average the parameters after the step. */
static int
perform_slowmo(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model = PyObject_GetAttr(op, names->str_model), *perform = NULL;
    int has =
        model == NULL ? -1 : ctpy_lookup(model, names->str_perform_slowmo, &perform);
    Py_XDECREF(model);
    if (has < 1) {
        return has;
    }
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer), *master = NULL;
    PyObject *inner =
        optimizer == NULL ? NULL : PyObject_GetAttr(optimizer, names->str_optimizer);
    int failed =
        inner == NULL || ctpy_lookup(optimizer, names->str_fp32_params, &master) < 0;
    PyObject *stack[] = {inner, master == NULL ? Py_None : master};
    PyObject *answer = failed ? NULL : PyObject_Vectorcall(perform, stack, 2, NULL);
    Py_XDECREF(answer);
    Py_XDECREF(master);
    Py_XDECREF(inner);
    Py_XDECREF(optimizer);
    Py_DECREF(perform);
    return answer == NULL ? -1 : 0;
}

static int
count_update(PyObject *op, int64_t *updates)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *before = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    *updates = before == NULL ? -1 : PyLong_AsLongLong(before);
    Py_XDECREF(before);
    if (*updates == -1 && PyErr_Occurred()) {
        return -1;
    }
    PyObject *after = PyLong_FromLongLong(++*updates);
    PyObject *answer =
        after == NULL
            ? NULL
            : PyObject_CallMethodOneArg(op, names->str_set_num_updates, after);
    Py_XDECREF(after);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
step_ema(PyObject *op, int64_t updates)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *ema = PyObject_GetAttr(op, names->str_ema), *decay = NULL, *answer = NULL;
    PyObject *model = PyObject_CallMethodNoArgs(op, names->str_get_model);
    PyObject *count = PyLong_FromLongLong(updates);
    if (ema != NULL && model != NULL && count != NULL) {
        PyObject *stack[] = {model, count};
        answer = ctpy_call_hook(ema, names->str_step, stack, 2);
    }
    if (answer != NULL) {
        decay = PyObject_CallMethodNoArgs(ema, names->str_get_decay);
    }
    int failed = decay == NULL || fairseq_metric(op, "log_scalar", "(sOiii)",
                                                 "ema_decay", decay, 0, 10000, 5) < 0;
    Py_XDECREF(decay);
    Py_XDECREF(answer);
    Py_XDECREF(count);
    Py_XDECREF(model);
    Py_XDECREF(ema);
    return failed ? -1 : 0;
}

static bool
cache_is_due(const fairseq_settings *s, int64_t updates)
{
    return s->cuda && s->empty_cache_freq > 0 &&
           (updates + s->empty_cache_freq - 1) % s->empty_cache_freq == 0;
}

/* Counts the update and logs it. Samples that are all dummies stand for themselves. */
static PyObject *
book_update(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    int64_t updates;
    if (count_update(op, &updates) < 0 || (s->store_ema && step_ema(op, updates) < 0) ||
        (s->cuda && fairseq_do(op, names->str__log_memory) < 0)) {
        return NULL;
    }
    PyObject *stack[] = {PyList_GET_SIZE(u->outputs) > 0 ? u->outputs : u->dummies,
                         u->sample_size, u->grad_norm == NULL ? Py_None : u->grad_norm};
    PyObject *output = ctpy_call_hook(op, names->str__reduce_and_log_stats, stack, 3);
    if (output != NULL && cache_is_due(s, updates) &&
        fairseq_do(op, names->str__empty_cache) < 0) {
        Py_CLEAR(output);
    }
    return output;
}

/* The loss scale after the update: fp16 has an attribute, amp a method. */
static int
log_scale(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    if (!s->fp16 && !s->amp) {
        return 0;
    }
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    PyObject *scaler =
        optimizer == NULL ? NULL : PyObject_GetAttr(optimizer, names->str_scaler);
    PyObject *scale = scaler == NULL ? NULL
                      : s->fp16
                          ? PyObject_GetAttr(scaler, names->str_loss_scale)
                          : PyObject_CallMethodNoArgs(scaler, names->str_get_scale);
    int failed = scale == NULL || fairseq_metric(op, "log_scalar", "(sOiii)",
                                                 "loss_scale", scale, 0, 700, 4) < 0;
    Py_XDECREF(scale);
    Py_XDECREF(scaler);
    Py_XDECREF(optimizer);
    return failed ? -1 : 0;
}

PyObject *
fairseq_finish_update(PyObject *op, fairseq_update *u)
{
    PyObject *output;
    if (perform_slowmo(op) < 0) {
        return NULL;
    }
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    const bool counts = !u->overflow || s->slowmo || (s->bmuf && s->world_size > 1);
    output = counts ? book_update(op, u) : Py_NewRef(Py_None);
    if (output != NULL &&
        (log_scale(op) < 0 ||
         fairseq_metric(op, "log_stop_time", "(s)", "train_wall") < 0)) {
        Py_CLEAR(output);
    }
    return output;
}

PyMethodDef FairseqTrainer_fairseq_update_methods[] = {
    {"clip_grad_norm",        FairseqTrainer_clip_grad_norm,            METH_O,
     FairseqTrainer_clip_grad_norm_doc                                                                                  },
    {"_reduce_and_log_stats",
     (PyCFunction)(void (*)(void))FairseqTrainer__reduce_and_log_stats,
     METH_VARARGS | METH_KEYWORDS,                                              FairseqTrainer__reduce_and_log_stats_doc},
    {NULL,                    NULL,                                     0,      NULL                                    },
};
