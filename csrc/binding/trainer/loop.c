/* The training loop of a Trainer: epochs, updates, micro-batches and signals.
 *
 * Python prepares and finishes a run; between both, C decides on the next action.
 * Attributes that a hook may replace (control, state, args) are read again after the
 * hook. The ranks agree, before and after each update, on the number of batches and on
 * what callbacks and signals request: each takes part in each agreement, in the same
 * order, or every rank raises.
 *
 * With args.auto_find_batch_size micro-batches run in parts (binding/engine/parts.h).
 */
#include "binding/engine/parts.h"
#include "binding/runtime/buffer.h"
#include "binding/trainer/trainer.h"

#include <string.h>

/* ---- agreement of the ranks before an update, on batches and targets --------------
 */

/* Before an update: *enough is whether all ranks have a batch; run->targets is the sum
 * of the ranks' targets. Ranks with different numbers of batches all raise, with each
 * rank's number, or warn of batches that are left over where the arguments allow them.
 */
static int
ranks_begin(PyObject *op, ctpy_run *run, PyObject *batches, bool *enough)
{
    enum {
        WITHOUT,
        TARGETS,
        UNCOUNTED,
        BATCHES,
        SQUARES, /* of their numbers: those are alike where none is above the mean */
        COUNT
    };
    ctpy_state *names = ctpy_state_borrow(op);
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    const int ranks = ctpy_trainer_world_size(op);
    int64_t values[COUNT] = {n == 0, 0, 0, n, n * n};
    int counts, failed = 0;
    run->targets = -1;
    *enough = n > 0;
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    if (ctpy_field_bool(op, names->str_args, names->str_average_tokens_across_devices,
                        &counts) < 0) {
        return -1;
    }
    const int64_t targets = counts ? ctpy_count_batches(op, batches, &failed) : -1;
    values[TARGETS] = targets < 0 ? 0 : targets;
    values[UNCOUNTED] = targets < 0;
    if (failed || ctpy_trainer_sum(op, values, COUNT) < 0) {
        return -1;
    }
    if (values[SQUARES] * ranks != values[BATCHES] * values[BATCHES] &&
        ctpy_drop_steal(ctpy_call_function("ctrainer.trainer.run", "different_batches",
                                           "(OnL)", op, n,
                                           (long long)values[WITHOUT])) < 0) {
        return -1;
    }
    *enough = values[WITHOUT] == 0;
    if (values[UNCOUNTED] == 0 && values[TARGETS] > 0) {
        run->targets = values[TARGETS];
    }
    return 0;
}

/* ---- agreement after an update, on requests of callbacks and signals --------------
 */

/* What a control requests, and a signal; the first three are done after an update. */
enum {
    LOG,
    EVALUATE,
    SAVE,
    EPOCH_STOP,
    TRAINING_STOP,
    SIGNAL,
    NO_SIGNAL,
    WISHES
};

static PyObject *
wish_name(const ctpy_state *names, int wish)
{
    PyObject *const all[SIGNAL] = {names->str_should_log, names->str_should_evaluate,
                                   names->str_should_save, names->str_should_epoch_stop,
                                   names->str_should_training_stop};
    return all[wish];
}

/* Reads the wishes up to `last` from the control. */
static int
read_wishes(PyObject *op, int last, double *wishes)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int value = 0, result = control == NULL ? -1 : 0;
    for (int i = 0; result == 0 && i <= last; i++) {
        result = ctpy_get_bool(control, wish_name(names, i), &value);
        wishes[i] = value;
    }
    Py_XDECREF(control);
    return result;
}

static int
grant_wishes(PyObject *op, const double *had, const double *wishes)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int result = control == NULL ? -1 : 0;
    for (int i = 0; result == 0 && i < SIGNAL; i++) {
        if (wishes[i] > had[i]) {
            result = PyObject_SetAttr(control, wish_name(names, i), Py_True);
        }
    }
    Py_XDECREF(control);
    return result;
}

static bool
is_any_due(const double *wishes)
{
    return wishes[LOG] > 0.0 || wishes[EVALUATE] > 0.0 || wishes[SAVE] > 0.0;
}

/* Seconds between the arrivals, on two ranks, of a signal to all ranks. */
#define SIGNAL_SECONDS 5.0

/* Whether ranks with a signal leave the ranks without, which are enough to continue:
 * 1, 0, or -1 with an exception, also on a rank that leaves now. */
static int
some_leave(PyObject *op, const double *wishes)
{
    Trainer *self = (Trainer *)op;
    const int number = ctpy_signal_requested();
    double left = number == 0;
    if (self->least_ranks == 0 || wishes[SIGNAL] == 0.0 || wishes[NO_SIGNAL] == 0.0) {
        return 0;
    }
    if (ctpy_trainer_reduce(op, &left, 1, CT_REDUCE_SUM) < 0) {
        return -1;
    }
    if (left < (double)self->least_ranks) {
        return 0;
    }
    if (self->leaves_at.at_seconds == 0.0) {
        self->leaves_at = ct_deadline_after(SIGNAL_SECONDS);
    }
    if (number != 0 && ct_deadline_left(self->leaves_at) == 0.0) {
        PyErr_Format(PyExc_RuntimeError,
                     "signal %d has asked this rank to stop; the others continue",
                     number);
        return -1;
    }
    return 1;
}

/* A request of one rank's control (to log, evaluate, save or stop), or a signal that
 * one rank has received, becomes the request of all ranks. *due: some rank logs,
 * evaluates or saves, and callbacks of the other ranks will see the request; false with
 * one rank.
 */
static int
ranks_agree(PyObject *op, bool *due)
{
    const int ranks = ctpy_trainer_world_size(op);
    double wishes[WISHES], had[WISHES] = {0};
    *due = false;
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    if (read_wishes(op, TRAINING_STOP, had) < 0) {
        return -1;
    }
    had[SIGNAL] = ctpy_signal_requested();
    had[NO_SIGNAL] = had[SIGNAL] == 0.0;
    memcpy(wishes, had, sizeof wishes);
    if (ctpy_trainer_reduce(op, wishes, WISHES, CT_REDUCE_MAX) < 0) {
        return -1;
    }
    const int leaves = some_leave(op, wishes);
    if (leaves < 0) {
        return -1;
    }
    if (!leaves) {
        ctpy_signal_request((int)wishes[SIGNAL]);
        ((Trainer *)op)->agreed_signal = (int)wishes[SIGNAL];
    }
    *due = is_any_due(wishes);
    return grant_wishes(op, had, wishes);
}

/* ---- what is due: a log, an evaluation, a checkpoint ------------------------------
 */

/* Whether the hook _maybe_log_save_evaluate is called: 1, 0 or -1. An override is
 * called at every step, ours if a log, an evaluation or a checkpoint is due. */
static int
wants_hook(PyObject *op)
{
    double wishes[WISHES] = {0};
    const int native =
        ctpy_is_default(op, ctpy_state_borrow(op)->str__maybe_log_save_evaluate);
    if (native <= 0) {
        return native < 0 ? -1 : 1;
    }
    return read_wishes(op, SAVE, wishes) < 0 ? -1 : is_any_due(wishes);
}

/* Agrees on the requests of all ranks' callbacks and signals, and logs, evaluates and
 * saves where one of them asks for it. */
static int
do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    bool due;
    const int wanted = ranks_agree(op, &due) < 0 ? -1 : wants_hook(op);
    if (wanted < 0 || (wanted && (ctpy_await_update(op) < 0 ||
                                  ctpy_drop_steal(ctpy_call_function(
                                      "ctrainer.trainer.run", "log_save_evaluate",
                                      "(OOO)", op, run, learning_rate)) < 0))) {
        return -1;
    }
    return due ? ranks_agree(op, &due) : 0;
}

/* Whether a signal on some rank ends the run on all ranks. */
static bool
ranks_stop(PyObject *op)
{
    const Trainer *self = (const Trainer *)op;
    return ctpy_trainer_is_alone(op) ? ctpy_stop_requested() : self->agreed_signal != 0;
}

/* ---- the sum of losses ------------------------------------------------------------
 */

/* Reads a loss in host memory, a tensor or array of one element. 1 when *value is set,
 * 0 for a loss on a device, -1 with an exception. */
static int
host_scalar(ctpy_state *names, PyObject *loss, double *value)
{
    ct_span span;
    if (PyFloat_Check(loss)) {
        *value = PyFloat_AS_DOUBLE(loss);
        return 1;
    }
    if (ctpy_span_from(names, loss, "loss", 0, &span) < 0) {
        return ctpy_forgive() ? 0 : -1;
    }
    if (span.n != 1) {
        PyErr_Format(
            PyExc_ValueError,
            "the loss must be a scalar, got %zu elements; take its mean or sum "
            "in compute_loss",
            span.n);
        return -1;
    }
    if (span.dtype == CT_F32) {
        *value = *(const float *)span.data;
        return 1;
    }
    if (span.dtype == CT_F64) {
        *value = *(const double *)span.data;
        return 1;
    }
    return 0;
}

/* Reads the loss of a micro-batch in host memory. A loss on a device is added to
 * device_loss, and *value is 0. */
static int
read_loss(PyObject *op, PyObject *loss, double *value)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    const int found = host_scalar(names, loss, value);
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    /* On a device: summed there, so that nothing waits for it until a log is due. */
    PyObject *had = self->device_loss == NULL ? Py_None : self->device_loss;
    PyObject *stack[] = {Py_NewRef(had), loss};
    PyObject *sum = ctpy_ask_adapter(op, names->str_add_device_loss, stack, 2);
    Py_DECREF(had);
    *value = 0.0;
    if (sum == NULL) {
        return -1;
    }
    Py_XSETREF(self->device_loss, sum);
    return 0;
}

/* Adds the update's loss to the logging window, or counts a loss that is Inf or NaN. */
static int
record_loss(PyObject *op, double loss)
{
    Trainer *self = (Trainer *)op;
    const ctpy_state *names = ctpy_state_borrow(op);
    int filter = 0;
    if (!isfinite(loss) &&
        ctpy_field_bool(op, names->str_args, names->str_logging_nan_inf_filter,
                        &filter) < 0) {
        return -1;
    }
    if (filter) {
        self->window_bad++;
    }
    else {
        self->window_loss += loss;
    }
    return 0;
}

/* ---- micro-batches --------------------------------------------------------------- */

/* On several ranks: enters model.no_sync(), by which gradients are exchanged after the
 * last micro-batch of an update only. *context is NULL for a model without no_sync(),
 * or if the arguments ask for an exchange after each micro-batch. */
static int
enter_no_sync(PyObject *op, PyObject *model, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    PyObject *method;
    *context = NULL;
    if (ranks <= 1 || ((Trainer *)op)->syncs_each_batch) {
        return ranks < 0 ? -1 : 0;
    }
    const int has = ctpy_lookup(model, names->str_no_sync, &method);
    if (has <= 0) {
        return has;
    }
    *context =
        ctpy_enter_context_steal(PyObject_CallNoArgs(method), names->str___enter__);
    Py_DECREF(method);
    return *context == NULL ? -1 : 0;
}

static int
control_flag(PyObject *op, PyObject *name, int *value)
{
    return ctpy_field_bool(op, ctpy_state_borrow(op)->str_control, name, value);
}

/* Whether a callback ends the epoch or the run: 1, 0 or -1. */
static int
callback_stops(PyObject *op)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    int epoch = 0, training = 0;
    return control_flag(op, names->str_should_epoch_stop, &epoch) < 0 ||
                   control_flag(op, names->str_should_training_stop, &training) < 0
               ? -1
               : epoch || training;
}

/* Adds the rows of a micro-batch to state.samples_done, for the samples a second. */
static int
count_rows(PyObject *op, ctpy_run *run, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const Py_ssize_t rows = ctpy_batch_size(inputs, names);
    PyObject *state = rows == -2 ? NULL : PyObject_GetAttr(op, names->str_state);
    run->samples += rows < 0 ? 0 : rows; /* -1: not known */
    const int result =
        state == NULL ? -1
                      : ctpy_set_int64(state, names->str_samples_done, run->samples);
    Py_XDECREF(state);
    return result;
}

/* Counts floating-point operations and tokens by transformers' hooks. */
static int
account_batch(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double flos, had;
    if (ctpy_double_steal(
            PyObject_CallMethodOneArg(op, names->str_floating_point_ops, inputs),
            &flos) < 0 ||
        (flos != 0.0 &&
         (ctpy_get_double(op, names->str_current_flos, &had) < 0 ||
          ctpy_set_double(op, names->str_current_flos, had + flos) < 0))) {
        return -1;
    }
    const int silent = ((Trainer *)op)->counts_tokens
                           ? 0
                           : ctpy_is_default(op, names->str__track_num_input_tokens);
    if (silent != 0) {
        return silent < 0 ? -1 : 0;
    }
    return ctpy_drop_steal(
        PyObject_CallMethodOneArg(op, names->str__track_num_input_tokens, inputs));
}

/* What a forward and backward pass is made with. */
typedef struct micro_batch {
    PyObject *inputs;
    PyObject *count; /* of items in the update, or None */
    double share;    /* in the update's loss */
    bool last;       /* the gradients are exchanged with it */
} micro_batch;

/* Forward and backward; adds the weighted loss to *loss. */
static int
train_on(PyObject *op, ctpy_run *run, const micro_batch *batch, double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {run->model, batch->inputs, batch->count};
    double value = 0.0;
    int failed = 0;
    PyObject *seen =
        batch->count == Py_None
            ? NULL
            : ctpy_get_optional(batch->count, names->str_was_read, &failed);
    if (seen != NULL) {
        failed = PyObject_SetAttr(batch->count, names->str_was_read, Py_False);
        Py_DECREF(seen);
    }
    PyObject *answer = failed ? NULL
                              : ctpy_call_adapted(op, names->str_training_step, stack,
                                                  2, names->kw_num_items_in_batch);
    if (answer == NULL) {
        return -1;
    }
    const int result = read_loss(op, answer, &value);
    Py_DECREF(answer);
    *loss += value;
    return result;
}

/* train_on(), within no_sync() unless the gradients are exchanged with this batch. */
static int
run_pass(PyObject *op, ctpy_run *run, const micro_batch *batch, double *loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *context;
    int result;
    self->batch_weight = batch->share;
    if (batch->last) {
        result = train_on(op, run, batch, loss);
    }
    else if (enter_no_sync(op, run->model, &context) < 0) {
        result = -1;
    }
    else {
        PyObject *done = train_on(op, run, batch, loss) < 0 ? NULL : Py_NewRef(Py_None);
        result = ctpy_drop_steal(
            ctpy_leave_context_steal(context, names->str___exit__, done));
    }
    self->batch_weight = 0.0;
    return result;
}

/* ---- parts of a micro-batch, after running out of memory ---------------------------
 */

typedef struct pass {
    PyObject *op;
    ctpy_run *run;
    const micro_batch *whole;
    double *loss;
} pass;

static int
run_part(void *context, PyObject *part, double weight, bool last)
{
    const pass *p = context;
    const micro_batch batch = {part, p->whole->count, p->whole->share * weight,
                               p->whole->last && last};
    double loss = 0.0;
    const int result = run_pass(p->op, p->run, &batch, &loss);
    *p->loss += result == 0 ? loss : 0.0;
    return result;
}

/* As run_pass(). 1: the update has to begin anew. */
static int
run_micro_batch(PyObject *op, ctpy_run *run, const micro_batch *batch, PyObject *parts,
                double *loss)
{
    pass p = {op, run, batch, loss};
    return parts == NULL ? run_pass(op, run, batch, loss)
                         : ctpy_parts_run(parts, batch->inputs, run_part, &p);
}

/* ---- all of an update ------------------------------------------------------------ */

/* Subclasses of transformers' Trainer read accelerator.sync_gradients, true in the last
 * micro-batch of an update. The accelerator is made at its first use and reads
 * _syncs_gradients then. ahead: of the micro-batches that are done. */
static int
note_batch(PyObject *op, ctpy_run *run, Py_ssize_t ahead, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = NULL;
    PyObject *made = ctpy_field(((Trainer *)op)->accelerator);
    int failed = 0;
    ((Trainer *)op)->syncs_gradients = last;
    run->begun = run->micro_step + 1 + ahead;
    if (made != NULL) {
        state = ctpy_get_optional(made, names->str_gradient_state, &failed);
        Py_DECREF(made);
    }
    if (state != NULL) {
        failed = ctpy_drop_steal(PyObject_CallMethodOneArg(
            state, names->str__set_sync_gradients, last ? Py_True : Py_False));
        Py_DECREF(state);
    }
    return failed ? -1 : 0;
}

/* Counts the micro-batch that is done, and calls back; 1 where a callback stops the
 * update before its last micro-batch. */
static int
finish_micro_batch(PyObject *op, ctpy_run *run, PyObject *inputs, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (account_batch(op, inputs) < 0) {
        return -1;
    }
    run->micro_step++;
    if (last) {
        return 0;
    }
    if (ctpy_trainer_fire(op, names->str_on_substep_end) < 0) {
        return -1;
    }
    /* On several ranks an update ends whole. */
    return ctpy_trainer_is_alone(op) ? callback_stops(op) : 0;
}

/* Of the micro-batches of an update, each counted once, also after repetitions. */
typedef struct progress {
    Py_ssize_t at, begun, done;
    double loss;
    bool stops; /* a callback ends the update */
} progress;

/* The micro-batch at p->at. 1: the update has to begin anew. */
static int
next_micro_batch(PyObject *op, ctpy_run *run, const micro_batch *batch, PyObject *parts,
                 progress *p)
{
    int result = note_batch(op, run, p->at - p->done, batch->last);
    if (result == 0 && p->at == p->begun) {
        p->begun++;
        result = count_rows(op, run, batch->inputs);
    }
    if (result == 0) {
        result = run_micro_batch(op, run, batch, parts, &p->loss);
    }
    if (result == 0 && batch->last && parts != NULL) {
        result = ctpy_parts_agree(parts);
    }
    if (result == 0 && p->at == p->done) {
        p->done++;
        result = finish_micro_batch(op, run, batch->inputs, batch->last);
        p->stops = result > 0;
    }
    p->at++;
    return p->stops ? 0 : result;
}

/* Without the losses that the micro-batches have added up. */
static int
begin_anew(PyObject *op, PyObject *parts, PyObject *device_loss, progress *p)
{
    p->at = 0;
    p->loss = 0.0;
    Py_XSETREF(((Trainer *)op)->device_loss, Py_XNewRef(device_loss));
    return ctpy_parts_call(parts, "rewind");
}

/* All micro-batches of an update, with their shares in its loss, which is added up in
 * *loss. 1: the update follows; 0: a callback has stopped training; -1. */
static int
run_micro_batches(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count,
                  const double *shares, double *loss)
{
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    PyObject *parts = ctpy_field(((Trainer *)op)->parts);
    PyObject *device_loss = Py_XNewRef(((Trainer *)op)->device_loss);
    progress p = {0};
    int result = ctpy_parts_call(parts, "begin");
    while (result == 0 && !p.stops && p.at < n) {
        PyObject *inputs = Py_NewRef(PyList_GET_ITEM(batches, p.at));
        const micro_batch batch = {inputs, count, shares[p.at], p.at + 1 == n};
        result = next_micro_batch(op, run, &batch, parts, &p);
        if (result > 0) {
            result = begin_anew(op, parts, device_loss, &p);
        }
        Py_DECREF(inputs);
    }
    if (parts != NULL) {
        ctpy_parts_end(parts);
    }
    Py_XDECREF(device_loss);
    Py_XDECREF(parts);
    *loss = p.loss;
    return result < 0 ? -1 : !p.stops;
}

/* ---- one update ------------------------------------------------------------------ */

/* After Ctrl-C or SIGTERM: saves a checkpoint of the last whole update and ends. */
static int
save_and_stop(PyObject *op, ctpy_run *run)
{
    PyObject *stack[] = {run->model, ctpy_or_none(run->trial)};
    if (ctpy_await_update(op) < 0) {
        return -1;
    }
    return ctpy_drop_steal(
        ctpy_call_hook(op, ctpy_state_borrow(op)->str__save_on_signal, stack, 2));
}

/* Whether Ctrl-C stopped a hook: clears the exception and keeps the signal's flag. */
static bool
is_interrupt(PyObject *op)
{
    if (ranks_stop(op) && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        return true;
    }
    return false;
}

/* Weights of the micro-batches in the update's loss, in proportion to their targets, or
 * equal without labels. On several ranks, where run->targets is known, in proportion to
 * the targets of all ranks and times world_size, by which the mean of the gradients
 * divides. shares has room for a double for each batch. */
static int
ctpy_batch_shares(PyObject *op, const ctpy_run *run, PyObject *batches, double *shares)
{
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    const bool of_all = run->targets > 0; /* ranks' */
    double total = 0.0;
    int failed = 0;
    for (Py_ssize_t i = 0; (n > 1 || of_all) && i < n; i++) {
        int64_t targets = ctpy_count_targets(op, PyList_GET_ITEM(batches, i), &failed);
        if (failed) {
            return -1;
        }
        if (targets < 0) {
            total = 0.0;
            break;
        }
        shares[i] = (double)targets;
        total += shares[i];
    }
    if (of_all) {
        total = (double)run->targets / (double)ctpy_trainer_world_size(op);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        shares[i] = n == 1 && !of_all ? 1.0
                    : total > 0.0     ? shares[i] / total
                                      : 1.0 / (double)n;
    }
    return 0;
}

/* The exception of an update, with what is needed to repeat the update, into the record
 * that args.crash_record asks for. The exception stays set. */
static void
record_crash(PyObject *op, const ctpy_run *run, PyObject *batches, PyObject *generators)
{
    PyObject *error = ctpy_take_exception();
    if (ctpy_drop_steal(ctpy_call_function("ctrainer.trainer.crash", "record",
                                           "(OOOOO)", op, run, batches, generators,
                                           error)) < 0) {
        PyErr_Clear();
    }
    ctpy_set_exception_steal(error);
}

/* Keeps in run->before what drop_update() of Python puts back. */
static int
note_before(PyObject *op, ctpy_run *run)
{
    const Trainer *self = (const Trainer *)op;
    PyObject *device_loss = self->device_loss == NULL ? Py_None : self->device_loss;
    PyObject *before =
        Py_BuildValue("(LdLdO)", (long long)run->micro_step, self->window_loss,
                      (long long)self->window_bad, self->counted_tokens, device_loss);
    if (before == NULL) {
        return -1;
    }
    Py_XSETREF(run->before, before);
    return 0;
}

/* The micro-batches of one update, and the update. 1 when an update was made or
 * skipped, 0 when a callback ended the epoch before, -1 with an exception. */
static int
ctpy_run_update(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    size_t n = (size_t)PyList_GET_SIZE(batches);
    double loss = 0.0, *shares = PyMem_New(double, n);
    PyObject *learning_rate = NULL, *generators = NULL;
    int result = -1;
    if (shares == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    if (((Trainer *)op)->records_crash) {
        generators = ctpy_ask_adapter(op, names->str_rng_state, NULL, 0);
        if (generators == NULL) {
            PyMem_Free(shares);
            return -1;
        }
    }
    ((Trainer *)op)->in_update = true;
    ((Trainer *)op)->grads_scaled = true;
    if (note_before(op, run) == 0 &&
        ctpy_set_int64(op, names->str_current_gradient_accumulation_steps,
                       (int64_t)n) == 0 &&
        ctpy_batch_shares(op, run, batches, shares) == 0 &&
        note_batch(op, run, 0, n == 1) == 0 &&
        ctpy_trainer_fire(op, names->str_on_step_begin) == 0) {
        result = run_micro_batches(op, run, batches, count, shares, &loss);
    }
    PyMem_Free(shares);
    if (result == 1 &&
        (record_loss(op, loss) < 0 || ctpy_finish_update(op, run, &learning_rate) < 0 ||
         do_what_is_due(op, run, learning_rate) < 0)) {
        result = -1;
    }
    if (result < 0 && generators != NULL && ((Trainer *)op)->in_update) {
        record_crash(op, run, batches, generators);
    }
    Py_XDECREF(generators);
    if (learning_rate != NULL) {
        Py_XSETREF(((Trainer *)op)->last_learning_rate, learning_rate);
    }
    return result;
}

/* What get_batch_samples, or its override, returns: the micro-batches of an update, a
 * list, and their count of items, or None. */
static PyObject *
next_batches(PyObject *op, ctpy_run *run, PyObject *iterator)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int64_t left = run->steps_in_epoch - run->micro_step;
    PyObject *pair = NULL;
    PyObject *n =
        PyLong_FromLongLong(left < run->accumulation ? left : run->accumulation);
    PyObject *device = ctpy_field_object(op, names->str_args, names->str_device);
    if (n != NULL && device != NULL) {
        PyObject *stack[] = {iterator, n, device};
        pair = ctpy_call_adapted(op, names->str_get_batch_samples, stack, 2,
                                 names->kw_device);
    }
    Py_XDECREF(device);
    Py_XDECREF(n);
    if (pair != NULL && (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
                         !PyList_Check(PyTuple_GET_ITEM(pair, 0)))) {
        PyErr_Format(PyExc_TypeError,
                     "get_batch_samples must return (list of batches, number of items "
                     "or None), got %.200R",
                     pair);
        Py_CLEAR(pair);
    }
    return pair;
}

/* One update. *more is false at the end of the epoch, by data, callback or signal. */
static int
run_one_update(PyObject *op, ctpy_run *run, PyObject *iterator, bool *more)
{
    PyObject *pair = next_batches(op, run, iterator);
    bool enough;
    *more = false;
    if (pair == NULL) {
        return -1;
    }
    PyObject *batches = PyTuple_GET_ITEM(pair, 0);
    int result = ranks_begin(op, run, batches, &enough);
    if (result == 0 && enough) {
        *more = true;
        result = ctpy_run_update(op, run, batches, PyTuple_GET_ITEM(pair, 1));
    }
    Py_DECREF(pair);
    if (result < 0 && !((Trainer *)op)->in_update && is_interrupt(op)) {
        result = 1; /* evaluation was cut short, the update before it is whole */
    }
    const int stop = result < 0 ? -1 : callback_stops(op);
    if (stop < 0) {
        return -1;
    }
    *more = *more && !stop && !ranks_stop(op);
    return ranks_stop(op) ? save_and_stop(op, run) : 0;
}

static int
run_updates(PyObject *op, ctpy_run *run, PyObject *iterator)
{
    bool more = true;
    for (int64_t i = run->micro_step / run->accumulation;
         more && i < run->updates_in_epoch; i++) {
        if (run_one_update(op, run, iterator, &more) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Drops the loader, whose deallocation ends its worker processes. In a child that a
 * hook has forked, the workers belong to the parent: there the loader is never freed.
 */
static void
drop_loader_steal(const ctpy_run *run, PyObject *loader)
{
    if (ct_owner_is_here(run->owner)) {
        Py_XDECREF(loader);
    }
}

/* The updates of an epoch, on_epoch_end and what is due then. */
static int
train_epoch(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int stop = 0; /* in the middle of the epoch, where a longer run would continue */
    PyObject *iterator =
        PyObject_CallMethodOneArg(op, names->str__epoch_iterator, (PyObject *)run);
    int result = iterator == NULL ? -1 : run_updates(op, run, iterator);
    drop_loader_steal(run, iterator);
    if (result == 0 && run->micro_step == 0 && !ranks_stop(op)) {
        result = ctpy_drop_steal(
            ctpy_call_function("ctrainer.trainer.run", "no_batches", "(O)", op));
    }
    if (result < 0 || control_flag(op, names->str_should_training_stop, &stop) < 0) {
        return -1;
    }
    ((Trainer *)op)->epoch_done = !stop || run->micro_step >= run->steps_in_epoch;
    if (ctpy_trainer_fire(op, names->str_on_epoch_end) < 0) {
        return -1;
    }
    if (ranks_stop(op)) {
        return 0;
    }
    PyObject *last = ctpy_field(((Trainer *)op)->last_learning_rate);
    const int failed = do_what_is_due(op, run, last == NULL ? Py_None : last);
    Py_XDECREF(last);
    return failed;
}

static const char Trainer__train_epoch_doc[] =
    "_train_epoch($self, run, /)\n--\n\n"
    "Train for one epoch, from the run's place in it: what _run_epoch() does.";

static PyObject *
Trainer__train_epoch(PyObject *op, PyObject *arg)
{
    if (!Py_IS_TYPE(arg, ctpy_state_borrow(op)->Run)) {
        return PyErr_Format(PyExc_TypeError, "expected a Run, got %.100R", arg);
    }
    return train_epoch(op, (ctpy_run *)arg) < 0 ? NULL : Py_NewRef(Py_None);
}

/* One epoch: on_epoch_begin, and _run_epoch() or what it does. */
static int
run_epoch(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ((Trainer *)op)->epoch_done = false;
    Py_CLEAR(((Trainer *)op)->last_learning_rate);
    const int native = ctpy_trainer_fire(op, names->str_on_epoch_begin) < 0
                           ? -1
                           : ctpy_is_default(op, names->str__run_epoch);
    if (native != 0) {
        return native < 0 ? -1 : train_epoch(op, run);
    }
    return ctpy_drop_steal(
        ctpy_call_function("ctrainer.trainer.run", "call_run_epoch", "(OO)", op, run));
}

/* Counters and schedule become right also after an exception, and the caller gets that
 * exception. */
static void
await_after_error(PyObject *op)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (ctpy_await_update(op) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
}

static const char Trainer__run_epochs_doc[] =
    "_run_epochs($self, run, /)\n--\n\n"
    "Train from the run's place to its last epoch.";

static PyObject *
Trainer__run_epochs(PyObject *op, PyObject *arg)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_run *run = (ctpy_run *)arg;
    int64_t step;
    if (!Py_IS_TYPE(arg, names->Run)) {
        return PyErr_Format(PyExc_TypeError, "expected a Run, got %.100R", arg);
    }
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return NULL;
    }
    int stop = step >= run->max_steps; /* resumed at its end: nothing is left to do */
    for (; !stop && run->epoch < run->epochs; run->epoch++) {
        ((Trainer *)op)->epoch = run->epoch;
        if (run_epoch(op, run) < 0 ||
            control_flag(op, names->str_should_training_stop, &stop) < 0) {
            await_after_error(op);
            return ctpy_locate_error("training", "(OO)", op, run);
        }
        run->micro_step = 0;
        Py_CLEAR(run->checkpoint); /* its position was for the first epoch */
    }
    return ctpy_await_update(op) < 0 ? NULL : Py_NewRef(Py_None);
}

static const char Trainer__call_loop_doc[] =
    "_call_loop($self, loop, /)\n--\n\n"
    "Return what loop() returns, and the signal that has asked the run to end, or 0.\n"
    "Ctrl-C and SIGTERM set a flag meanwhile, where _handles_signals.";

static PyObject *
Trainer__call_loop(PyObject *op, PyObject *loop)
{
    Trainer *self = (Trainer *)op;
    ctpy_signals saved = {0};
    if (self->handles_signals) {
        ctpy_signals_install(&saved);
    }
    PyObject *output = PyObject_CallNoArgs(loop);
    const int number = ctpy_signals_restore(&saved);
    self->in_update = false;
    self->batch_weight = 0.0;
    self->agreed_signal = 0;
    self->leaves_at.at_seconds = 0.0;
    self->stop_signal = output == NULL ? number : 0;
    Py_CLEAR(self->device_scale); /* the next run may be on another device */
    return output == NULL ? NULL : Py_BuildValue("(Ni)", output, number);
}

/* ---- targets, for the count of items that a loss takes ----------------------------
 */

static const char Trainer__count_targets_doc[] =
    "_count_targets($self, batches, /)\n--\n\n"
    "Return the number of predicted targets in a list of batches, labels that are not\n"
    "-100; a loss that shifts its labels has none in the first column. -1 without\n"
    "batches or without labels to count.";

static PyObject *
Trainer__count_targets(PyObject *op, PyObject *batches)
{
    int failed;
    if (!PyList_Check(batches)) {
        return PyErr_Format(PyExc_TypeError, "expected a list of batches, got %.100s",
                            Py_TYPE(batches)->tp_name);
    }
    const int64_t n = ctpy_count_batches(op, batches, &failed);
    return failed ? NULL : PyLong_FromLongLong(n);
}

PyMethodDef Trainer_trainer_loop_methods[] = {
    {"_call_loop",     Trainer__call_loop,     METH_O, Trainer__call_loop_doc    },
    {"_run_epochs",    Trainer__run_epochs,    METH_O, Trainer__run_epochs_doc   },
    {"_train_epoch",   Trainer__train_epoch,   METH_O, Trainer__train_epoch_doc  },
    {"_count_targets", Trainer__count_targets, METH_O, Trainer__count_targets_doc},
    {NULL,             NULL,                   0,      NULL                      },
};
