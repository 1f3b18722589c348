/* One update of a Trainer: the norm, clipping, the optimizer's step, the schedule, the
 * counters and the callbacks.
 *
 * Our optimizers are measured and updated in two C calls. Any other is driven through
 * its own step(), with our norm, our clipping and our look for Inf and NaN before it.
 */
#include "binding/trainer/trainer.h"

#include "binding/callbacks/handler.h"
#include "binding/comm/communicator.h"
#include "binding/optim/optim.h"
#include "binding/optim/weight_average.h"
#include "binding/runtime/buffer.h"
#include "binding/schedule/scheduler.h"

/* One update, between the functions that make it. */
typedef struct ctpy_update {
    ctpy_step s;       /* `overridden`: by somebody else's _clip_grad_norm */
    PyObject *scaler;  /* the loss scaler, or NULL */
    PyObject *average; /* of the weights, or NULL */
    PyObject *blocks;  /* a BMUF, for local steps, or NULL */
    bool average_due;
    bool logs_layers; /* the norms of layers, too */
    bool begun;       /* on_pre_optimizer_step has been called */
    bool
        reports_norm; /* somebody else's _get_grad_norm has the last word on the norm */
    double spike_sigmas; /* of norms that are skipped, or 0 */
    bool clip_first; /* somebody looks at the gradients between clipping and update */
} ctpy_update;

static void
update_release(ctpy_update *u)
{
    if (u->average != NULL) {
        ctpy_average_drop(u->average);
        Py_CLEAR(u->average);
    }
    ctpy_step_release(&u->s);
    Py_CLEAR(u->blocks);
    Py_CLEAR(u->scaler);
}

/* ---- the settings of an update --------------------------------------------------- */

/* args.nonfinite_policy; arguments of transformers' own class have none and skip. */
static int
read_policy(PyObject *args, const ctpy_state *names, ct_nonfinite *policy)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, names->str_nonfinite_policy, &failed);
    if (found != NULL) {
        failed = ctpy_parse_nonfinite(found, "nonfinite_policy", policy) < 0;
        Py_DECREF(found);
    }
    return failed ? -1 : 0;
}

/* args.name, a number > 0; *value stays where there is none, as in arguments of
 * transformers' own class, or None. */
static int
read_limit(PyObject *args, PyObject *name, double *value)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, name, &failed);
    if (found != NULL) {
        failed = ctpy_parse_limit(found, PyUnicode_AsUTF8(name), value) < 0;
        Py_DECREF(found);
    }
    return failed ? -1 : 0;
}

/* Reads what the arguments say of an update. */
static int
open_config(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ct_clip *clip = &u->s.config.clip;
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    if (args == NULL) {
        return -1;
    }
    clip->norm_type = 2.0;
    const bool failed =
        ctpy_get_double(args, names->str_max_grad_norm, &clip->max_norm) < 0 ||
        read_limit(args, names->str_grad_norm_type, &clip->norm_type) < 0 ||
        read_limit(args, names->str_max_grad_value, &clip->value) < 0 ||
        read_limit(args, names->str_skip_grad_norm_sigmas, &u->spike_sigmas) < 0 ||
        ctpy_get_flag(args, names->str_clip_by_group, &clip->by_group) < 0 ||
        ctpy_get_flag(args, names->str_log_layer_grad_norms, &u->logs_layers) < 0 ||
        read_policy(args, names, &u->s.config.nonfinite) < 0;
    clip->max_norm = clip->max_norm > 0.0 ? clip->max_norm : 0.0;
    Py_DECREF(args);
    const int clips = failed ? -1 : ctpy_is_default(op, names->str__clip_grad_norm);
    const int reports = clips < 0 ? -1 : ctpy_is_default(op, names->str__get_grad_norm);
    u->s.overridden = clips == 0 && clip->max_norm > 0.0;
    u->reports_norm = reports == 0;
    return reports < 0 ? -1 : 0;
}

static int
open_scaler(PyObject *op, ctpy_update *u)
{
    u->scaler = ctpy_field(((Trainer *)op)->loss_scaler);
    u->s.loss_scale = 1.0;
    if (u->scaler == NULL) {
        return 0;
    }
    /* An overflow is the scaler's business. */
    u->s.config.nonfinite = CT_NONFINITE_SKIP;
    return ctpy_get_double(u->scaler, ctpy_state_borrow(op)->str_scale,
                           &u->s.loss_scale);
}

static int
open_average(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *average = PyObject_GetAttr(op, names->str_weight_average);
    if (average == NULL || average == Py_None) {
        Py_XDECREF(average);
        return average == NULL ? -1 : 0;
    }
    u->average = PyObject_GetAttr(average, names->str_core);
    Py_DECREF(average);
    if (u->average == NULL || !Py_IS_TYPE(u->average, names->WeightAverage)) {
        Py_CLEAR(u->average);
        PyErr_SetString(
            PyExc_TypeError,
            "weight_average must be None, a ctrainer.EMA or a ctrainer.SWA");
        return -1;
    }
    u->average_due = ctpy_average_due(u->average, &u->s.config.ema_decay);
    return 0;
}

/* Reads the group over whose ranks parameters are sharded, if any, and the adapter of
 * gradients without kernels. */
static int
open_shards(PyObject *op, ctpy_update *u)
{
    const Trainer *self = (Trainer *)op;
    u->s.adapter = Py_NewRef(self->adapter == NULL ? Py_None : self->adapter);
    return self->shard_group == NULL || self->shard_group == Py_None
               ? 0
               : ctpy_step_shard(ctpy_state_borrow(op), &u->s, self->shard_group);
}

static int
update_open(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->blocks = ctpy_field(((Trainer *)op)->blocks);
    if (open_config(op, u) < 0 || open_scaler(op, u) < 0 || open_average(op, u) < 0 ||
        open_shards(op, u) < 0 ||
        (u->s.optimizer = PyObject_GetAttr(op, names->str_optimizer)) == NULL) {
        return -1;
    }
    PyObject *handler = PyObject_GetAttr(op, names->str_callback_handler);
    int listened =
        handler == NULL
            ? -1
            : ctpy_callbacks_listens(names, handler, names->str_on_pre_optimizer_step);
    Py_XDECREF(handler);
    u->clip_first = u->s.overridden || u->reports_norm || listened > 0;
    return listened < 0 ||
                   ctpy_optimizer_engine(names, u->s.optimizer, &u->s.engine) < 0
               ? -1
               : 0;
}

/* ---- the norm and clipping ------------------------------------------------------- */

/* Before an override of _clip_grad_norm nothing is clipped. */
static ct_clip
clip_before(const ctpy_update *u)
{
    return u->s.overridden ? (ct_clip){.norm_type = u->s.config.clip.norm_type}
                           : u->s.config.clip;
}

/* Measures the gradients of an update: by the engine, or to be clipped in place. */
static int
measure(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    if (u->s.engine != NULL && !u->clip_first) {
        return ctpy_engine_measure(u->s.engine, u->s.optimizer, &u->s.config,
                                   u->s.loss_scale, &u->s.result);
    }
    return ctpy_step_measure_in_place(ctpy_state_borrow(op), &u->s, &clip);
}

/* The norm that an override returns; None leaves the measured one. */
static int
take_norm_steal(ctpy_update *u, PyObject *norm)
{
    if (norm == NULL) {
        return -1;
    }
    const double value =
        Py_IsNone(norm) ? u->s.result.grad_norm : PyFloat_AsDouble(norm);
    Py_DECREF(norm);
    if (value == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    u->s.result.grad_norm = value;
    return 0;
}

/* An override of _clip_grad_norm(model) clips by itself and returns the norm. */
static int
clip_by_override(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    return take_norm_steal(
        u, PyObject_CallMethodOneArg(op, ctpy_state_borrow(op)->str__clip_grad_norm,
                                     run->model));
}

/* An override of _get_grad_norm(model, grad_norm) returns the norm that is logged. */
static int
report_norm(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *norm = u->reports_norm ? PyFloat_FromDouble(u->s.result.grad_norm) : NULL;
    if (norm == NULL) {
        return u->reports_norm ? -1 : 0;
    }
    PyObject *stack[] = {run->model, norm};
    PyObject *answer =
        ctpy_call_adapted(op, names->str__get_grad_norm, stack, 1, names->kw_grad_norm);
    Py_DECREF(norm);
    return take_norm_steal(u, answer);
}

/* After an override, which may have put other tensors in place of the gradients. */
static int
clip_by_value(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = {.value = u->s.config.clip.value};
    ctpy_grads_close(&u->s.grads);
    if (!ct_clip_by_value(&clip)) {
        return 0;
    }
    return ctpy_grads_open(ctpy_state_borrow(op), u->s.optimizer, &u->s.grads) < 0
               ? -1
               : ctpy_step_clip_in_place(ctpy_state_borrow(op), &u->s, &clip);
}

/* Unscales and clips in place, unless the engine will, in its update. */
static int
clip_update(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    if (u->s.engine != NULL && !u->clip_first) {
        return 0;
    }
    if (ctpy_step_clip_in_place(ctpy_state_borrow(op), &u->s, &clip) < 0) {
        return -1;
    }
    u->s.loss_scale = 1.0;
    ((Trainer *)op)->grads_scaled = false;
    if (u->s.overridden &&
        (clip_by_override(op, run, u) < 0 || clip_by_value(op, u) < 0)) {
        return -1;
    }
    u->s.result.clip_coef = 1.0;
    u->s.config.clip = (ct_clip){0};
    return 0;
}

static const char Trainer__clip_grad_norm_doc[] =
    "_clip_grad_norm($self, model, /)\n--\n\n"
    "Clip the optimizer's gradients by norm, in place, as args.max_grad_norm,\n"
    "grad_norm_type and clip_by_group say; return the norm of all before.\n"
    "\n"
    "The loop clips inside the update and calls this only where it is overridden.";

static PyObject *
Trainer__clip_grad_norm(PyObject *op, PyObject *Py_UNUSED(model))
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_update u = {.s.loss_scale = 1.0};
    bool failed = open_config(op, &u) < 0 || open_shards(op, &u) < 0 ||
                  (u.s.optimizer = PyObject_GetAttr(op, names->str_optimizer)) == NULL;
    u.s.overridden = false; /* an override may call this one */
    u.s.config.clip.value = 0.0;
    failed = failed || ctpy_step_measure_in_place(names, &u.s, &u.s.config.clip) < 0 ||
             ctpy_step_clip_in_place(names, &u.s, &u.s.config.clip) < 0;
    update_release(&u);
    return failed ? NULL : PyFloat_FromDouble(u.s.result.grad_norm);
}

/* Measures the norms of layers for a log that follows this update: between measuring
 * and clipping, in passes of their own, so that neither the other updates nor the
 * trained weights depend on them. */
static int
measure_layers(PyObject *op, const ctpy_run *run, const ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    Py_CLEAR(((Trainer *)op)->grad_metrics);
    if (!u->logs_layers) {
        return 0;
    }
    PyObject *ends = run->micro_step >= run->steps_in_epoch ? Py_True : Py_False;
    PyObject *scale = PyFloat_FromDouble(u->s.loss_scale), *answer = NULL;
    if (scale != NULL) {
        answer = ctpy_call_hook(op, names->str__take_layer_norms,
                                (PyObject *const[]){ends, scale}, 2);
        Py_DECREF(scale);
    }
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* ---- the update ------------------------------------------------------------------ */

/* Is the exchange of gradients the model's own? A wrapper that averages while backward
 * runs has no_sync(). */
static int
averages_itself(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model = PyObject_GetAttr(op, names->str_model_wrapped), *method = NULL;
    int has = model == NULL ? -1 : ctpy_lookup(model, names->str_no_sync, &method);
    Py_XDECREF(method);
    Py_XDECREF(model);
    return has;
}

/* *finite becomes false on all ranks where it is false on one, so that all ranks skip
 * the update, or none. */
static int
agree_finite(PyObject *op, bool *finite)
{
    double value = *finite ? 1.0 : 0.0;
    if (ctpy_trainer_reduce(op, &value, 1, CT_REDUCE_MIN) < 0) {
        return -1;
    }
    *finite = value > 0.0;
    return 0;
}

/* Replaces the gradients of an update by their mean over the ranks, where nothing
 * around the model has done so. 0, or -1 with an exception. */
static int
average_grads(PyObject *op, ctpy_update *u)
{
    ctpy_grads grads;
    const int ranks = ctpy_trainer_world_size(op);
    int done = ranks > 1 ? averages_itself(op) : ranks < 0 ? -1 : 1;
    if (done != 0) {
        return done < 0 ? -1 : 0;
    }
    if (ctpy_grads_open(ctpy_state_borrow(op), u->s.optimizer, &grads) < 0) {
        return -1;
    }
    const ct_device *device = grads.target.device;
    if (grads.elsewhere || (device != NULL && device != &ct_device_cpu)) {
        PyErr_Format(PyExc_RuntimeError,
                     "nothing averages the gradients of the %d ranks: the model that "
                     "_wrap_model() returned has no no_sync(), and the Trainer itself "
                     "averages gradients in the host's memory; let _wrap_model() "
                     "return what super()._wrap_model() does",
                     ranks);
        done = -1;
    }
    for (size_t i = 0; done == 0 && i < grads.list->n; i++) {
        done = ctpy_trainer_reduce_span(op, &grads.list->spans[i], CT_REDUCE_MEAN);
    }
    ctpy_grads_close(&grads);
    return done;
}

/* op.name() */
static int
call(PyObject *op, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs(op, name);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Averages the parameters that the update has not averaged itself. */
static int
finish_average(ctpy_update *u)
{
    if (u->average == NULL) {
        return 0;
    }
    if (!u->s.result.updated) {
        ctpy_average_drop(u->average);
        return 0;
    }
    return ctpy_average_finish(u->average, u->average_due, u->s.config.ema_decay);
}

static int
scaler_update(ctpy_update *u, ctpy_state *names)
{
    if (u->scaler == NULL) {
        return 0;
    }
    PyObject *answer = PyObject_CallMethodOneArg(
        u->scaler, names->str_update, u->s.result.finite ? Py_False : Py_True);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
report_nonfinite(PyObject *op, int64_t step)
{
    PyObject *number = PyLong_FromLongLong(step), *answer = NULL;
    if (number != NULL) {
        answer = PyObject_CallMethodOneArg(
            op, ctpy_state_borrow(op)->str__report_nonfinite, number);
        Py_DECREF(number);
    }
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Reports an update with gradients that are not finite. Overflows of a loss scaler are
 * the scaler's business. */
static int
report_if_nonfinite(PyObject *op, const ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (u->s.result.finite || u->scaler != NULL) {
        return 0;
    }
    return ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0
               ? -1
               : report_nonfinite(op, step + 1);
}

/* ---- spikes of the norm, whose updates are skipped ------------------------------- */

/* The last norms, oldest first, with room for CT_SPIKE_WINDOW; their number. */
static size_t
read_norms(const Trainer *self, double *norms)
{
    PyObject *known = ctpy_field(self->recent_norms);
    const Py_ssize_t all =
        known != NULL && PyTuple_Check(known) ? PyTuple_GET_SIZE(known) : 0;
    const Py_ssize_t first = all > CT_SPIKE_WINDOW ? all - CT_SPIKE_WINDOW : 0;
    for (Py_ssize_t i = first; i < all; i++) {
        norms[i - first] = PyFloat_AsDouble(PyTuple_GET_ITEM(known, i));
    }
    Py_XDECREF(known);
    return (size_t)(all - first);
}

/* Keeps the newest CT_SPIKE_WINDOW of n norms and this norm, a spike or not: a level
 * that stays is no spike any more. */
static int
keep_norms(Trainer *self, const double *norms, size_t n, double norm)
{
    const size_t first = n < CT_SPIKE_WINDOW ? 0 : 1, count = n - first;
    PyObject *kept = PyTuple_New((Py_ssize_t)count + 1);
    for (size_t i = 0; kept != NULL && i <= count; i++) {
        PyObject *item = PyFloat_FromDouble(i < count ? norms[first + i] : norm);
        if (item == NULL) {
            Py_CLEAR(kept);
        }
        else {
            PyTuple_SET_ITEM(kept, (Py_ssize_t)i, item);
        }
    }
    if (kept == NULL) {
        return -1;
    }
    Py_XSETREF(self->recent_norms, kept);
    return 0;
}

/* Counts the update as skipped, and logs why. */
static int
report_spike(PyObject *op, const ctpy_update *u)
{
    Trainer *self = (Trainer *)op;
    int64_t step;
    self->spike_steps++;
    self->spike_total++;
    return ctpy_field_int64(op, ctpy_state_borrow(op)->str_state,
                            ctpy_state_borrow(op)->str_global_step, &step) < 0
               ? -1
               : ctpy_drop_steal(ctpy_call_function(
                     "ctrainer.trainer.run", "report_spike", "(OLd)", op,
                     (long long)step + 1, u->s.result.grad_norm));
}

/* Decides whether the update is skipped as a spike: on all ranks if on a single rank,
 * with local steps by each rank alone. */
static int
judge_norm(PyObject *op, ctpy_update *u)
{
    Trainer *self = (Trainer *)op;
    if (!(u->spike_sigmas > 0.0) || !u->s.result.finite) {
        return 0;
    }
    double norms[CT_SPIKE_WINDOW] = {0};
    const size_t n = read_norms(self, norms);
    double spike =
        ct_step_is_spike(norms, n, u->s.result.grad_norm, u->spike_sigmas) ? 1.0 : 0.0;
    if (PyErr_Occurred() ||
        (u->blocks == NULL && ctpy_trainer_reduce(op, &spike, 1, CT_REDUCE_MAX) < 0)) {
        return -1;
    }
    u->s.result.spike = spike > 0.0;
    return (u->s.result.spike && report_spike(op, u) < 0) ||
                   keep_norms(self, norms, n, u->s.result.grad_norm) < 0
               ? -1
               : 0;
}

/* Waits for the ranks of the sharding group, each with its part of the summed
 * gradients. A failed rank leaves the group, and no rank updates. */
static int
await_shards(PyObject *op)
{
    const Trainer *self = (const Trainer *)op;
    return self->updates_together
               ? call(self->shard_group, ctpy_state_borrow(op)->str_barrier)
               : 0;
}

/* Ranks with local steps count every update, made or not, and synchronize where due. */
static int
count_local_step(const ctpy_update *u, ctpy_state *names)
{
    return u->blocks == NULL ? 0 : call(u->blocks, names->str_count_update);
}

/* Clip, the callback before the step, the update, the callback after it. */
static int
update_apply(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const bool local_steps = u->blocks != NULL;
    if ((!local_steps && average_grads(op, u) < 0) || measure(op, u) < 0 ||
        (!local_steps && agree_finite(op, &u->s.result.finite) < 0) ||
        ctpy_trainer_check_collectives(op) < 0 || measure_layers(op, run, u) < 0 ||
        report_if_nonfinite(op, u) < 0 || judge_norm(op, u) < 0 ||
        (u->s.result.finite && clip_update(op, run, u) < 0) ||
        report_norm(op, run, u) < 0) {
        return -1;
    }
    ((Trainer *)op)->last_grad_norm = u->s.result.grad_norm;
    if (!u->begun && ctpy_trainer_fire(op, names->str_on_pre_optimizer_step) < 0) {
        return -1;
    }
    if (await_shards(op) < 0) {
        return -1;
    }
    ((Trainer *)op)->half_updated = true;
    if (u->s.engine == NULL) {
        u->s.result.updated =
            !u->s.result.spike &&
            (u->s.result.finite || u->s.config.nonfinite == CT_NONFINITE_KEEP);
        if (u->s.result.updated && call(u->s.optimizer, names->str_step) < 0) {
            return -1;
        }
    }
    else if (ctpy_engine_apply(u->s.engine, u->s.optimizer, &u->s.config,
                               u->s.loss_scale, &u->s.result) < 0) {
        return -1;
    }
    ((Trainer *)op)->skipped_update = !u->s.result.updated;
    return finish_average(u) < 0 || scaler_update(u, names) < 0 ||
                   count_local_step(u, names) < 0
               ? -1
               : ctpy_trainer_fire(op, names->str_on_optimizer_step);
}

/* The schedule steps only with the optimizer. One that watches a metric is stepped
 * after evaluation instead. */
static int
step_schedule(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    int result = scheduler == NULL ? -1 : 0;
    if (scheduler != NULL && scheduler != Py_None &&
        !((Trainer *)op)->schedule_on_metric) {
        result = ctpy_scheduler_is_native(names, scheduler)
                     ? ctpy_scheduler_step(scheduler)
                     : call(scheduler, names->str_step);
    }
    Py_XDECREF(scheduler);
    return result;
}

/* ---- an update that a GPU is still busy with --------------------------------------
 *
 * With nobody who looks at the norm or the gradients in between, and one rank, local
 * steps or a group over NCCL, the host enqueues the update and counts the update as
 * made. The result is awaited before a log, an evaluation or a checkpoint, at the
 * latest in the next update, after the GPU has got the next forward and backward pass.
 * A skipped update then takes the schedule's step back. */

/* For a schedule of another library: has the adapter remember what a step changes. 1, 0
 * for an unknown class, or -1. */
static int
remember_schedule(PyObject *op, PyObject *scheduler)
{
    PyObject *undo =
        ctpy_ask_adapter(op, ctpy_state_borrow(op)->str_step_undo, &scheduler, 1);
    if (undo == NULL) {
        return -1;
    }
    const int known = undo != Py_None;
    Py_XSETREF(((Trainer *)op)->enqueued_undo, undo);
    return known;
}

/* 1 if the schedule can step back, 0 or -1. */
static int
steps_back(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    int result = scheduler == NULL ? -1 : 1;
    Py_CLEAR(((Trainer *)op)->enqueued_undo);
    if (result > 0 && scheduler != Py_None && !((Trainer *)op)->schedule_on_metric &&
        !ctpy_scheduler_is_native(names, scheduler)) {
        result = remember_schedule(op, scheduler);
    }
    Py_XDECREF(scheduler);
    return result;
}

/* The update counts as made, for all that is known. An average of more than the update
 * has averaged, such as buffers, has to know. */
static int
leave_pending(PyObject *op, ctpy_update *u)
{
    Trainer *self = (Trainer *)op;
    if (u->average_due && ctpy_average_has_rest(u->average)) {
        if (ctpy_engine_await(u->s.engine, &u->s.result) < 0) {
            return -1;
        }
        self->last_grad_norm = u->s.result.grad_norm;
        self->skipped_update = !u->s.result.updated;
        return scaler_update(u, ctpy_state_borrow(op)) < 0 ? -1
                                                           : report_if_nonfinite(op, u);
    }
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_field_int64(op, names->str_state, names->str_global_step,
                         &self->enqueued_step) < 0) {
        return -1;
    }
    self->enqueued_step++;
    u->s.result.finite = u->s.result.updated = true;
    self->enqueued_due = u->average_due;
    Py_XSETREF(self->enqueued_scaler, Py_XNewRef(u->scaler));
    Py_XSETREF(self->enqueued_average, Py_XNewRef(u->average));
    Py_XSETREF(self->enqueued_engine, Py_XNewRef(u->s.engine));
    return 0;
}

/* The group for a GPU's memory of the ranks that have to agree; NULL: there is none. */
static ct_comm *
gpu_group(PyObject *op, const ctpy_update *u)
{
    const PyObject *group = ((Trainer *)op)->rank_group;
    if (u->blocks != NULL) { /* each rank by itself */
        return NULL;
    }
    if (u->s.shards != NULL) { /* groups of shards that are replicas decide alike */
        return u->s.config.comm->ops->takes_device_memory ? u->s.config.comm : NULL;
    }
    return ctpy_trainer_is_alone(op) ? NULL
                                     : ((const Communicator *)group)->comm->on_gpu;
}

/* Has the device choose the factor of the next loss, if the run has a loss scaler and
 * the loss is on the device. 1, 0 or -1. */
static int
foresee_scale(PyObject *op, const ctpy_update *u, ct_step_scale *scale)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    *scale = (ct_step_scale){.now = u->s.loss_scale};
    if (u->scaler == NULL) {
        return 1;
    }
    if (!ctpy_scaler_foresee(names, u->scaler, &scale->clean, &scale->overflow)) {
        return 0;
    }
    if (self->device_scale == NULL) {
        PyObject *total = ctpy_field(self->device_loss);
        if (total == NULL) {
            return 0;
        }
        PyObject *made = ctpy_ask_adapter(op, names->str_device_scale, &total, 1);
        Py_DECREF(total);
        Py_XSETREF(self->device_scale, made);
    }
    return self->device_scale == NULL ? -1 : 1;
}

/* Whether the update can be enqueued, as far as this rank knows: then *config and
 * *scale are the update's. 1, 0 or -1. */
static int
can_enqueue(PyObject *op, const ctpy_update *u, ct_step_config *config,
            ct_step_scale *scale)
{
    const bool alone =
        u->blocks != NULL || (u->s.shards == NULL && ctpy_trainer_is_alone(op));
    int can = u->s.engine != NULL && !u->clip_first && !u->logs_layers &&
              u->spike_sigmas == 0.0; /* the host compares norms */
    *config = u->s.config;
    config->comm = gpu_group(op, u);
    if (can > 0 && !alone && u->s.shards == NULL) {
        can = averages_itself(op);
    }
    if (can > 0) {
        can = (alone || config->comm != NULL) &&
              ctpy_engine_can_enqueue(u->s.engine, config);
    }
    if (can > 0) {
        can = steps_back(op);
    }
    return can > 0 ? foresee_scale(op, u, scale) : can;
}

/* All ranks enqueue the update, or none does: a callback may be on one of them alone.
 */
static int
ranks_can(PyObject *op, const ct_step_config *config, int can)
{
    double all = can;
    if (config->comm == NULL || can < 0) {
        return can;
    }
    return ctpy_trainer_reduce(op, &all, 1, CT_REDUCE_MIN) < 0 ? -1 : all > 0.0;
}

/* Whether the run continues with the same weights after a rank's death: the dead rank's
 * GPU may not have sent the gradients that an enqueued update is waiting for. */
static bool
outlives_ranks(PyObject *op, const ctpy_update *u)
{
    const Trainer *self = (const Trainer *)op;
    return self->updates_together || (self->least_ranks != 0 && u->s.shards == NULL);
}

/* 1: the update was enqueued; 0: the host has to measure first; or -1. */
static int
update_enqueue(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ct_step_config config;
    ct_step_scale scale;
    if (outlives_ranks(op, u)) {
        return 0;
    }
    int can = can_enqueue(op, u, &config, &scale);
    can = ranks_can(op, &config, can);
    if (can <= 0) {
        return can;
    }
    u->begun = true;
    if (ctpy_trainer_fire(op, names->str_on_pre_optimizer_step) < 0) {
        return -1;
    }
    PyObject *next =
        u->scaler == NULL ? NULL : Py_NewRef(((Trainer *)op)->device_scale);
    const int done =
        ctpy_engine_enqueue(u->s.engine, u->s.optimizer, &config, &scale, next);
    Py_XDECREF(next);
    if (done <= 0) {
        return done;
    }
    return leave_pending(op, u) < 0 || finish_average(u) < 0 ||
                   count_local_step(u, names) < 0 ||
                   ctpy_trainer_fire(op, names->str_on_optimizer_step) < 0
               ? -1
               : 1;
}

static int
step_schedule_back(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *undo = ctpy_field(((Trainer *)op)->enqueued_undo);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    PyObject *done = undo == NULL ? NULL : PyObject_CallNoArgs(undo);
    int result = scheduler == NULL || (undo != NULL && done == NULL) ? -1 : 0;
    if (result == 0 && !((Trainer *)op)->schedule_on_metric &&
        ctpy_scheduler_is_native(names, scheduler)) {
        result = ctpy_scheduler_step_back(scheduler);
    }
    Py_XDECREF(done);
    Py_XDECREF(undo);
    Py_XDECREF(scheduler);
    return result;
}

int
ctpy_await_update(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *engine = ctpy_field(self->enqueued_engine);
    ctpy_update u = {0};
    if (engine == NULL) {
        return 0;
    }
    u.scaler = ctpy_field(self->enqueued_scaler);
    Py_CLEAR(self->enqueued_engine);
    Py_CLEAR(self->enqueued_scaler);
    const int failed =
        ctpy_engine_await(engine, &u.s.result) < 0 || scaler_update(&u, names) < 0;
    const bool scaled = u.scaler != NULL;
    const ct_step_result result = u.s.result;
    Py_DECREF(engine);
    Py_XDECREF(u.scaler);
    if (failed || ctpy_trainer_check_collectives(op) < 0) {
        return -1;
    }
    self->last_grad_norm = result.grad_norm;
    self->skipped_update = !result.updated;
    if (!result.updated && self->enqueued_average != NULL) {
        ctpy_average_take_back(self->enqueued_average, self->enqueued_due);
    }
    Py_CLEAR(self->enqueued_average);
    if (!result.updated && step_schedule_back(op) < 0) {
        return -1;
    }
    Py_CLEAR(self->enqueued_undo);
    return result.finite || scaled ? 0 : report_nonfinite(op, self->enqueued_step);
}

static const char Trainer__await_update_doc[] =
    "_await_update($self, /)\n--\n\n"
    "Wait for the result of the last update where a GPU is still busy with it.";

static PyObject *
Trainer__await_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return ctpy_await_update(op) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- after the update ------------------------------------------------------------ */

static int
drop_gradients(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (!((Trainer *)op)->stray_parameters) {
        return ctpy_grads_drop(names, u->s.optimizer);
    }
    return call(run->model, names->str_zero_grad);
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

static int
update_make(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    PyObject *average = u->average_due ? u->average : NULL;
    if (u->s.engine != NULL && ctpy_engine_attach(u->s.engine, average) < 0) {
        return -1;
    }
    const int enqueued = update_enqueue(op, u);
    return enqueued < 0 ? -1 : enqueued ? 0 : update_apply(op, run, u);
}

int
ctpy_finish_update(PyObject *op, ctpy_run *run, PyObject **learning_rate)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_update u = {0};
    int result = -1;
    if (ctpy_await_update(op) == 0 && update_open(op, &u) == 0 &&
        update_make(op, run, &u) == 0 &&
        (*learning_rate =
             PyObject_CallMethodNoArgs(op, names->str__get_learning_rate)) != NULL &&
        (!u.s.result.updated || step_schedule(op) == 0) &&
        drop_gradients(op, run, &u) == 0 && advance_counters(op, run) == 0) {
        ((Trainer *)op)->in_update = false;
        ((Trainer *)op)->half_updated = false;
        Py_CLEAR(run->before);
        result = ctpy_trainer_fire(op, names->str_on_step_end);
    }
    update_release(&u);
    return result;
}

PyMethodDef Trainer_trainer_update_methods[] = {
    {"_clip_grad_norm", Trainer__clip_grad_norm, METH_O,      Trainer__clip_grad_norm_doc},
    {"_await_update",   Trainer__await_update,   METH_NOARGS, Trainer__await_update_doc  },
    {NULL,              NULL,                    0,           NULL                       },
};
