/* Trainer: train(), its epochs, and what ends them. */
#include "binding/trainer/agree.h"
#include "binding/engine/ranks.h"
#include "binding/optim/grads.h"
#include "binding/runtime/nested.h"
#include "binding/trainer/trainer.h"
#include "binding/trainer/update.h"

#include "core/data/targets.h"

/* The numbers of set_initial_training_values, which scripts and subclasses override. */
typedef struct plan {
    int64_t epochs, updates_in_epoch, samples, steps_in_epoch, max_steps;
    int64_t rows;                    /* of the training data; -1: unknown */
    int64_t first_epoch, first_step; /* where the run starts or goes on */
} plan;

static int
plan_unpack(PyObject *values, plan *p)
{
    PyObject *examples, *samples, *total, *max_steps;
    if (!PyTuple_Check(values)) {
        PyErr_Format(PyExc_TypeError,
                     "set_initial_training_values must return a tuple of 7, got %.100s",
                     Py_TYPE(values)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(values,
                          "LLOOOLO;set_initial_training_values must return 7 values",
                          &p->epochs, &p->updates_in_epoch, &examples, &samples, &total,
                          &p->steps_in_epoch, &max_steps)) {
        return -1;
    }
    p->rows = PyLong_Check(examples) ? PyLong_AsLongLong(examples) : -1;
    double n = PyFloat_AsDouble(samples);
    p->samples = (int64_t)n;
    p->max_steps = PyLong_AsLongLong(max_steps);
    return PyErr_Occurred() ? -1 : 0;
}

/* Length of the run, state and position; optimizer and schedule; the checkpoint's
 * content. Fills *p, and run->model with a new reference. */
static int
prepare(PyObject *op, PyObject *args, ctpy_run *run, plan *p, PyObject **loader)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *values = NULL, *position = NULL, *pair = NULL;
    int result = -1;
    PyObject *given[] = {op, args, *loader};
    values = PyObject_VectorcallMethod(names->str_set_initial_training_values, given, 3,
                                       NULL);
    if (values == NULL || plan_unpack(values, p) < 0 ||
        ctpy_ranks_agree_length(op, p->rows, &p->epochs, &p->steps_in_epoch,
                                &p->updates_in_epoch, &p->max_steps) < 0) {
        goto done;
    }
    position =
        PyObject_CallMethod(op, "_init_training_state", "LLLOO",
                            (long long)p->max_steps, (long long)p->updates_in_epoch,
                            (long long)p->epochs, run->checkpoint, run->trial);
    if (position == NULL ||
        !PyArg_ParseTuple(position, "LL", &p->first_epoch, &p->first_step)) {
        goto done;
    }
    pair = PyObject_CallMethod(op, "_prepare_for_training", "LOO",
                               (long long)p->max_steps, *loader, run->checkpoint);
    if (pair == NULL || !PyArg_ParseTuple(pair, "OO", &run->model, &values)) {
        values = NULL;
        goto done;
    }
    Py_INCREF(run->model);
    Py_SETREF(*loader, Py_NewRef(values));
    values = NULL; /* was the pair's */
    result = 0;
done:
    Py_XDECREF(pair);
    Py_XDECREF(position);
    Py_XDECREF(values);
    return result;
}

static int
flag(PyObject *op, PyObject *name, int *value)
{
    return ctpy_field_bool(op, ctpy_state_borrow(op)->str_control, name, value);
}

/* After Ctrl-C or SIGTERM: a checkpoint of the last whole update, and the end. */
static int
save_and_stop(PyObject *op, ctpy_run *run)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {op, run->model, run->trial};
    PyObject *answer =
        PyObject_VectorcallMethod(names->str__save_on_signal, stack, 3, NULL);
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int result =
        answer == NULL || control == NULL
            ? -1
            : PyObject_SetAttr(control, names->str_should_training_stop, Py_True);
    Py_XDECREF(control);
    Py_XDECREF(answer);
    return result;
}

/* A hook was stopped by Ctrl-C: the exception goes, the flag stays. */
static bool
is_interrupt(PyObject *op)
{
    if (ctpy_ranks_stop(op) && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        return true;
    }
    return false;
}

/* The count of floating-point operations and of tokens, by their hooks. */
static int
account_batch(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double flos, had;
    int tracked;
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
          ctpy_set_double(op, names->str_current_flos, had + flos) < 0)) ||
        ctpy_get_bool(op, names->str__counts_tokens, &tracked) < 0) {
        return -1;
    }
    if (tracked) {
        answer =
            PyObject_CallMethodOneArg(op, names->str__track_num_input_tokens, inputs);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    return 0;
}

/* Forward and backward of one micro-batch; *loss grows by its share. */
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

/* Does a callback end the update here? On several ranks all end it whole. */
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

/* The same, where gradients are exchanged after the last micro-batch alone. */
static int
run_without_exchange(PyObject *op, ctpy_run *run, PyObject *inputs, PyObject *count,
                     double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *context;
    if (ctpy_enter_no_sync(op, run->model, &context) < 0) {
        return -1;
    }
    PyObject *done =
        run_micro_batch(op, run, inputs, count, loss) < 0 ? NULL : Py_NewRef(Py_None);
    done = ctpy_leave_context_steal(context, names->str___exit__, done);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Subclasses of transformers' Trainer ask accelerator.sync_gradients whether the
 * micro-batch is the update's last. The accelerator is made when it is first asked for,
 * and then reads _syncs_gradients. */
static int
tell_accelerator(PyObject *op, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *said = last ? Py_True : Py_False, *state = NULL, *answer = NULL;
    int failed = PyObject_SetAttr(op, names->str__syncs_gradients, said) < 0;
    PyObject *made =
        failed ? NULL : ctpy_get_optional(op, names->str__accelerator, &failed);
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

/* All micro-batches; 1 when the update may follow, 0 when a callback stopped before. */
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
        int result = tell_accelerator(op, last);
        if (result == 0) {
            result = (last ? run_micro_batch : run_without_exchange)(op, run, inputs,
                                                                     count, loss);
        }
        self->share = 0.0;
        Py_DECREF(inputs);
        if (result < 0) {
            return -1;
        }
        if (!last && (ctpy_trainer_fire(op, names->str_on_substep_end, NULL) < 0 ||
                      should_stop(op, &stop) < 0)) {
            return -1;
        }
        if (stop) {
            return 0;
        }
    }
    return 1;
}

/* Adds the update's loss to the window, or counts it as bad. */
static int
book_loss(PyObject *op, double loss)
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

/* Shares of the batches in the update's loss, in proportion to their targets; equal
 * without labels. On several ranks, where run->targets is known, in proportion to all
 * ranks' and times their number, by which their mean divides. shares has room for one
 * double a batch. */
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

/* binding/trainer/loop.c: the micro-batches of one update, and the update itself.
 * Returns 1 when an update was made or skipped, 0 when a callback ended the epoch
 * before, -1. */
static int
ctpy_run_update(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    size_t n = (size_t)PyList_GET_SIZE(batches);
    double loss = 0.0, *shares = PyMem_New(double, n);
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
        ctpy_trainer_fire(op, names->str_on_step_begin, NULL) == 0) {
        result = run_micro_batches(op, run, batches, count, shares, &loss);
    }
    PyMem_Free(shares);
    if (result == 1 && (book_loss(op, loss) < 0 || ctpy_finish_update(op, run) < 0)) {
        result = -1;
    }
    return result;
}

/* What the hook returned, checked, since overrides come from anywhere. */
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

/* One update's worth of batches: a list, and the hook's count of items (or None). */
static int
ctpy_next_batches(PyObject *op, ctpy_run *run, PyObject *iterator, PyObject **batches,
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

/* One update; *more is false when the epoch ends: no batch left, or a callback, or a
 * signal. */
static int
run_one_update(PyObject *op, ctpy_run *run, PyObject *iterator, bool *more)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *batches = NULL, *count = NULL;
    int epoch = 0, training = 0;
    bool enough;
    *more = false;
    if (ctpy_next_batches(op, run, iterator, &batches, &count) < 0) {
        return -1;
    }
    int result = ctpy_ranks_begin(op, run, batches, &enough);
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
    if (ctpy_ranks_stop(op)) {
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

/* Iterator over the epoch's batches, past those that the checkpoint has seen. */
static PyObject *
epoch_iterator(PyObject *op, ctpy_run *run, PyObject *loader)
{
    return PyObject_CallMethod(op, "_epoch_iterator", "OLLO", loader,
                               (long long)run->epoch, (long long)run->micro_step,
                               run->checkpoint);
}

/* A loader that is dropped ends its workers. In a child that a hook has forked they are
 * the parent's: there it stays for ever. */
static void
drop_loader_steal(const ctpy_run *run, PyObject *loader)
{
    if (ct_owner_is_here(run->owner)) {
        Py_XDECREF(loader);
    }
}

static int
run_epoch(PyObject *op, ctpy_run *run, PyObject *loader)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_trainer_fire(op, names->str_on_epoch_begin, NULL) < 0) {
        return -1;
    }
    PyObject *iterator = epoch_iterator(op, run, loader);
    int result = iterator == NULL ? -1 : run_updates(op, run, iterator);
    drop_loader_steal(run, iterator);
    if (result < 0 ||
        (run->micro_step == 0 && !ctpy_ranks_stop(op) && warn_no_batches(op) < 0)) {
        return -1;
    }
    if (ctpy_trainer_fire(op, names->str_on_epoch_end, NULL) < 0) {
        return -1;
    }
    return ctpy_ranks_stop(op) ? 0 : ctpy_do_what_is_due(op, run, Py_None);
}

static int
run_epochs(PyObject *op, ctpy_run *run, const plan *p, PyObject *loader)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    int stop = step >= p->max_steps; /* resumed at its end: nothing is left to do */
    run->micro_step = p->first_step;
    for (run->epoch = p->first_epoch; !stop && run->epoch < p->epochs; run->epoch++) {
        if (ctpy_set_int64(op, names->str__epoch, run->epoch) < 0 ||
            run_epoch(op, run, loader) < 0 ||
            flag(op, names->str_should_training_stop, &stop) < 0) {
            return -1;
        }
        run->micro_step = 0;
        run->checkpoint = Py_None; /* its position was for the first epoch */
    }
    return 0;
}

/* From on_train_begin to the last epoch. */
static int
train_from(PyObject *op, ctpy_run *run, const plan *p, PyObject *loader)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int first, stray;
    if (ctpy_get_bool(op, names->str__stray_parameters, &stray) < 0 ||
        ctpy_field_int64(op, names->str_args, names->str_gradient_accumulation_steps,
                         &run->accumulation) < 0 ||
        ctpy_trainer_fire(op, names->str_on_train_begin, NULL) < 0 ||
        ctpy_field_bool(op, names->str_args, names->str_eval_on_start, &first) < 0) {
        return -1;
    }
    run->stray_parameters = stray;
    run->steps_in_epoch = p->steps_in_epoch;
    run->updates_in_epoch = p->updates_in_epoch;
    if (first) {
        PyObject *stack[] = {op, run->trial, run->ignore_keys, Py_True};
        PyObject *metrics = PyObject_VectorcallMethod(names->str__evaluate, stack, 3,
                                                      names->kw_skip_scheduler);
        Py_XDECREF(metrics);
        if (metrics == NULL) {
            return -1;
        }
    }
    return run_epochs(op, run, p, loader);
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
    ctpy_run run = {.owner = ct_owner_here(),
                    .checkpoint = Py_None,
                    .trial = Py_None,
                    .ignore_keys = Py_None};
    PyObject *batch_size = Py_None, *given = Py_None, *loader = NULL, *output = NULL;
    plan p = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOOOO:_inner_training_loop",
                                     keywords, &batch_size, &given, &run.checkpoint,
                                     &run.trial, &run.ignore_keys)) {
        return NULL;
    }
    given = given == Py_None ? PyObject_GetAttr(op, names->str_args) : Py_NewRef(given);
    if (given == NULL ||
        (loader = PyObject_CallMethodNoArgs(op, names->str_get_train_dataloader)) ==
            NULL ||
        prepare(op, given, &run, &p, &loader) < 0 ||
        (run.start_time = PyObject_CallMethodNoArgs(op, names->str__start_clock)) ==
            NULL ||
        train_from(op, &run, &p, loader) < 0) {
        goto done;
    }
    output = PyObject_CallMethod(op, "_finalize_training", "OLO", run.trial,
                                 (long long)p.samples, run.start_time);
done:
    Py_XDECREF(run.start_time);
    Py_XDECREF(run.model);
    drop_loader_steal(&run, loader);
    Py_XDECREF(given);
    return output;
}

/* Ends a run that came to its end or broke: handlers back, saves finished. Keeps the
 * exception that is set, if any, above one of its own. */
static PyObject *
end_train_steal(PyObject *op, ctpy_signals *saved, PyObject *output)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int number = ctpy_signals_restore(saved);
    ((Trainer *)op)->in_update = false;
    ((Trainer *)op)->share = 0.0;
    ((Trainer *)op)->agreed_signal = 0;
    if (type != NULL) {
        ctpy_ranks_leave(op);
    }
    PyObject *answer =
        PyObject_CallMethod(op, "_end_train", "O", type == NULL ? Py_True : Py_False);
    if (type != NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    else if (answer == NULL) {
        Py_CLEAR(output);
    }
    Py_XDECREF(answer);
    if (number != 0 && !PyErr_Occurred()) {
        Py_CLEAR(output);
        if (number == SIGINT) {
            PyErr_SetNone(PyExc_KeyboardInterrupt);
        }
        else {
            (void)raise(number); /* now what was installed before decides */
            if (PyErr_CheckSignals() == 0) {
                PyErr_Format(PyExc_SystemExit, "%d", 128 + number);
            }
        }
    }
    return output;
}

static const char Trainer_train_doc[] =
    "train($self, resume_from_checkpoint=None, trial=None,\n"
    "      ignore_keys_for_eval=None)\n--\n\n"
    "Train the model and return TrainOutput(global_step, training_loss, metrics).\n\n"
    "resume_from_checkpoint is a folder, or True for the newest whole checkpoint in\n"
    "args.output_dir. The run goes on in the middle of the epoch with the same losses\n"
    "as one that was never stopped. Ctrl-C and SIGTERM leave a checkpoint of the last\n"
    "whole update first; a second one ends the process at once.";

static PyObject *
Trainer_train(PyObject *op, PyObject *args, PyObject *kwargs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_signals saved = {0};
    PyObject *checkpoint = Py_None, *trial = Py_None, *ignore = Py_None, *output = NULL;
    PyObject *parsed = NULL, *begun = NULL, *method = NULL, *none = NULL, *given = NULL;
    int handles;
    /* Python's own parser deals with model_path= of old releases and unknown names. */
    parsed = PyObject_GetAttrString(op, "_train_arguments");
    if (parsed == NULL) {
        return NULL;
    }
    Py_SETREF(parsed, PyObject_Call(parsed, args, kwargs));
    if (parsed == NULL ||
        !PyArg_ParseTuple(parsed, "OOO", &checkpoint, &trial, &ignore)) {
        Py_XDECREF(parsed);
        return NULL;
    }
    begun = PyObject_CallMethod(op, "_begin_train", "OO", checkpoint, trial);
    if (begun == NULL || ctpy_get_bool(op, names->str__handles_signals, &handles) < 0) {
        goto done;
    }
    if (handles) {
        ctpy_signals_install(&saved);
    }
    method = PyObject_GetAttr(op, names->str__inner_training_loop);
    given = Py_BuildValue("{s:O,s:O,s:O}", "resume_from_checkpoint", begun, "trial",
                          trial, "ignore_keys_for_eval", ignore);
    none = PyTuple_New(0);
    if (method != NULL && given != NULL && none != NULL) {
        output = PyObject_Call(method, none, given);
    }
done:
    output = end_train_steal(op, &saved, output);
    Py_XDECREF(none);
    Py_XDECREF(given);
    Py_XDECREF(method);
    Py_XDECREF(begun);
    Py_DECREF(parsed);
    return output;
}

/* Trainer: the micro-batches of one update. */

/* Trainer: the micro-batches of one update, and what each weighs in it. */

/* Their targets, of all ranks where args.average_tokens_across_devices says so; -1
 * without batches or where one rank cannot count them. */
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
    int accepts;
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
    if (n == NULL) {
        return NULL;
    }
    PyObject *stack[] = {op, n, device};
    PyObject *count = PyObject_VectorcallMethod(names->str__item_count, stack, 3, NULL);
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
    {"train",                   (PyCFunction)(void (*)(void))Trainer_train,                METH_VARARGS | METH_KEYWORDS,
     Trainer_train_doc                                                                                                                                      },
    {"_inner_training_loop",    (PyCFunction)(void (*)(void))Trainer__inner_training_loop,
     METH_VARARGS | METH_KEYWORDS,                                                                                       Trainer__inner_training_loop_doc   },
    {"get_batch_samples",       (PyCFunction)(void (*)(void))Trainer_get_batch_samples,
     METH_VARARGS | METH_KEYWORDS,                                                                                       Trainer_get_batch_samples_doc      },
    {"_get_num_items_in_batch",
     (PyCFunction)(void (*)(void))Trainer__get_num_items_in_batch,
     METH_VARARGS | METH_KEYWORDS,                                                                                       Trainer__get_num_items_in_batch_doc},
    {NULL,                      NULL,                                                      0,                            NULL                               },
};
