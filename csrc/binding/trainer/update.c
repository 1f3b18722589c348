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

#include "math/norm.h"

/* One update, between the functions that make it. */
typedef struct ctpy_update {
    PyObject *optimizer;
    PyObject
        *engine; /* of one of our optimizers whose step() nobody replaced, or NULL */
    PyObject *scaler;  /* the loss scaler, or NULL */
    PyObject *average; /* of the weights, or NULL */
    PyObject *blocks;  /* a BMUF, for local steps, or NULL */
    PyObject *shards;  /* the Communicator of the ranks that each have a shard of every
                          parameter, or NULL */
    bool average_due;
    double loss_scale;
    bool on_host;     /* the gradients are in host memory */
    bool overridden;  /* somebody else's _clip_grad_norm clips by norm */
    bool clip_first;  /* somebody looks at the gradients between clipping and update */
    ctpy_grads grads; /* those clipped in place */
    ct_step_config config;
    ct_step_result result;
} ctpy_update;

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

/* ---- the settings of an update --------------------------------------------------- */

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
open_scaler(PyObject *op, ctpy_update *u)
{
    u->scaler = ctpy_field(((Trainer *)op)->loss_scaler);
    u->loss_scale = 1.0;
    if (u->scaler == NULL) {
        return 0;
    }
    u->config.nonfinite = CT_NONFINITE_SKIP; /* an overflow is the scaler's business */
    return ctpy_get_double(u->scaler, ctpy_state_borrow(op)->str_scale, &u->loss_scale);
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
        PyErr_SetString(
            PyExc_TypeError,
            "weight_average must be None, a ctrainer.EMA or a ctrainer.SWA");
        return -1;
    }
    u->average_due = ctpy_average_due(u->average, &u->config.ema_decay);
    return 0;
}

/* args.name as a double; `missing` where there is none, as in arguments of
 * transformers' own class, or None. */
static int
read_number(PyObject *args, PyObject *name, double missing, double *value)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, name, &failed);
    *value = missing;
    if (found != NULL && !Py_IsNone(found)) {
        *value = PyFloat_AsDouble(found);
        failed = *value == -1.0 && PyErr_Occurred() != NULL;
        if (!failed && !(*value > 0.0)) {
            PyErr_Format(PyExc_ValueError, "%U is %R; expected a number > 0", name,
                         found);
            failed = 1;
        }
    }
    Py_XDECREF(found);
    return failed ? -1 : 0;
}

static int
read_clip(PyObject *op, ct_clip *clip)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    if (args == NULL) {
        return -1;
    }
    const bool failed =
        ctpy_get_double(args, names->str_max_grad_norm, &clip->max_norm) < 0 ||
        read_number(args, names->str_grad_norm_type, 2.0, &clip->norm_type) < 0 ||
        read_number(args, names->str_max_grad_value, 0.0, &clip->value) < 0 ||
        ctpy_get_flag(args, names->str_clip_by_group, &clip->by_group) < 0;
    clip->max_norm = clip->max_norm > 0.0 ? clip->max_norm : 0.0;
    Py_DECREF(args);
    return failed ? -1 : 0;
}

/* Reads what the arguments and overrides say of clipping. */
static int
open_clip(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int clips = ctpy_is_default(op, names->str__clip_grad_norm);
    if (clips < 0 || read_clip(op, &u->config.clip) < 0) {
        return -1;
    }
    u->overridden = !clips && u->config.clip.max_norm > 0.0;
    u->on_host = ((Trainer *)op)->inputs_stay;
    return 0;
}

/* Reads over which ranks parameters are sharded, if they are. */
static int
open_shards(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->shards = ctpy_field(((Trainer *)op)->shard_group);
    if (u->shards == NULL) {
        return 0;
    }
    u->config.comm = ctpy_comm_borrow(names, u->shards);
    u->config.global_norm = true;
    return u->config.comm == NULL ? -1 : 0;
}

static int
update_open(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->blocks = ctpy_field(((Trainer *)op)->blocks);
    if (open_clip(op, u) < 0 || read_policy(op, &u->config.nonfinite) < 0 ||
        open_scaler(op, u) < 0 || open_average(op, u) < 0 || open_shards(op, u) < 0 ||
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

/* ---- the norm and clipping --------------------------------------------------------
 *
 * Our optimizers clip in their update. The gradients of any other optimizer, or those
 * that an override or a callback sees before the update, are clipped in place: by us in
 * host memory, by the framework on its devices. */

/* Reads an adapter's n norms into the sums that they are of. */
static int
take_norms(PyObject *norms, double p, Py_ssize_t n, double *sums)
{
    PyObject *items = PySequence_Tuple(norms);
    if (items != NULL && PyTuple_GET_SIZE(items) != n) {
        PyErr_Format(PyExc_ValueError, "the adapter gave %zd norms, not %zd",
                     PyTuple_GET_SIZE(items), n);
        Py_CLEAR(items);
    }
    for (Py_ssize_t i = 0; items != NULL && i < n; i++) {
        const double norm = PyFloat_AsDouble(PyTuple_GET_ITEM(items, i));
        if (norm == -1.0 && PyErr_Occurred()) {
            Py_CLEAR(items);
            break;
        }
        sums[i] = ct_norm_add(ct_norm_kind_of(p), p, 0.0, norm);
    }
    Py_XDECREF(items);
    return items == NULL ? -1 : 0;
}

/* Reads norms, one for each group or one of all, into the list's sums and their total.
 */
static int
take_group_norms(PyObject *norms, double p, ct_grads *list, bool by_group)
{
    double *total = ct_grads_total(list), *sums = by_group ? list->sums : total;
    const size_t n = by_group ? list->n_groups : 1;
    const int result = take_norms(norms, p, (Py_ssize_t)n, sums);
    if (by_group) {
        *total = 0.0;
        for (size_t i = 0; result == 0 && i < n; i++) {
            *total = ct_norm_merge(ct_norm_kind_of(p), *total, sums[i]);
        }
    }
    return result;
}

/* Adds up, over the ranks with shards, sums of powers of gradients for the p-norm. */
static int
reduce_sums(PyObject *op, const ctpy_update *u, double p, double *sums, size_t n)
{
    const ct_reduce_op how =
        ct_norm_kind_of(p) == CT_NORM_MAX ? CT_REDUCE_MAX : CT_REDUCE_SUM;
    return u->shards == NULL ? 0
                             : ctpy_comm_reduce_numbers(ctpy_state_borrow(op),
                                                        u->shards, NULL, sums, n, how);
}

static int
device_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ct_grads *list = &u->grads.list;
    const bool by_group = ct_clip_by_group(clip, list);
    PyObject *p = PyFloat_FromDouble(clip->norm_type), *norms = NULL;
    if (p != NULL) {
        PyObject *stack[] = {u->optimizer, p, by_group ? Py_True : Py_False};
        norms = ctpy_ask_adapter(op, ctpy_state_borrow(op)->str_grad_norms, stack, 3);
        Py_DECREF(p);
    }
    int result =
        norms == NULL ? -1 : take_group_norms(norms, clip->norm_type, list, by_group);
    Py_XDECREF(norms);
    if (result == 0) { /* without groups the total is all that there is */
        double *sums = by_group ? list->sums : ct_grads_total(list);
        result = reduce_sums(op, u, clip->norm_type, sums,
                             by_group ? list->n_groups + 1 : 1);
    }
    if (result == 0) {
        *norm = ct_clip_decide(clip, list, u->loss_scale);
    }
    return result;
}

static int
host_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ct_grads *list = &u->grads.list;
    if (ctpy_grads_sum(&u->grads, clip) < 0 ||
        reduce_sums(op, u, clip->norm_type, list->sums, list->n_groups + 1) < 0) {
        return -1;
    }
    *norm = ct_clip_decide(clip, list, u->loss_scale);
    return 0;
}

static int
open_and_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_grads_close(&u->grads);
    if (ctpy_grads_open(names, u->optimizer, u->on_host, &u->grads) < 0) {
        return -1;
    }
    for (size_t g = 0; u->overridden && g < u->grads.list.n_groups; g++) {
        u->grads.list.groups[g].max_norm = 0.0; /* clipping by norm is not ours */
    }
    return (u->on_host ? host_measure : device_measure)(op, u, clip, norm);
}

/* Before an override of _clip_grad_norm nothing is clipped. */
static ct_clip
clip_before(const ctpy_update *u)
{
    return u->overridden ? (ct_clip){.norm_type = u->config.clip.norm_type}
                         : u->config.clip;
}

/* Measures the gradients of an update: by the engine, or to be clipped in place. */
static int
measure(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    double norm;
    if (u->engine != NULL && !u->clip_first) {
        return ctpy_engine_measure(u->engine, u->optimizer, &u->config, u->loss_scale,
                                   &u->result);
    }
    if (open_and_measure(op, u, &clip, &norm) < 0) {
        return -1;
    }
    u->result.grad_norm = norm;
    u->result.finite = isfinite(norm);
    u->result.clip_coef = ct_clip_least(&u->grads.list);
    return 0;
}

static int
device_clip(PyObject *op, ctpy_update *u, const ct_clip *clip)
{
    const ct_grads *list = &u->grads.list;
    PyObject *limit =
        ct_clip_by_value(clip) ? PyFloat_FromDouble(clip->value) : Py_NewRef(Py_None);
    PyObject *factors = PyList_New((Py_ssize_t)list->n_groups);
    for (size_t g = 0; factors != NULL && g < list->n_groups; g++) {
        PyObject *factor = PyFloat_FromDouble(list->groups[g].coef / u->loss_scale);
        if (factor == NULL) {
            Py_CLEAR(factors);
        }
        else {
            PyList_SET_ITEM(factors, (Py_ssize_t)g, factor);
        }
    }
    PyObject *stack[] = {u->optimizer, factors, limit};
    PyObject *answer =
        factors == NULL || limit == NULL
            ? NULL
            : ctpy_ask_adapter(op, ctpy_state_borrow(op)->str_clip_grads, stack, 3);
    Py_XDECREF(factors);
    Py_XDECREF(limit);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
clip_in_place(PyObject *op, ctpy_update *u, const ct_clip *clip)
{
    return u->on_host ? ctpy_grads_clip(&u->grads, clip, u->loss_scale)
                      : device_clip(op, u, clip);
}

/* An override of _clip_grad_norm(model) clips by itself and returns the norm. */
static int
clip_by_override(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *norm =
        PyObject_CallMethodOneArg(op, names->str__clip_grad_norm, run->model);
    if (norm == NULL) {
        return -1;
    }
    const double value = Py_IsNone(norm) ? 0.0 : PyFloat_AsDouble(norm);
    if (!Py_IsNone(norm)) {
        u->result.grad_norm = value;
    }
    Py_DECREF(norm);
    return value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* After an override, which may have put other tensors in place of the gradients. */
static int
clip_by_value(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = {.value = u->config.clip.value};
    ctpy_grads_close(&u->grads);
    if (!ct_clip_by_value(&clip)) {
        return 0;
    }
    return ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, u->on_host, &u->grads) <
                   0
               ? -1
               : clip_in_place(op, u, &clip);
}

/* Unscales and clips in place, unless the engine will, in its update. */
static int
clip_update(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    if (u->engine != NULL && !u->clip_first) {
        return 0;
    }
    if (clip_in_place(op, u, &clip) < 0) {
        return -1;
    }
    u->loss_scale = 1.0;
    if (u->overridden &&
        (clip_by_override(op, run, u) < 0 || clip_by_value(op, u) < 0)) {
        return -1;
    }
    u->result.clip_coef = 1.0;
    u->config.clip = (ct_clip){0};
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
    ctpy_update u = {.loss_scale = 1.0};
    double norm = 0.0;
    u.optimizer = PyObject_GetAttr(op, names->str_optimizer);
    bool failed =
        u.optimizer == NULL || open_clip(op, &u) < 0 || open_shards(op, &u) < 0;
    u.overridden = false; /* an override may call this one */
    u.config.clip.value = 0.0;
    failed = failed || open_and_measure(op, &u, &u.config.clip, &norm) < 0 ||
             clip_in_place(op, &u, &u.config.clip) < 0;
    ctpy_grads_close(&u.grads);
    Py_XDECREF(u.shards);
    Py_XDECREF(u.optimizer);
    return failed ? NULL : PyFloat_FromDouble(norm);
}

/* ---- norms of layers, for the log -------------------------------------------------
 *
 * Measured in passes of their own, in updates after which a log is due, so that neither
 * the other updates nor the trained weights depend on them. */

/* Whether a log follows this update, by ctrainer.callbacks.is_log_due(). */
static int
log_follows(PyObject *op, const ctpy_run *run, PyObject *batches, PyObject *args,
            bool *due)
{
    const long epoch_ends =
        run->micro_step + PyList_GET_SIZE(batches) >= run->steps_in_epoch;
    PyObject *state = PyObject_GetAttr(op, ctpy_state_borrow(op)->str_state);
    PyObject *module =
        state == NULL ? NULL : PyImport_ImportModule("ctrainer.callbacks");
    PyObject *answer = module == NULL ? NULL
                                      : PyObject_CallMethod(module, "is_log_due", "OOl",
                                                            args, state, epoch_ends);
    const int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    *due = truth > 0;
    Py_XDECREF(answer);
    Py_XDECREF(module);
    Py_XDECREF(state);
    return truth < 0 ? -1 : 0;
}

int
ctpy_metrics_plan(PyObject *op, ctpy_run *run, PyObject *batches)
{
    ctpy_state *names = ctpy_state_borrow(op);
    bool layers, due = true;
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    Py_CLEAR(((Trainer *)op)->grad_metrics);
    const bool failed =
        args == NULL ||
        ctpy_get_flag(args, names->str_log_layer_grad_norms, &layers) < 0 ||
        (layers && log_follows(op, run, batches, args, &due) < 0);
    Py_XDECREF(args);
    run->layer_norms_due = !failed && layers && due;
    return failed ? -1 : 0;
}

static int
sum_on_host(PyObject *op, const ctpy_update *u, double p, Py_ssize_t n, double *sums)
{
    ctpy_grads grads;
    ct_status status = CT_OK;
    ct_error err;
    if (ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, true, &grads) < 0) {
        return -1;
    }
    if (grads.list.n != (size_t)n) {
        PyErr_SetString(PyExc_RuntimeError, "the gradients changed while being read");
        ctpy_grads_close(&grads);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_grads_sum_each(&grads.list, NULL, p, sums, &err);
    Py_END_ALLOW_THREADS
    ctpy_grads_close(&grads);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
sum_on_device(PyObject *op, const ctpy_update *u, double p, Py_ssize_t n, double *sums)
{
    PyObject *norm_type = PyFloat_FromDouble(p), *norms = NULL;
    if (norm_type != NULL) {
        PyObject *stack[] = {u->optimizer, norm_type};
        norms = ctpy_ask_adapter(op, ctpy_state_borrow(op)->str_layer_norms, stack, 2);
        Py_DECREF(norm_type);
    }
    const int result = norms == NULL ? -1 : take_norms(norms, p, n, sums);
    Py_XDECREF(norms);
    return result;
}

static PyObject *
list_of(const double *sums, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyObject *sum = PyFloat_FromDouble(sums[i]);
        if (sum == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, sum);
    }
    return list;
}

/* trainer._take_layer_norms() of the parameters that have a gradient. */
static int
take_layer_norms(PyObject *op, const ctpy_update *u, PyObject *params)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const double p = u->config.clip.norm_type;
    const Py_ssize_t n = PyList_GET_SIZE(params);
    PyObject *list = NULL, *answer = NULL;
    double *sums = PyMem_New(double, (size_t)n);
    if (sums == NULL) {
        (void)PyErr_NoMemory();
    }
    else if ((u->on_host ? sum_on_host : sum_on_device)(op, u, p, n, sums) == 0 &&
             reduce_sums(op, u, p, sums, (size_t)n) == 0) {
        list = list_of(sums, n);
    }
    PyObject *numbers =
        list == NULL ? NULL : Py_BuildValue("(OOdd)", params, list, p, u->loss_scale);
    PyObject *method =
        numbers == NULL ? NULL : PyObject_GetAttr(op, names->str__take_layer_norms);
    if (method != NULL) {
        answer = PyObject_CallObject(method, numbers);
    }
    Py_XDECREF(method);
    Py_XDECREF(numbers);
    Py_XDECREF(answer);
    Py_XDECREF(list);
    PyMem_Free(sums);
    return answer == NULL ? -1 : 0;
}

/* Called after measuring and before clipping. */
static int
measure_layers(PyObject *op, const ctpy_run *run, const ctpy_update *u)
{
    if (!run->layer_norms_due) {
        return 0;
    }
    PyObject *params = ctpy_grads_params(ctpy_state_borrow(op), u->optimizer);
    const int result = params == NULL ? -1 : take_layer_norms(op, u, params);
    Py_XDECREF(params);
    return result;
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
    if (ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, u->on_host, &grads) < 0) {
        return -1;
    }
    for (size_t i = 0; done == 0 && i < grads.list.n; i++) {
        done = ctpy_trainer_reduce_span(op, &grads.list.spans[i], CT_REDUCE_MEAN);
    }
    ctpy_grads_close(&grads);
    return done;
}

/* Reports a skipped update: in the counters now, in the next log, and by one warning in
 * a run. */
static int
report_nonfinite(PyObject *op, ctpy_update *u)
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
            "the learning rate, or set nonfinite_policy='skip' to continue",
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

/* Ranks with local steps count every update, made or not, and synchronize where due. */
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

/* Averages the parameters that the update has not averaged itself. */
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
    const bool local_steps = u->blocks != NULL;
    if ((!local_steps && average_grads(op, u) < 0) || measure(op, u) < 0 ||
        (!local_steps && agree_finite(op, &u->result.finite) < 0) ||
        measure_layers(op, run, u) < 0 ||
        (!u->result.finite && u->scaler == NULL && report_nonfinite(op, u) < 0) ||
        (u->result.finite && clip_update(op, run, u) < 0)) {
        return -1;
    }
    ((Trainer *)op)->last_grad_norm = u->result.grad_norm;
    if (ctpy_trainer_fire(op, names->str_on_pre_optimizer_step) < 0) {
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
                     : call_step(scheduler, names);
    }
    Py_XDECREF(scheduler);
    return result;
}

static int
drop_gradients(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (!((Trainer *)op)->stray_parameters) {
        return ctpy_grads_drop(names, u->optimizer);
    }
    PyObject *answer = PyObject_CallMethodNoArgs(run->model, names->str_zero_grad);
    Py_XDECREF(answer);
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

int
ctpy_finish_update(PyObject *op, ctpy_run *run, PyObject **learning_rate)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_update u = {0};
    int result = -1;
    if (update_open(op, &u) == 0 && update_apply(op, run, &u) == 0 &&
        (*learning_rate =
             PyObject_CallMethodNoArgs(op, names->str__get_learning_rate)) != NULL &&
        (!u.result.updated || step_schedule(op) == 0) &&
        drop_gradients(op, run, &u) == 0 && advance_counters(op, run) == 0) {
        ((Trainer *)op)->in_update = false;
        result = ctpy_trainer_fire(op, names->str_on_step_end);
    }
    update_release(&u);
    return result;
}

PyMethodDef Trainer_trainer_update_methods[] = {
    {"_clip_grad_norm", Trainer__clip_grad_norm, METH_O, Trainer__clip_grad_norm_doc},
    {NULL,              NULL,                    0,      NULL                       },
};
