/* Losses and requests of a Trainer after an update. The losses of a logging window are
 * summed here; logs, evaluations and checkpoints are made by Python
 * (_maybe_log_save_evaluate), so that an update without any costs three reads of the
 * control. */
#include "binding/callbacks/handler.h"
#include "binding/engine/ranks.h"
#include "binding/optim/optim.h"
#include "binding/runtime/buffer.h"
#include "binding/trainer/trainer.h"

/* ---- losses ---------------------------------------------------------------------- */

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

int
ctpy_add_loss(PyObject *op, PyObject *loss, double *value)
{
    Trainer *self = (Trainer *)op;
    int found = host_scalar(ctpy_state_borrow(op), loss, value);
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    /* On a device: summed there, so that nothing waits for it until a log is due. */
    PyObject *had = self->device_loss == NULL ? Py_None : self->device_loss;
    PyObject *stack[] = {Py_NewRef(had), loss};
    PyObject *sum =
        ctpy_ask_adapter(op, ctpy_state_borrow(op)->str_add_device_loss, stack, 2);
    Py_DECREF(had);
    *value = 0.0;
    if (sum == NULL) {
        return -1;
    }
    Py_XSETREF(self->device_loss, sum);
    return 0;
}

/* ---- logs, evaluations and checkpoints ------------------------------------------- */

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

int
ctpy_log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    const int native =
        ctpy_is_default(op, ctpy_state_borrow(op)->str__maybe_log_save_evaluate);
    const int wanted = native == 1 ? is_due(op) : native < 0 ? -1 : 1;
    return wanted > 0 ? call_hook(op, run, learning_rate) : wanted;
}

/* ---- the learning rate, and counts of work --------------------------------------- */

/* optimizer.param_groups[0]["lr"] */
static PyObject *
first_group_lr(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *lr = NULL, *group = NULL, *groups = NULL;
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    if (optimizer != NULL &&
        (groups = PyObject_GetAttr(optimizer, names->str_param_groups)) != NULL &&
        (group = PySequence_GetItem(groups, 0)) != NULL) {
        lr = PyObject_GetItem(group, names->str_lr);
    }
    Py_XDECREF(group);
    Py_XDECREF(groups);
    Py_XDECREF(optimizer);
    return lr;
}

static PyObject *
last_scheduled_lr(PyObject *scheduler, ctpy_state *names)
{
    PyObject *all = PyObject_CallMethodNoArgs(scheduler, names->str_get_last_lr);
    if (all == NULL) {
        return NULL;
    }
    PyObject *lr = PySequence_GetItem(all, 0);
    Py_DECREF(all);
    return lr;
}

static const char Trainer__get_learning_rate_doc[] =
    "_get_learning_rate($self, /)\n--\n\n"
    "Return the learning rate of the first parameter group's last update, a float.";

static PyObject *
Trainer__get_learning_rate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *lr, *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    if (scheduler == NULL) {
        return NULL;
    }
    lr = ((Trainer *)op)->schedule_on_metric || scheduler == Py_None
             ? first_group_lr(op)
             : last_scheduled_lr(scheduler, names);
    Py_DECREF(scheduler);
    if (lr == NULL || PyFloat_CheckExact(lr)) {
        return lr;
    }
    Py_SETREF(lr, PyNumber_Float(lr)); /* a tensor, or an int */
    return lr;
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
    const double factor = ((Trainer *)op)->flos_per_token;
    double n = 0.0;
    int failed = 0;
    PyObject *inputs, *main_input = NULL, *found = NULL, *numel = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:floating_point_ops", keywords,
                                     &inputs)) {
        return NULL;
    }
    main_input = factor == 0.0 ? NULL : ctpy_field(((Trainer *)op)->main_input_name);
    if (main_input != NULL) {
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

PyMethodDef Trainer_trainer_log_methods[] = {
    {"_get_learning_rate", Trainer__get_learning_rate,                              METH_NOARGS,
     Trainer__get_learning_rate_doc                                                                                            },
    {"floating_point_ops", (PyCFunction)(void (*)(void))Trainer_floating_point_ops,
     METH_VARARGS | METH_KEYWORDS,                                                               Trainer_floating_point_ops_doc},
    {NULL,                 NULL,                                                    0,           NULL                          },
};
