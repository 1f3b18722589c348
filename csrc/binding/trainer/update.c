/* Trainer: one update: clip, step, schedule, and what the step is told.
 *
 * Our optimizers are measured and updated in two C calls. Any other is driven through
 * its own step(), with our norm, our clipping and our look for Inf and NaN before it.
 */
#include "binding/optim/weight_average.h"
#include "binding/callbacks/ctpy_callbacks.h"
#include "binding/schedule/ctpy_scheduler.h"
#include "binding/engine/ranks.h"
#include "binding/trainer/update.h"

static void
update_release(ctpy_update *u)
{
    if (u->average != NULL) {
        ctpy_average_drop(u->average);
        Py_CLEAR(u->average);
    }
    ctpy_grads_close(&u->grads);
    Py_CLEAR(u->shards);
    Py_CLEAR(u->blocks);
    Py_CLEAR(u->scaler);
    Py_CLEAR(u->engine);
    Py_CLEAR(u->optimizer);
}

/* args.nonfinite_policy: "skip", "stop" or "keep"; arguments of transformers' own class
 * have none and skip. */
static int
read_policy(PyObject *op, ct_nonfinite *policy)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int failed;
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    if (args == NULL) {
        return -1;
    }
    PyObject *text = ctpy_get_optional(args, names->str_nonfinite_policy, &failed);
    Py_DECREF(args);
    *policy = CT_NONFINITE_SKIP;
    if (text == NULL) {
        return failed ? -1 : 0;
    }
    const char *word = PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : NULL;
    if (word != NULL && strcmp(word, "stop") == 0) {
        *policy = CT_NONFINITE_STOP;
    }
    else if (word != NULL && strcmp(word, "keep") == 0) {
        *policy = CT_NONFINITE_KEEP;
    }
    else if (word == NULL || strcmp(word, "skip") != 0) {
        PyErr_Format(PyExc_ValueError,
                     "nonfinite_policy must be 'skip', 'stop' or 'keep', got %R", text);
        Py_DECREF(text);
        return -1;
    }
    Py_DECREF(text);
    return 0;
}

static int
update_open_scaler(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scaler = PyObject_GetAttr(op, names->str__loss_scaler);
    u->loss_scale = 1.0;
    if (scaler == NULL || scaler == Py_None) {
        Py_XDECREF(scaler);
        return scaler == NULL ? -1 : 0;
    }
    u->scaler = scaler;
    u->config.nonfinite = CT_NONFINITE_SKIP; /* an overflow is the scaler's business */
    return ctpy_get_double(scaler, names->str_scale, &u->loss_scale);
}

static int
update_open_average(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *average = PyObject_GetAttr(op, names->str__weight_average);
    if (average == NULL || average == Py_None) {
        Py_XDECREF(average);
        return average == NULL ? -1 : 0;
    }
    u->average = average;
    if (!Py_IS_TYPE(average, names->WeightAverage)) {
        PyErr_Format(PyExc_TypeError,
                     "_weight_average is a %.200s; expected None or the core of a "
                     "ctrainer.EMA or ctrainer.SWA",
                     Py_TYPE(average)->tp_name);
        return -1;
    }
    u->average_due = ctpy_average_due(average, &u->config.ema_decay);
    return 0;
}

static int
update_open_blocks(PyObject *op, ctpy_update *u)
{
    u->blocks = PyObject_GetAttr(op, ctpy_state_borrow(op)->str__blocks);
    if (u->blocks == Py_None) {
        Py_CLEAR(u->blocks);
        return 0;
    }
    return u->blocks == NULL ? -1 : 0;
}

/* Ranks that train apart count every update, made or not, and meet where one is due. */
static int
count_in_block(const ctpy_update *u, ctpy_state *names)
{
    PyObject *answer =
        u->blocks == NULL
            ? Py_NewRef(Py_None)
            : PyObject_CallMethodNoArgs(u->blocks, names->str_count_update);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* After the update: what it has not averaged itself. */
static int
finish_average(ctpy_update *u)
{
    if (u->average == NULL) {
        return 0;
    }
    if (!u->result.updated) {
        ctpy_average_drop(u->average);
        return 0;
    }
    return ctpy_average_finish(u->average, u->average_due, u->config.ema_decay);
}

static int
update_open(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_update_read_clip(op, u) < 0 || read_policy(op, &u->config.nonfinite) < 0 ||
        update_open_scaler(op, u) < 0 || update_open_average(op, u) < 0 ||
        update_open_blocks(op, u) < 0 || ctpy_update_open_shards(op, u) < 0 ||
        (u->optimizer = PyObject_GetAttr(op, names->str_optimizer)) == NULL) {
        return -1;
    }
    PyObject *handler = PyObject_GetAttr(op, names->str_callback_handler);
    int listened =
        handler == NULL
            ? -1
            : ctpy_callbacks_listens(names, handler, names->str_on_pre_optimizer_step);
    Py_XDECREF(handler);
    u->clip_first = u->overridden || listened > 0;
    return listened < 0 || ctpy_optimizer_engine(names, u->optimizer, &u->engine) < 0
               ? -1
               : 0;
}

/* Tells of a skipped update: the counters now, the log when one is due, and one warning
 * in a run. */
static int
tell_nonfinite(PyObject *op, ctpy_update *u)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    self->nonfinite_steps++;
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    if (u->config.nonfinite == CT_NONFINITE_STOP) {
        PyErr_Format(
            PyExc_FloatingPointError,
            "the gradients of step %lld are not finite (a NaN or Inf); weights "
            "and optimizer are as they were before it. Look at the batch and "
            "the learning rate, or set nonfinite_policy='skip' to go on",
            (long long)step + 1);
        return -1;
    }
    if (self->nonfinite_total++ > 0) {
        return 0;
    }
    return PyErr_WarnFormat(
        PyExc_RuntimeWarning, 1,
        "the gradients of step %lld are not finite (a NaN or Inf): %s. The log counts "
        "such steps as nonfinite_steps; nonfinite_policy='stop' raises instead",
        (long long)step + 1,
        u->config.nonfinite == CT_NONFINITE_KEEP
            ? "updated all the same, as nonfinite_policy='keep' asks"
            : "the update is skipped and the weights stay as they are");
}

/* op.step(), of an optimizer or a schedule */
static int
call_step(PyObject *op, ctpy_state *names)
{
    PyObject *answer = PyObject_CallMethodNoArgs(op, names->str_step);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
apply_foreign(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->result.updated = u->result.finite || u->config.nonfinite == CT_NONFINITE_KEEP;
    if (!u->result.updated) {
        return 0;
    }
    return call_step(u->optimizer, names);
}

static int
scaler_update(ctpy_update *u, ctpy_state *names)
{
    if (u->scaler == NULL) {
        return 0;
    }
    PyObject *answer = PyObject_CallMethodOneArg(u->scaler, names->str_update,
                                                 u->result.finite ? Py_False : Py_True);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Clip, the callback before the step, the update, the callback after it. */
static int
update_apply(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const bool apart = u->blocks != NULL;
    if ((!apart && ctpy_trainer_average_grads(op, u) < 0) ||
        ctpy_update_measure(op, u) < 0 ||
        (!apart && ctpy_ranks_agree_finite(op, &u->result.finite) < 0) ||
        ctpy_metrics_measure(op, run, u) < 0 ||
        (!u->result.finite && u->scaler == NULL && tell_nonfinite(op, u) < 0) ||
        (u->result.finite && ctpy_update_clip(op, run, u) < 0)) {
        return -1;
    }
    ((Trainer *)op)->grad_norm = u->result.grad_norm;
    if (ctpy_trainer_fire(op, names->str_on_pre_optimizer_step, NULL) < 0) {
        return -1;
    }
    if (u->engine == NULL) {
        if (apply_foreign(op, u) < 0) {
            return -1;
        }
    }
    else if (ctpy_engine_attach(u->engine, u->average_due ? u->average : NULL) < 0 ||
             ctpy_engine_apply(u->engine, u->optimizer, &u->config, u->loss_scale,
                               &u->result) < 0) {
        return -1;
    }
    return finish_average(u) < 0 || scaler_update(u, names) < 0 ||
                   count_in_block(u, names) < 0
               ? -1
               : ctpy_trainer_fire(op, names->str_on_optimizer_step, NULL);
}

/* The schedule goes on only with the optimizer. One that watches a metric is stepped
 * after evaluation instead. */
static int
step_schedule(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    int on_metric, result = -1;
    if (scheduler == NULL ||
        ctpy_get_bool(op, names->str__schedule_on_metric, &on_metric) < 0) {
        goto done;
    }
    if (on_metric || scheduler == Py_None) {
        result = 0;
    }
    else {
        result = ctpy_scheduler_is_native(names, scheduler)
                     ? ctpy_scheduler_step(scheduler)
                     : call_step(scheduler, names);
    }
done:
    Py_XDECREF(scheduler);
    return result;
}

static int
drop_gradients(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (!run->stray_parameters) {
        return ctpy_grads_drop(names, u->optimizer);
    }
    PyObject *answer = PyObject_CallMethodNoArgs(run->model, names->str_zero_grad);
    Py_XDECREF(answer);
    (void)op;
    return answer == NULL ? -1 : 0;
}

/* state.global_step += 1; state.epoch = epoch + done / all. */
static int
advance_counters(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = PyObject_GetAttr(op, names->str_state);
    int64_t step;
    double epoch =
        (double)run->epoch + (double)run->micro_step / (double)run->steps_in_epoch;
    if (state == NULL) {
        return -1;
    }
    int result = ctpy_get_int64(state, names->str_global_step, &step) < 0 ||
                         ctpy_set_int64(state, names->str_global_step, step + 1) < 0 ||
                         ctpy_set_double(state, names->str_epoch, epoch) < 0
                     ? -1
                     : 0;
    Py_DECREF(state);
    return result;
}

/* From the summed gradients to the end of the step: update, schedule, counters,
 * callbacks, and what is due of logging, evaluation and saving. */
int
ctpy_finish_update(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_update u = {0};
    PyObject *learning_rate = NULL;
    int result = -1;
    if (update_open(op, &u) == 0 && update_apply(op, run, &u) == 0 &&
        (learning_rate =
             PyObject_CallMethodNoArgs(op, names->str__get_learning_rate)) != NULL &&
        (!u.result.updated || step_schedule(op) == 0) &&
        drop_gradients(op, run, &u) == 0 && advance_counters(op, run) == 0) {
        ((Trainer *)op)->in_update = false;
        result = ctpy_trainer_fire(op, names->str_on_step_end, NULL) < 0
                     ? -1
                     : ctpy_do_what_is_due(op, run, learning_rate);
    }
    Py_XDECREF(learning_rate);
    update_release(&u);
    return result;
}
