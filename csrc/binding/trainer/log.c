/* Trainer: losses summed, logged; evaluation and saving when they are due. */
#include "binding/callbacks/ctpy_callbacks.h"
#include "binding/optim/grads.h"
#include "binding/trainer/log.h"

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

int
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

const char Trainer__maybe_log_save_evaluate_doc[] =
    "_maybe_log_save_evaluate($self, tr_loss, grad_norm, model, trial, epoch,\n"
    "                         ignore_keys_for_eval, start_time, learning_rate=None)\n"
    "--\n\n"
    "Log, evaluate and save, each if the control says that it is due.\n\n"
    "tr_loss is the sum of the window's losses, for overrides to read; the trainer\n"
    "keeps its own.";

PyObject *
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
