/* Trainer: losses summed, logged; evaluation and saving when they are due. */
#include "binding/callbacks/handler.h"
#include "binding/engine/ranks.h"
#include "binding/optim/grads.h"
#include "binding/runtime/nested.h"
#include "binding/trainer/trainer.h"

/* Means of the sums of losses that a trainer keeps. */

/* The value of a loss in host memory: a tensor or array of one element. 1 when it is,
 * 0 when it lies elsewhere, -1 with an exception. */
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

int
ctpy_add_loss(PyObject *op, PyObject *loss, double *value)
{
    Trainer *self = (Trainer *)op;
    int found = host_scalar(ctpy_state_borrow(op), loss, value);
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    /* On a device: summed there, so that nothing waits for it until a log is due. */
    PyObject *stack[] = {op, self->device_loss == NULL ? Py_None : self->device_loss,
                         loss};
    PyObject *sum = PyObject_VectorcallMethod(
        ctpy_state_borrow(op)->str__add_device_loss, stack, 3, NULL);
    *value = 0.0;
    if (sum == NULL) {
        return -1;
    }
    Py_XSETREF(self->device_loss, sum);
    return 0;
}

static int
ctpy_drain_device_loss(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    if (self->device_loss == NULL) {
        return 0;
    }
    PyObject *pair = PyObject_CallMethodOneArg(
        op, ctpy_state_borrow(op)->str__read_device_loss, self->device_loss);
    double sum;
    long long bad;
    if (pair == NULL || !PyArg_ParseTuple(pair, "dL", &sum, &bad)) {
        Py_XDECREF(pair);
        return -1;
    }
    Py_DECREF(pair);
    Py_CLEAR(self->device_loss);
    self->window_loss += sum;
    self->window_bad += bad;
    return 0;
}

static int
set_steal(PyObject *dict, PyObject *key, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int result = PyDict_SetItem(dict, key, value);
    Py_DECREF(value);
    return result;
}

/* The mean of n losses that are `sum` on this rank, over the losses of all ranks; NaN
 * where there is none. All ranks call it. 0, or -1 with an exception. */
static int
ctpy_trainer_mean_loss(PyObject *op, double sum, int64_t n, double *mean)
{
    double values[] = {sum, (double)n};
    if (ctpy_trainer_reduce(op, values, 2, CT_REDUCE_SUM) < 0) {
        return -1;
    }
    *mean = values[1] > 0.0 ? values[0] / values[1] : Py_NAN;
    return 0;
}

/* {"loss", "grad_norm", "learning_rate"} of the window, and how many updates of it were
 * not finite. The loss is the mean of the finite ones, of all ranks; with none it is
 * NaN, never 0. */
static PyObject *
window_logs(PyObject *op, int64_t steps, PyObject *learning_rate)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    double mean;
    if (ctpy_trainer_mean_loss(op, self->window_loss, steps - self->window_bad, &mean) <
        0) {
        return NULL;
    }
    PyObject *logs = PyDict_New();
    if (logs == NULL ||
        set_steal(logs, names->str_loss, PyFloat_FromDouble(mean)) < 0 ||
        set_steal(logs, names->str_grad_norm, PyFloat_FromDouble(self->grad_norm)) <
            0 ||
        PyDict_SetItem(logs, names->str_learning_rate, learning_rate) < 0 ||
        (self->nonfinite_steps > 0 &&
         set_steal(logs, names->str_nonfinite_steps,
                   PyLong_FromLongLong(self->nonfinite_steps)) < 0) ||
        (self->grad_metrics != NULL && PyDict_Update(logs, self->grad_metrics) < 0)) {
        Py_CLEAR(logs);
    }
    Py_CLEAR(self->grad_metrics);
    return logs;
}

static void
close_window(Trainer *self, int64_t step)
{
    self->total_loss += self->window_loss;
    self->total_bad += self->window_bad;
    self->window_loss = 0.0;
    self->window_bad = 0;
    self->nonfinite_steps = 0;
    self->window_start = step;
}

static int
log_window(PyObject *op, PyObject *learning_rate, PyObject *start_time)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *logs = NULL, *rate = NULL, *answer = NULL;
    int64_t step;
    int due, result = -1;
    if (ctpy_field_bool(op, names->str_control, names->str_should_log, &due) < 0 ||
        ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    if (!due || step <= self->window_start) {
        return 0;
    }
    rate = learning_rate != Py_None
               ? Py_NewRef(learning_rate)
               : PyObject_CallMethodNoArgs(op, names->str__get_learning_rate);
    if (rate == NULL || ctpy_drain_device_loss(op) < 0 ||
        (logs = window_logs(op, step - self->window_start, rate)) == NULL) {
        goto done;
    }
    close_window(self, step);
    answer = PyObject_CallMethodNoArgs(op, names->str_store_flos);
    if (answer == NULL ||
        ctpy_set_int64(op, names->str__globalstep_last_logged, step) < 0) {
        goto done;
    }
    PyObject *stack[] = {logs, start_time};
    Py_SETREF(answer,
              ctpy_call_adapted(op, names->str_log, stack, 1, names->kw_start_time));
    result = answer == NULL ? -1 : 0;
done:
    Py_XDECREF(answer);
    Py_XDECREF(logs);
    Py_XDECREF(rate);
    return result;
}

/* evaluate, and what its metrics decide. */
static int
evaluate_when_due(PyObject *op, PyObject *trial, PyObject *ignore_keys)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *metrics = NULL, *best = NULL, *strategy = NULL;
    int due, result = -1;
    if (ctpy_field_bool(op, names->str_control, names->str_should_evaluate, &due) < 0 ||
        !due) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *stack[] = {op, trial, ignore_keys};
    metrics = PyObject_VectorcallMethod(names->str__evaluate, stack, 3, NULL);
    if (metrics == NULL) {
        return -1;
    }
    PyObject *judge[] = {op, metrics, trial};
    best = PyObject_VectorcallMethod(names->str__determine_best_metric, judge, 3, NULL);
    strategy = best == NULL
                   ? NULL
                   : PyObject_CallMethodNoArgs(op, names->str__saves_best_only);
    if (strategy != NULL) {
        PyObject *control = PyObject_GetAttr(op, names->str_control);
        result = control == NULL ? -1
                 : strategy == Py_True
                     ? PyObject_SetAttr(control, names->str_should_save, best)
                     : 0;
        Py_XDECREF(control);
    }
    Py_XDECREF(strategy);
    Py_XDECREF(best);
    Py_DECREF(metrics);
    return result;
}

/* A signal at this step then needs no second checkpoint. */
static int
note_saved_step(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    return ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0
               ? -1
               : ctpy_set_int64(op, names->str__saved_step, step);
}

/* Saves, and lets callbacks that look into the folder find it there. */
static int
save_when_due(PyObject *op, PyObject *model, PyObject *trial)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int due, listened;
    if (ctpy_field_bool(op, names->str_control, names->str_should_save, &due) < 0 ||
        !due) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *answer = ctpy_save_checkpoint(op, model, trial);
    if (answer == NULL) {
        return -1;
    }
    PyObject *handler = PyObject_GetAttr(op, names->str_callback_handler);
    listened = handler == NULL
                   ? -1
                   : ctpy_callbacks_listens(names, handler, names->str_on_save);
    Py_XDECREF(handler);
    if (note_saved_step(op) < 0) {
        Py_CLEAR(answer);
    }
    if (answer != NULL && listened > 0) {
        Py_SETREF(answer, PyObject_CallMethodNoArgs(op, names->str__wait_for_save));
    }
    Py_XDECREF(answer);
    return answer == NULL || listened < 0
               ? -1
               : ctpy_trainer_fire(op, names->str_on_save, NULL);
}

static const char Trainer__maybe_log_save_evaluate_doc[] =
    "_maybe_log_save_evaluate($self, tr_loss, grad_norm, model, trial, epoch,\n"
    "                         ignore_keys_for_eval, start_time, learning_rate=None)\n"
    "--\n\n"
    "Log, evaluate and save, each if the control says that it is due.\n\n"
    "tr_loss is the sum of the window's losses, for overrides to read; the trainer\n"
    "keeps its own.";

static PyObject *
Trainer__maybe_log_save_evaluate(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tr_loss",    "grad_norm",     "model",
                               "trial",      "epoch",         "ignore_keys_for_eval",
                               "start_time", "learning_rate", NULL};
    PyObject *loss, *norm, *model, *trial, *epoch, *ignore, *start, *rate = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO|O:_maybe_log_save_evaluate",
                                     keywords, &loss, &norm, &model, &trial, &epoch,
                                     &ignore, &start, &rate) ||
        log_window(op, rate, start) < 0 || evaluate_when_due(op, trial, ignore) < 0 ||
        save_when_due(op, model, trial) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* An override is called at every step. All but the sum go by name: releases differ in
 * what they pass and in which order. */
static int
call_hook(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *loss = PyFloat_FromDouble(self->window_loss);
    PyObject *norm = PyFloat_FromDouble(self->grad_norm);
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
                             run->trial,
                             epoch,
                             run->ignore_keys,
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

int
ctpy_log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    int native =
        ctpy_is_default(op, ctpy_state_borrow(op)->str__maybe_log_save_evaluate);
    if (native != 1) {
        return native < 0 ? -1 : call_hook(op, run, learning_rate);
    }
    return log_window(op, learning_rate, run->start_time) < 0 ||
                   evaluate_when_due(op, run->trial, run->ignore_keys) < 0 ||
                   save_when_due(op, run->model, run->trial) < 0
               ? -1
               : 0;
}

/* Trainer: the sums of losses and averages that a resumed run goes on with. */

static const char Trainer__training_loss_doc[] =
    "_training_loss($self, /)\n--\n\n"
    "Return the mean loss of the run's updates so far, those before a resume "
    "included.\n"
    "\n"
    "It is that of all ranks, which all have to call it.";

static PyObject *
Trainer__training_loss(PyObject *op, PyObject *Py_UNUSED(unused))
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (ctpy_drain_device_loss(op) < 0 ||
        ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return NULL;
    }
    double mean;
    if (ctpy_trainer_mean_loss(op, self->total_loss + self->window_loss,
                               step - self->total_bad - self->window_bad, &mean) < 0) {
        return NULL;
    }
    return PyFloat_FromDouble(step > 0 ? mean : 0.0);
}

static const char Trainer__loss_state_doc[] =
    "_loss_state($self, /)\n--\n\n"
    "Return what a resumed run needs to go on with the same sums: a dict of numbers.";

static PyObject *
Trainer__loss_state(PyObject *op, PyObject *Py_UNUSED(unused))
{
    Trainer *self = (Trainer *)op;
    if (ctpy_drain_device_loss(op) < 0) {
        return NULL;
    }
    return Py_BuildValue(
        "{s:d,s:L,s:d,s:L,s:L,s:L,s:L}", "window_loss", self->window_loss, "window_bad",
        (long long)self->window_bad, "total_loss", self->total_loss, "total_bad",
        (long long)self->total_bad, "window_start", (long long)self->window_start,
        "nonfinite_steps", (long long)self->nonfinite_steps, "nonfinite_total",
        (long long)self->nonfinite_total);
}

static const char Trainer__set_loss_state_doc[] =
    "_set_loss_state($self, /, *, window_loss=0.0, window_bad=0, total_loss=0.0,\n"
    "                total_bad=0, window_start=0, nonfinite_steps=0,\n"
    "                nonfinite_total=0)\n--\n\n"
    "Start the sums of losses anew, or from what _loss_state() returned.";

static PyObject *
Trainer__set_loss_state(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "window_loss",  "window_bad",      "total_loss",      "total_bad",
        "window_start", "nonfinite_steps", "nonfinite_total", NULL};
    Trainer *self = (Trainer *)op;
    double window = 0.0, total = 0.0;
    long long window_bad = 0, total_bad = 0, start = 0, steps = 0, all = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$dLdLLLL:_set_loss_state",
                                     keywords, &window, &window_bad, &total, &total_bad,
                                     &start, &steps, &all)) {
        return NULL;
    }
    self->window_loss = window;
    self->window_bad = window_bad;
    self->total_loss = total;
    self->total_bad = total_bad;
    self->window_start = start;
    self->nonfinite_steps = steps;
    self->nonfinite_total = all;
    Py_CLEAR(self->device_loss);
    Py_RETURN_NONE;
}

/* Trainer: log(), the learning rate, and counting work. */

/* logs["epoch"] = state.epoch, and the tokens seen where they are counted. */
static int
add_progress(PyObject *op, PyObject *logs, PyObject *state, PyObject *start_time)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int counted, result = 0;
    PyObject *epoch = PyObject_GetAttr(state, names->str_epoch);
    if (epoch == NULL || ctpy_get_bool(op, names->str__counts_tokens, &counted) < 0) {
        Py_XDECREF(epoch);
        return -1;
    }
    if (epoch != Py_None) {
        result = PyObject_SetItem(logs, names->str_epoch, epoch);
    }
    Py_DECREF(epoch);
    if (result == 0 && counted) {
        PyObject *answer =
            PyObject_CallMethod(op, "_log_tokens", "OO", logs, start_time);
        Py_XDECREF(answer);
        result = answer == NULL ? -1 : 0;
    }
    return result;
}

/* Appends {**logs, "step": global_step} to the history. */
static int
append_history(PyObject *state, PyObject *logs, ctpy_state *names)
{
    PyObject *entry = PyDict_New(), *step = NULL, *history = NULL, *answer = NULL;
    if (entry != NULL && PyDict_Update(entry, logs) == 0 &&
        (step = PyObject_GetAttr(state, names->str_global_step)) != NULL &&
        PyDict_SetItem(entry, names->str_step, step) == 0 &&
        (history = PyObject_GetAttr(state, names->str_log_history)) != NULL) {
        answer = PyObject_CallMethodOneArg(history, names->str_append, entry);
    }
    Py_XDECREF(history);
    Py_XDECREF(step);
    Py_XDECREF(entry);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static const char Trainer_log_doc[] =
    "log($self, logs, start_time=None)\n--\n\n"
    "Add logs, a dict of numbers, to state.log_history and fire on_log.\n\n"
    "'epoch' is added to logs, and the tokens seen where they are counted; start_time\n"
    "is the start of training in seconds since the epoch.";

static PyObject *
Trainer_log(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"logs", "start_time", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *logs, *start_time = Py_None, *extra = NULL;
    int result = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:log", keywords, &logs,
                                     &start_time)) {
        return NULL;
    }
    PyObject *state = PyObject_GetAttr(op, names->str_state);
    if (state != NULL && add_progress(op, logs, state, start_time) == 0 &&
        append_history(state, logs, names) == 0 && (extra = PyDict_New()) != NULL &&
        PyDict_SetItem(extra, names->str_logs, logs) == 0) {
        result = ctpy_trainer_fire(op, names->str_on_log, extra);
    }
    Py_XDECREF(extra);
    Py_XDECREF(state);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* optimizer.param_groups[0]["lr"] */
static PyObject *
first_group_lr(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *rate = NULL, *group = NULL, *groups = NULL;
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    if (optimizer != NULL &&
        (groups = PyObject_GetAttr(optimizer, names->str_param_groups)) != NULL &&
        (group = PySequence_GetItem(groups, 0)) != NULL) {
        rate = PyObject_GetItem(group, names->str_lr);
    }
    Py_XDECREF(group);
    Py_XDECREF(groups);
    Py_XDECREF(optimizer);
    return rate;
}

static PyObject *
last_scheduled_lr(PyObject *scheduler, ctpy_state *names)
{
    PyObject *all = PyObject_CallMethodNoArgs(scheduler, names->str_get_last_lr);
    if (all == NULL) {
        return NULL;
    }
    PyObject *rate = PySequence_GetItem(all, 0);
    Py_DECREF(all);
    return rate;
}

static const char Trainer__get_learning_rate_doc[] =
    "_get_learning_rate($self, /)\n--\n\n"
    "Return the learning rate of the first parameter group's last update, a float.";

static PyObject *
Trainer__get_learning_rate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    int on_metric;
    PyObject *rate, *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    if (scheduler == NULL ||
        ctpy_get_bool(op, names->str__schedule_on_metric, &on_metric) < 0) {
        Py_XDECREF(scheduler);
        return NULL;
    }
    rate = on_metric || scheduler == Py_None ? first_group_lr(op)
                                             : last_scheduled_lr(scheduler, names);
    Py_DECREF(scheduler);
    if (rate == NULL || PyFloat_CheckExact(rate)) {
        return rate;
    }
    Py_SETREF(rate, PyNumber_Float(rate)); /* a tensor, or an int */
    return rate;
}

static const char Trainer_floating_point_ops_doc[] =
    "floating_point_ops($self, inputs)\n--\n\n"
    "Return the estimated operations of forward and backward on inputs: 6 times the\n"
    "tokens times the parameters without embeddings; 0 for a model that cannot say, "
    "and\n"
    "for a batch without the model's main input by name.";

static PyObject *
Trainer_floating_point_ops(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"inputs", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    double factor, n = 0.0;
    int failed = 0;
    PyObject *inputs, *main_input = NULL, *found = NULL, *numel = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:floating_point_ops", keywords,
                                     &inputs) ||
        ctpy_get_double(op, names->str__flos_per_token, &factor) < 0) {
        return NULL;
    }
    if (factor != 0.0 &&
        (main_input = PyObject_GetAttr(op, names->str__main_input_name)) != NULL) {
        found = ctpy_batch_entry(inputs, main_input, &failed);
        numel =
            found == NULL ? NULL : ctpy_get_optional(found, names->str_numel, &failed);
        if (numel != NULL) {
            Py_SETREF(numel, PyObject_CallNoArgs(numel));
            n = numel == NULL ? 0.0 : PyFloat_AsDouble(numel);
        }
    }
    Py_XDECREF(numel);
    Py_XDECREF(found);
    Py_XDECREF(main_input);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(factor * n);
}

/* Adds what was counted on all ranks to a total of the state, and begins to count
 * anew. */
static int
add_counted(PyObject *op, PyObject *name, PyObject *total_name, int as_int)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = NULL, *sum = NULL;
    double counted, total;
    int result = -1;
    if (ctpy_get_double(op, name, &counted) < 0 ||
        ctpy_trainer_reduce(op, &counted, 1, CT_REDUCE_SUM) < 0 ||
        (state = PyObject_GetAttr(op, names->str_state)) == NULL ||
        ctpy_get_double(state, total_name, &total) < 0) {
        goto done;
    }
    if (counted == 0.0) {
        result = 0;
        goto done;
    }
    total += counted;
    sum = as_int ? PyLong_FromDouble(total) : PyFloat_FromDouble(total);
    if (sum != NULL && PyObject_SetAttr(state, total_name, sum) == 0) {
        result = ctpy_set_double(op, name, 0.0);
    }
done:
    Py_XDECREF(sum);
    Py_XDECREF(state);
    return result;
}

static const char Trainer_store_flos_doc[] =
    "store_flos($self, /)\n--\n\n"
    "Move the operations counted since the last call, by all ranks, into\n"
    "state.total_flos, and their tokens into state.num_input_tokens_seen.\n\n"
    "All ranks have to call it.";

static PyObject *
Trainer_store_flos(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (add_counted(op, names->str_current_flos, names->str_total_flos, 0) < 0 ||
        add_counted(op, names->str__counted_tokens, names->str_num_input_tokens_seen,
                    1) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef Trainer_trainer_log_methods[] = {
    {"_maybe_log_save_evaluate",
     (PyCFunction)(void (*)(void))Trainer__maybe_log_save_evaluate,
     METH_VARARGS | METH_KEYWORDS,                                                                                      Trainer__maybe_log_save_evaluate_doc},
    {"_training_loss",           Trainer__training_loss,                                  METH_NOARGS,                  Trainer__training_loss_doc          },
    {"_loss_state",              Trainer__loss_state,                                     METH_NOARGS,                  Trainer__loss_state_doc             },
    {"_set_loss_state",          (PyCFunction)(void (*)(void))Trainer__set_loss_state,
     METH_VARARGS | METH_KEYWORDS,                                                                                      Trainer__set_loss_state_doc         },
    {"log",                      (PyCFunction)(void (*)(void))Trainer_log,                METH_VARARGS | METH_KEYWORDS,
     Trainer_log_doc                                                                                                                                        },
    {"_get_learning_rate",       Trainer__get_learning_rate,                              METH_NOARGS,
     Trainer__get_learning_rate_doc                                                                                                                         },
    {"floating_point_ops",       (PyCFunction)(void (*)(void))Trainer_floating_point_ops,
     METH_VARARGS | METH_KEYWORDS,                                                                                      Trainer_floating_point_ops_doc      },
    {"store_flos",               Trainer_store_flos,                                      METH_NOARGS,                  Trainer_store_flos_doc              },
    {NULL,                       NULL,                                                    0,                            NULL                                },
};
