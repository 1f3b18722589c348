/* FairseqTrainer: the number of updates, the learning rate and plain accessors. */
#include "binding/fairseq/trainer.h"

const char FairseqTrainer_get_num_updates_doc[] =
    "get_num_updates($self, /)\n--\n\nReturn the number of updates made.";

PyObject *
FairseqTrainer_get_num_updates(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__num_updates);
}

const char FairseqTrainer_set_num_updates_doc[] =
    "set_num_updates($self, num_updates, /)\n--\n\n"
    "Set the number of updates, and with it the learning rate and the quantizer.";

PyObject *
FairseqTrainer_set_num_updates(PyObject *op, PyObject *number)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *quantizer = NULL, *answer = NULL;
    if (PyObject_SetAttr(op, names->str__num_updates, number) == 0 &&
        fairseq_do(op, names->str_lr_step_update) == 0 &&
        (quantizer = PyObject_GetAttr(op, names->str_quantizer)) != NULL) {
        answer =
            quantizer == Py_None
                ? Py_NewRef(Py_None)
                : PyObject_CallMethodOneArg(quantizer, names->str_step_update, number);
    }
    Py_XDECREF(quantizer);
    if (answer == NULL ||
        fairseq_metric(op, "log_scalar", "(sOii)", "num_updates", number, 0, 200) < 0) {
        Py_CLEAR(answer);
    }
    Py_XDECREF(answer);
    return answer == NULL ? NULL : Py_NewRef(Py_None);
}

/* Logs lr_KEY; *first is the rate called "default", or else the first. */
static int
log_rate(PyObject *op, PyObject *key, PyObject *value, PyObject **first)
{
    const bool chosen =
        PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, "default") == 0;
    if (*first == NULL || chosen) {
        Py_XSETREF(*first, Py_NewRef(value));
    }
    PyObject *name = PyUnicode_FromFormat("lr_%S", key);
    int result = name == NULL
                     ? -1
                     : fairseq_metric(op, "log_scalar", "(OOii)", name, value, 0, 300);
    Py_XDECREF(name);
    return result;
}

static int
log_rates(PyObject *op, PyObject *rates, PyObject **first)
{
    PyObject *items = PyDict_Items(rates);
    int failed = items == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        failed = log_rate(op, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1),
                          first) < 0;
    }
    Py_XDECREF(items);
    return failed ? -1 : 0;
}

const char FairseqTrainer_lr_step_update_doc[] =
    "lr_step_update($self, /)\n--\n\n"
    "Set the learning rate for the number of updates, log and return it.";

PyObject *
FairseqTrainer_lr_step_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler), *rate = NULL;
    PyObject *updates = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    PyObject *answer =
        scheduler == NULL || updates == NULL
            ? NULL
            : PyObject_CallMethodOneArg(scheduler, names->str_step_update, updates);
    Py_XDECREF(updates);
    Py_XDECREF(scheduler);
    if (answer == NULL) {
        return NULL;
    }
    if (!PyDict_Check(answer)) {
        rate = Py_NewRef(answer);
    }
    if (PyDict_Check(answer)
            ? log_rates(op, answer, &rate) < 0
            : fairseq_metric(op, "log_scalar", "(sOii)", "lr", rate, 0, 300) < 0) {
        Py_CLEAR(rate);
    }
    else if (rate == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "lr_scheduler.step_update() returned a dict of no rates");
    }
    Py_DECREF(answer);
    return rate;
}

/* op.lr_scheduler.name(*args), and then the rate by the number of updates. */
static PyObject *
step_schedule(PyObject *op, PyObject *name, PyObject *const *args, size_t n)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    PyObject *answer =
        scheduler == NULL ? NULL : ctpy_call_hook(scheduler, name, args, n);
    Py_XDECREF(scheduler);
    Py_XDECREF(answer);
    return answer == NULL ? NULL
                          : PyObject_CallMethodNoArgs(op, names->str_lr_step_update);
}

const char FairseqTrainer_lr_step_doc[] =
    "lr_step($self, epoch, val_loss=None)\n--\n\n"
    "Set the learning rate at the end of an epoch, log and return it.";

PyObject *
FairseqTrainer_lr_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"epoch", "val_loss", NULL};
    PyObject *stack[] = {NULL, Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:lr_step", names, &stack[0],
                                     &stack[1])) {
        return NULL;
    }
    return step_schedule(op, ctpy_state_borrow(op)->str_step, stack, 2);
}

const char FairseqTrainer_lr_step_begin_epoch_doc[] =
    "lr_step_begin_epoch($self, epoch, /)\n--\n\n"
    "Set the learning rate at the beginning of an epoch, log and return it.";

PyObject *
FairseqTrainer_lr_step_begin_epoch(PyObject *op, PyObject *epoch)
{
    return step_schedule(op, ctpy_state_borrow(op)->str_step_begin_epoch, &epoch, 1);
}

/* op.owner.name() */
static PyObject *
call_of(PyObject *op, PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(op, owner);
    PyObject *answer = found == NULL ? NULL : PyObject_CallMethodNoArgs(found, name);
    Py_XDECREF(found);
    return answer;
}

const char FairseqTrainer_get_lr_doc[] =
    "get_lr($self, /)\n--\n\nReturn the learning rate of the next update.";

PyObject *
FairseqTrainer_get_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    return call_of(op, names->str_optimizer, names->str_get_lr);
}

const char FairseqTrainer_zero_grad_doc[] =
    "zero_grad($self, /)\n--\n\nDrop the gradients.";

PyObject *
FairseqTrainer_zero_grad(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    return call_of(op, names->str_optimizer, names->str_zero_grad);
}

const char FairseqTrainer_get_model_doc[] =
    "get_model($self, /)\n--\n\nReturn the model without its wrapper.";

PyObject *
FairseqTrainer_get_model(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__model);
}

const char FairseqTrainer_get_criterion_doc[] =
    "get_criterion($self, /)\n--\n\nReturn the criterion without its wrapper.";

PyObject *
FairseqTrainer_get_criterion(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttr(op, ctpy_state_borrow(op)->str__criterion);
}
