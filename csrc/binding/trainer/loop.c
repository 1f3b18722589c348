/* The training loop of a Trainer: epochs, updates, micro-batches and signals.
 *
 * Python prepares a run and finishes the run; between both, C decides on the next
 * action. Attributes that a hook may replace (control, state, args) are read again
 * after the hook. The ranks agree, before and after each update, on the number of
 * batches and on what callbacks and signals request: each takes part in each agreement,
 * in the same order, or every rank raises. */
#include "binding/optim/optim.h"
#include "binding/runtime/buffer.h"
#include "binding/trainer/trainer.h"

#include "core/data/targets.h"

#include <string.h>

/* ---- agreement of the ranks before an update, on batches and targets --------------
 */

static int
warn_left_over(PyObject *op, Py_ssize_t batches, int64_t without)
{
    int64_t step;
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    return PyErr_WarnFormat(
        PyExc_UserWarning, 1,
        "the epoch ends after step %lld, where %lld of %d ranks have no batch left; "
        "%zd batches of rank %d are not trained on. even_batches in accelerator_config "
        "gives all ranks equally many",
        (long long)step, (long long)without, ctpy_trainer_world_size(op), batches,
        ctpy_trainer_comm_borrow(op)->rank);
}

/* The hook _ranks_differ raises for different numbers of batches, unless the arguments
 * allow them. */
static int
report_batches(PyObject *op, Py_ssize_t n)
{
    int64_t step;
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    PyObject *what = PyUnicode_FromFormat(
        "the ranks have different numbers of batches for update %lld",
        (long long)step + 1);
    PyObject *own = PyUnicode_FromFormat("has %zd", n), *answer = NULL;
    if (what != NULL && own != NULL) {
        PyObject *stack[] = {op, what, own};
        answer = PyObject_VectorcallMethod(names->str__ranks_differ, stack, 3, NULL);
    }
    Py_XDECREF(own);
    Py_XDECREF(what);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

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
        report_batches(op, n) < 0) {
        return -1;
    }
    *enough = values[WITHOUT] == 0;
    if (values[UNCOUNTED] == 0 && values[TARGETS] > 0) {
        run->targets = values[TARGETS];
    }
    return *enough || n == 0 ? 0 : warn_left_over(op, n, values[WITHOUT]);
}

/* ---- agreement after an update, on requests of callbacks and signals --------------
 */

enum {
    LOG,
    EVALUATE,
    SAVE,
    EPOCH_STOP,
    TRAINING_STOP,
    SIGNAL,
    WISHES
};

static int
read_wishes(PyObject *control, PyObject *const *fields, double *wishes)
{
    for (int i = 0; i < SIGNAL; i++) {
        int value;
        if (ctpy_get_bool(control, fields[i], &value) < 0) {
            return -1;
        }
        wishes[i] = value;
    }
    wishes[SIGNAL] = ctpy_signal_requested();
    return 0;
}

static int
grant_wishes(PyObject *control, PyObject *const *fields, const double *had,
             const double *wishes)
{
    for (int i = 0; i < SIGNAL; i++) {
        if (wishes[i] > had[i] && PyObject_SetAttr(control, fields[i], Py_True) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A request of one rank's control (to log, evaluate, save or stop), or a signal that
 * one rank has received, becomes the request of all ranks. *due: some rank logs,
 * evaluates or saves, and callbacks of the other ranks will see the request; false with
 * one rank.
 */
static int
ranks_agree(PyObject *op, bool *due)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const fields[] = {names->str_should_log, names->str_should_evaluate,
                                names->str_should_save, names->str_should_epoch_stop,
                                names->str_should_training_stop};
    const int ranks = ctpy_trainer_world_size(op);
    double wishes[WISHES], had[WISHES];
    *due = false;
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int result = control == NULL ? -1 : read_wishes(control, fields, wishes);
    if (result == 0) {
        memcpy(had, wishes, sizeof had);
        result = ctpy_trainer_reduce(op, wishes, WISHES, CT_REDUCE_MAX);
    }
    if (result == 0) {
        result = grant_wishes(control, fields, had, wishes);
        ctpy_signal_request((int)wishes[SIGNAL]);
        ((Trainer *)op)->agreed_signal = (int)wishes[SIGNAL];
        *due = wishes[LOG] > 0.0 || wishes[EVALUATE] > 0.0 || wishes[SAVE] > 0.0;
    }
    Py_XDECREF(control);
    return result;
}

/* ---- what is due: a log, an evaluation, a checkpoint ------------------------------
 */

/* Calls the hook with keywords for all arguments but the sum, since releases of
 * transformers differ in their order. An override is called at every step. */
static int
call_hook(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *loss = PyFloat_FromDouble(self->window_loss);
    PyObject *norm = PyFloat_FromDouble(self->last_grad_norm);
    PyObject *epoch = PyLong_FromLongLong(run->epoch);
    PyObject *keys =
        PyTuple_Pack(7, names->str_grad_norm, names->str_model, names->str_trial,
                     names->str_epoch, names->str_ignore_keys_for_eval,
                     names->str_start_time, names->str_learning_rate);
    PyObject *answer = NULL;
    if (loss != NULL && norm != NULL && epoch != NULL && keys != NULL) {
        PyObject *stack[] = {loss,
                             norm,
                             run->model,
                             ctpy_or_none(run->trial),
                             epoch,
                             ctpy_or_none(run->ignore_keys),
                             run->start_time,
                             learning_rate};
        answer =
            ctpy_call_adapted(op, names->str__maybe_log_save_evaluate, stack, 1, keys);
    }
    Py_XDECREF(keys);
    Py_XDECREF(epoch);
    Py_XDECREF(norm);
    Py_XDECREF(loss);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Whether the control requests a log, an evaluation or a checkpoint: 1, 0 or -1. */
static int
is_due(PyObject *op)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const wishes[] = {names->str_should_log, names->str_should_evaluate,
                                names->str_should_save};
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int due = control == NULL ? -1 : 0;
    for (size_t i = 0; due == 0 && i < sizeof wishes / sizeof wishes[0]; i++) {
        if (ctpy_get_bool(control, wishes[i], &due) < 0) {
            due = -1;
        }
    }
    Py_XDECREF(control);
    return due;
}

/* Calls the hook _maybe_log_save_evaluate if the hook is overridden, or if a log, an
 * evaluation or a checkpoint is due. */
static int
log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    const int native =
        ctpy_is_default(op, ctpy_state_borrow(op)->str__maybe_log_save_evaluate);
    const int wanted = native == 1 ? is_due(op) : native < 0 ? -1 : 1;
    return wanted > 0 ? call_hook(op, run, learning_rate) : wanted;
}

/* Agrees on the requests of all ranks' callbacks and signals, and logs, evaluates and
 * saves where one of them asks for it. */
static int
do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    bool due;
    if (ranks_agree(op, &due) < 0 || log_save_evaluate(op, run, learning_rate) < 0) {
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
flag(PyObject *op, PyObject *name, int *value)
{
    return ctpy_field_bool(op, ctpy_state_borrow(op)->str_control, name, value);
}

/* After Ctrl-C or SIGTERM: saves a checkpoint of the last whole update and ends. */
static int
save_and_stop(PyObject *op, ctpy_run *run)
{
    PyObject *stack[] = {op, run->model, ctpy_or_none(run->trial)};
    PyObject *answer = PyObject_VectorcallMethod(
        ctpy_state_borrow(op)->str__save_on_signal, stack, 3, NULL);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
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

/* Counts floating-point operations and tokens by transformers' hooks. */
static int
account_batch(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double flos, had;
    PyObject *answer =
        PyObject_CallMethodOneArg(op, names->str_floating_point_ops, inputs);
    if (answer == NULL) {
        return -1;
    }
    flos = PyFloat_AsDouble(answer);
    Py_DECREF(answer);
    if ((flos == -1.0 && PyErr_Occurred()) ||
        (flos != 0.0 &&
         (ctpy_get_double(op, names->str_current_flos, &had) < 0 ||
          ctpy_set_double(op, names->str_current_flos, had + flos) < 0))) {
        return -1;
    }
    if (((Trainer *)op)->counts_tokens) {
        answer =
            PyObject_CallMethodOneArg(op, names->str__track_num_input_tokens, inputs);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    return 0;
}

/* Forward and backward of one micro-batch; adds its weighted loss to *loss. */
static int
run_micro_batch(PyObject *op, ctpy_run *run, PyObject *inputs, PyObject *count,
                double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {run->model, inputs, count};
    double value = 0.0;
    int failed = 0;
    if (count != Py_None) {
        PyObject *seen = ctpy_get_optional(count, names->str_was_read, &failed);
        failed = failed || (seen != NULL &&
                            PyObject_SetAttr(count, names->str_was_read, Py_False) < 0);
        Py_XDECREF(seen);
    }
    PyObject *answer = failed ? NULL
                              : ctpy_call_adapted(op, names->str_training_step, stack,
                                                  2, names->kw_num_items_in_batch);
    if (answer == NULL) {
        return -1;
    }
    int result = ctpy_add_loss(op, answer, &value);
    Py_DECREF(answer);
    *loss += value;
    run->micro_step++;
    return result < 0 ? -1 : account_batch(op, inputs);
}

/* Whether a callback ends the update here. On several ranks an update ends whole. */
static int
should_stop(PyObject *op, int *stop)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int epoch = 0, training = 0;
    const int ranks = ctpy_trainer_world_size(op);
    *stop = 0;
    if (ranks != 1) {
        return ranks < 0 ? -1 : 0;
    }
    if (ctpy_field_bool(op, names->str_control, names->str_should_epoch_stop, &epoch) <
            0 ||
        ctpy_field_bool(op, names->str_control, names->str_should_training_stop,
                        &training) < 0) {
        return -1;
    }
    *stop = epoch || training;
    return 0;
}

/* Forward and backward of a micro-batch other than the last, within no_sync(). */
static int
run_without_exchange(PyObject *op, ctpy_run *run, PyObject *inputs, PyObject *count,
                     double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *context;
    if (enter_no_sync(op, run->model, &context) < 0) {
        return -1;
    }
    PyObject *done =
        run_micro_batch(op, run, inputs, count, loss) < 0 ? NULL : Py_NewRef(Py_None);
    done = ctpy_leave_context_steal(context, names->str___exit__, done);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Subclasses of transformers' Trainer read accelerator.sync_gradients, true in the last
 * micro-batch of an update. The accelerator is made at its first use and reads
 * _syncs_gradients then. */
static int
note_sync(PyObject *op, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *said = last ? Py_True : Py_False, *state = NULL, *answer = NULL;
    PyObject *made = ctpy_field(((Trainer *)op)->accelerator);
    int failed = 0;
    ((Trainer *)op)->syncs_gradients = last;
    if (made != NULL) {
        state = ctpy_get_optional(made, names->str_gradient_state, &failed);
        Py_DECREF(made);
    }
    if (state != NULL) {
        answer = PyObject_CallMethodOneArg(state, names->str__set_sync_gradients, said);
        failed = answer == NULL;
        Py_DECREF(state);
        Py_XDECREF(answer);
    }
    return failed ? -1 : 0;
}

/* All micro-batches. 1: the update follows; 0: a callback has stopped training; -1. */
static int
run_micro_batches(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count,
                  const double *shares, double *loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int stop = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batches); i++) {
        PyObject *inputs = Py_NewRef(PyList_GET_ITEM(batches, i));
        self->share = shares[i];
        const bool last = i + 1 == PyList_GET_SIZE(batches);
        int result = note_sync(op, last);
        if (result == 0) {
            result = (last ? run_micro_batch : run_without_exchange)(op, run, inputs,
                                                                     count, loss);
        }
        self->share = 0.0;
        Py_DECREF(inputs);
        if (result < 0) {
            return -1;
        }
        if (!last && (ctpy_trainer_fire(op, names->str_on_substep_end) < 0 ||
                      should_stop(op, &stop) < 0)) {
            return -1;
        }
        if (stop) {
            return 0;
        }
    }
    return 1;
}

/* Adds the update's loss to the logging window, or counts a loss that is Inf or NaN. */
static int
record_loss(PyObject *op, double loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int filter;
    if (isfinite(loss)) {
        self->window_loss += loss;
        return 0;
    }
    if (ctpy_field_bool(op, names->str_args, names->str_logging_nan_inf_filter,
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

/* The micro-batches of one update, and the update. 1 when an update was made or
 * skipped, 0 when a callback ended the epoch before, -1 with an exception. */
static int
ctpy_run_update(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    size_t n = (size_t)PyList_GET_SIZE(batches);
    double loss = 0.0, *shares = PyMem_New(double, n);
    PyObject *learning_rate = NULL;
    int result = -1;
    if (shares == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    ((Trainer *)op)->in_update = true;
    if (ctpy_set_int64(op, names->str_current_gradient_accumulation_steps,
                       (int64_t)n) == 0 &&
        ctpy_batch_shares(op, run, batches, shares) == 0 &&
        ctpy_metrics_plan(op, run, batches) == 0 &&
        ctpy_trainer_fire(op, names->str_on_step_begin) == 0) {
        result = run_micro_batches(op, run, batches, count, shares, &loss);
    }
    PyMem_Free(shares);
    if (result == 1 &&
        (record_loss(op, loss) < 0 || ctpy_finish_update(op, run, &learning_rate) < 0 ||
         do_what_is_due(op, run, learning_rate) < 0)) {
        result = -1;
    }
    Py_XDECREF(learning_rate);
    return result;
}

/* Checks the pair that get_batch_samples, or its override, has returned. */
static int
unpack_batches(PyObject *pair, PyObject **batches, PyObject **count)
{
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
        !PyList_Check(PyTuple_GET_ITEM(pair, 0))) {
        PyErr_Format(PyExc_TypeError,
                     "get_batch_samples must return (list of batches, number of items "
                     "or None), got %.200R",
                     pair);
        Py_DECREF(pair);
        return -1;
    }
    *batches = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    *count = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return 0;
}

/* The micro-batches of an update, a list, and the hook's count of items, or None. */
static int
next_batches(PyObject *op, ctpy_run *run, PyObject *iterator, PyObject **batches,
             PyObject **count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t left = run->steps_in_epoch - run->micro_step;
    PyObject *pair = NULL, *device = NULL, *args = NULL;
    PyObject *n =
        PyLong_FromLongLong(left < run->accumulation ? left : run->accumulation);
    if (n != NULL && (args = PyObject_GetAttr(op, names->str_args)) != NULL &&
        (device = PyObject_GetAttr(args, names->str_device)) != NULL) {
        PyObject *stack[] = {iterator, n, device};
        pair = ctpy_call_adapted(op, names->str_get_batch_samples, stack, 2,
                                 names->kw_device);
    }
    Py_XDECREF(device);
    Py_XDECREF(args);
    Py_XDECREF(n);
    return unpack_batches(pair, batches, count);
}

/* One update. *more is false at the end of the epoch, by data, callback or signal. */
static int
run_one_update(PyObject *op, ctpy_run *run, PyObject *iterator, bool *more)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *batches = NULL, *count = NULL;
    int epoch = 0, training = 0;
    bool enough;
    *more = false;
    if (next_batches(op, run, iterator, &batches, &count) < 0) {
        return -1;
    }
    int result = ranks_begin(op, run, batches, &enough);
    if (result == 0 && enough) {
        *more = true;
        result = ctpy_run_update(op, run, batches, count);
    }
    Py_DECREF(batches);
    Py_DECREF(count);
    if (result < 0 && !((Trainer *)op)->in_update && is_interrupt(op)) {
        result = 1; /* evaluation was cut short, the update before it is whole */
    }
    if (result < 0 || flag(op, names->str_should_epoch_stop, &epoch) < 0 ||
        flag(op, names->str_should_training_stop, &training) < 0) {
        return -1;
    }
    if (ranks_stop(op)) {
        *more = false;
        return save_and_stop(op, run);
    }
    *more = *more && !epoch && !training;
    return 0;
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

static int
warn_no_batches(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int result =
        control == NULL ||
                ctpy_field_int64(op, names->str_state, names->str_global_step, &step) <
                    0 ||
                PyObject_SetAttr(control, names->str_should_training_stop, Py_True) < 0
            ? -1
            : PyErr_WarnFormat(PyExc_UserWarning, 1,
                               "the train dataloader gave no batch; training stops at "
                               "step %lld. An iterable dataset that ends cannot be "
                               "read again unless its __iter__ starts anew",
                               (long long)step);
    Py_XDECREF(control);
    return result;
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

static int
run_epoch(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_trainer_fire(op, names->str_on_epoch_begin) < 0) {
        return -1;
    }
    PyObject *iterator =
        PyObject_CallMethodOneArg(op, names->str__epoch_iterator, (PyObject *)run);
    int result = iterator == NULL ? -1 : run_updates(op, run, iterator);
    drop_loader_steal(run, iterator);
    if (result < 0 ||
        (run->micro_step == 0 && !ranks_stop(op) && warn_no_batches(op) < 0)) {
        return -1;
    }
    if (ctpy_trainer_fire(op, names->str_on_epoch_end) < 0) {
        return -1;
    }
    return ranks_stop(op) ? 0 : do_what_is_due(op, run, Py_None);
}

static int
run_epochs(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    int stop = step >= run->max_steps; /* resumed at its end: nothing is left to do */
    for (; !stop && run->epoch < run->epochs; run->epoch++) {
        ((Trainer *)op)->epoch = run->epoch;
        if (run_epoch(op, run) < 0 ||
            flag(op, names->str_should_training_stop, &stop) < 0) {
            return -1;
        }
        run->micro_step = 0;
        Py_CLEAR(run->checkpoint); /* its position was for the first epoch */
    }
    return 0;
}

/* Trains from on_train_begin to the last epoch. */
static int
train_from(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int first;
    if (ctpy_field_int64(op, names->str_args, names->str_gradient_accumulation_steps,
                         &run->accumulation) < 0 ||
        ctpy_trainer_fire(op, names->str_on_train_begin) < 0 ||
        ctpy_field_bool(op, names->str_args, names->str_eval_on_start, &first) < 0) {
        return -1;
    }
    if (first) {
        PyObject *stack[] = {op, ctpy_or_none(run->trial),
                             ctpy_or_none(run->ignore_keys), Py_True};
        PyObject *metrics = PyObject_VectorcallMethod(names->str__evaluate, stack, 3,
                                                      names->kw_skip_scheduler);
        Py_XDECREF(metrics);
        if (metrics == NULL) {
            return -1;
        }
    }
    return run_epochs(op, run);
}

static const char Trainer__inner_training_loop_doc[] =
    "_inner_training_loop($self, batch_size=None, args=None,\n"
    "                     resume_from_checkpoint=None, trial=None,\n"
    "                     ignore_keys_for_eval=None)\n--\n\n"
    "Run all epochs and return a TrainOutput; train() has resolved the checkpoint.";

static PyObject *
Trainer__inner_training_loop(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "batch_size",           "args", "resume_from_checkpoint", "trial",
        "ignore_keys_for_eval", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *batch_size, *given = NULL, *answer = NULL;
    ctpy_run *run = (ctpy_run *)names->Run->tp_alloc(names->Run, 0);
    if (run == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OOOOO:_inner_training_loop",
                                     keywords, &batch_size, &given, &run->checkpoint,
                                     &run->trial, &run->ignore_keys)) {
        if (run != NULL) { /* the arguments are borrowed until here */
            run->checkpoint = run->trial = run->ignore_keys = NULL;
        }
        Py_XDECREF(run);
        return NULL;
    }
    run->owner = ct_owner_here();
    run->checkpoint = ctpy_field(run->checkpoint);
    run->trial = ctpy_field(run->trial);
    run->ignore_keys = ctpy_field(run->ignore_keys);
    run->args = ctpy_field(given);
    if (run->args == NULL) {
        run->args = PyObject_GetAttr(op, names->str_args);
    }
    if (run->args != NULL) {
        answer =
            PyObject_CallMethodOneArg(op, names->str__prepare_run, (PyObject *)run);
    }
    if (answer != NULL && train_from(op, run) < 0) {
        Py_CLEAR(answer);
    }
    if (answer != NULL) {
        Py_SETREF(answer, PyObject_CallMethodOneArg(op, names->str__finish_run,
                                                    (PyObject *)run));
    }
    Py_DECREF(run);
    return answer;
}

static const char Trainer__call_loop_doc[] =
    "_call_loop($self, checkpoint, trial, ignore_keys, /)\n--\n\n"
    "Call _inner_training_loop; return its output, and the signal that has asked the\n"
    "run to end, or 0. Ctrl-C and SIGTERM set a flag meanwhile, where\n"
    "_handles_signals.";

static PyObject *
Trainer__call_loop(PyObject *op, PyObject *args)
{
    Trainer *self = (Trainer *)op;
    ctpy_signals saved = {0};
    PyObject *checkpoint, *trial, *ignore, *keywords = NULL, *none = PyTuple_New(0);
    PyObject *method =
        PyObject_GetAttr(op, ctpy_state_borrow(op)->str__inner_training_loop);
    PyObject *output = NULL;
    if (none != NULL && method != NULL &&
        PyArg_ParseTuple(args, "OOO:_call_loop", &checkpoint, &trial, &ignore)) {
        keywords = Py_BuildValue("{s:O,s:O,s:O}", "resume_from_checkpoint", checkpoint,
                                 "trial", trial, "ignore_keys_for_eval", ignore);
    }
    if (keywords != NULL) {
        if (self->handles_signals) {
            ctpy_signals_install(&saved);
        }
        output = PyObject_Call(method, none, keywords);
    }
    const int number = ctpy_signals_restore(&saved);
    self->in_update = false;
    self->share = 0.0;
    self->agreed_signal = 0;
    Py_XDECREF(keywords);
    Py_XDECREF(method);
    Py_XDECREF(none);
    return output == NULL ? NULL : Py_BuildValue("(Ni)", output, number);
}

/* ---- the micro-batches of an update, for overrides ------------------------------- */

/* Counts the targets of the batches, on all ranks with
 * args.average_tokens_across_devices; -1 without batches, or where a rank cannot count
 * the targets of its own. */
static int
count_on_ranks(PyObject *op, PyObject *batches, int64_t *total)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int failed = 0, of_all;
    int64_t values[2] = {ctpy_count_batches(op, batches, &failed), 0};
    if (failed ||
        ctpy_field_bool(op, names->str_args, names->str_average_tokens_across_devices,
                        &of_all) < 0) {
        return -1;
    }
    if (of_all) {
        values[1] = values[0] < 0;
        values[0] = values[0] < 0 ? 0 : values[0];
        if (ctpy_trainer_sum(op, values, 2) < 0) {
            return -1;
        }
    }
    *total = values[1] > 0 ? -1 : values[0];
    return 0;
}

static const char Trainer__get_num_items_in_batch_doc[] =
    "_get_num_items_in_batch($self, batch_samples, device=None)\n--\n\n"
    "Count the predicted targets of a list of batches: labels that are not -100.\n\n"
    "On several ranks those of all, with average_tokens_across_devices.\n"
    "A loss that shifts its labels has none in the first column. Returns None where "
    "no\n"
    "loss takes the count or the batches have no labels.";

static PyObject *
Trainer__get_num_items_in_batch(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"batch_samples", "device", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *batches, *device = Py_None, *function;
    int accepts, compiled;
    int64_t total;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O:_get_num_items_in_batch",
                                     keywords, &PyList_Type, &batches, &device) ||
        ctpy_get_bool(op, names->str_model_accepts_loss_kwargs, &accepts) < 0 ||
        (function = PyObject_GetAttr(op, names->str_compute_loss_func)) == NULL) {
        return NULL;
    }
    bool wanted = accepts || function != Py_None;
    Py_DECREF(function);
    if (!wanted) {
        Py_RETURN_NONE;
    }
    if (count_on_ranks(op, batches, &total) < 0) {
        return NULL;
    }
    if (total < 0) {
        Py_RETURN_NONE;
    }
    PyObject *n = PyLong_FromLongLong(total);
    if (n == NULL ||
        ctpy_field_bool(op, names->str_args, names->str_torch_compile, &compiled) < 0) {
        Py_XDECREF(n);
        return NULL;
    }
    PyObject *stack[] = {n, device, compiled ? Py_True : Py_False};
    PyObject *count = ctpy_ask_adapter(op, names->str_item_count, stack, 3);
    Py_DECREF(n);
    return count;
}

static const char Trainer_get_batch_samples_doc[] =
    "get_batch_samples($self, epoch_iterator, num_batches, device=None)\n--\n\n"
    "Take up to num_batches batches; return them and their count of targets.\n\n"
    "The list is shorter, or empty, where the iterator ends.";

static PyObject *
Trainer_get_batch_samples(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"epoch_iterator", "num_batches", "device", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *iterator, *device = Py_None, *result = NULL;
    Py_ssize_t n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|O:get_batch_samples", keywords,
                                     &iterator, &n, &device)) {
        return NULL;
    }
    PyObject *batches = PyList_New(0);
    for (Py_ssize_t i = 0; batches != NULL && i < n; i++) {
        PyObject *batch = PyIter_Next(iterator);
        if (batch == NULL) {
            break;
        }
        if (PyList_Append(batches, batch) < 0) {
            Py_CLEAR(batches);
        }
        Py_DECREF(batch);
    }
    if (batches == NULL || PyErr_Occurred()) {
        Py_XDECREF(batches);
        return NULL;
    }
    PyObject *stack[] = {op, batches, device};
    PyObject *count =
        PyObject_VectorcallMethod(names->str__get_num_items_in_batch, stack, 3, NULL);
    if (count != NULL) {
        result = PyTuple_Pack(2, batches, count);
        Py_DECREF(count);
    }
    Py_DECREF(batches);
    return result;
}

PyMethodDef Trainer_trainer_loop_methods[] = {
    {"_call_loop",              Trainer__call_loop,                                        METH_VARARGS, Trainer__call_loop_doc             },
    {"_inner_training_loop",    (PyCFunction)(void (*)(void))Trainer__inner_training_loop,
     METH_VARARGS | METH_KEYWORDS,                                                                       Trainer__inner_training_loop_doc   },
    {"get_batch_samples",       (PyCFunction)(void (*)(void))Trainer_get_batch_samples,
     METH_VARARGS | METH_KEYWORDS,                                                                       Trainer_get_batch_samples_doc      },
    {"_get_num_items_in_batch",
     (PyCFunction)(void (*)(void))Trainer__get_num_items_in_batch,
     METH_VARARGS | METH_KEYWORDS,                                                                       Trainer__get_num_items_in_batch_doc},
    {NULL,                      NULL,                                                      0,            NULL                               },
};
