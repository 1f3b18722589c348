/* FairseqTrainer.valid_step(): the loss of one sample in evaluation mode. */
#include "binding/fairseq/trainer.h"

/* op.owner.eval() */
static int
eval_mode(PyObject *op, PyObject *owner)
{
    PyObject *module = PyObject_GetAttr(op, owner);
    PyObject *answer =
        module == NULL
            ? NULL
            : PyObject_CallMethodNoArgs(module, ctpy_state_borrow(op)->str_eval);
    Py_XDECREF(module);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* task.valid_step(sample, model, criterion), a tuple of loss, size and output. */
static PyObject *
task_valid_step(PyObject *op, PyObject *sample)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *task = PyObject_GetAttr(op, names->str_task), *ema = NULL, *result = NULL;
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *criterion = PyObject_GetAttr(op, names->str_criterion);
    PyObject *keywords = PyTuple_Pack(1, names->str_ema_model);
    if (task != NULL && model != NULL && criterion != NULL && keywords != NULL &&
        fairseq_ema_model(op, &ema) == 0) {
        PyObject *stack[] = {task, sample, model, criterion, ema};
        result = PyObject_VectorcallMethod(names->str_valid_step, stack, 4,
                                           ema == NULL ? NULL : keywords);
    }
    Py_XDECREF(ema);
    Py_XDECREF(keywords);
    Py_XDECREF(criterion);
    Py_XDECREF(model);
    Py_XDECREF(task);
    if (result != NULL && !(PyTuple_Check(result) && PyTuple_GET_SIZE(result) == 3)) {
        PyErr_Format(PyExc_TypeError,
                     "task.valid_step() returned a %.100s; expected a tuple of (loss, "
                     "sample_size, logging_output)",
                     Py_TYPE(result)->tp_name);
        Py_CLEAR(result);
    }
    return result;
}

/* Out of memory: the gradients are given up, and the sample is tried once more. */
static PyObject *
try_again(PyObject *op, PyObject *sample)
{
    ctpy_state *names = ctpy_state_borrow(op);
    fairseq_report(op, names->str__log_oom, NULL, 0);
    PyErr_Clear();
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *answer =
        model == NULL ? NULL : PyObject_CallMethodNoArgs(model, names->str_zero_grad);
    Py_XDECREF(model);
    Py_XDECREF(answer);
    if (answer == NULL ||
        fairseq_tell(op, "warning",
                     "ran out of memory in validation step, retrying batch") < 0 ||
        (((FairseqTrainer *)op)->settings.cuda &&
         fairseq_do(op, names->str__empty_cache) < 0)) {
        return NULL;
    }
    PyObject *stack[] = {sample, Py_True};
    return ctpy_call_hook(op, names->str_valid_step, stack, 2);
}

static PyObject *
reduce(PyObject *op, PyObject *result, int dummy)
{
    PyObject *size = Py_NewRef(PyTuple_GET_ITEM(result, 1)), *made = NULL;
    if (dummy) {
        PyObject *zero = PyFloat_FromDouble(0.0);
        Py_SETREF(size, zero == NULL ? NULL : PyNumber_Multiply(size, zero));
        Py_XDECREF(zero);
    }
    PyObject *outputs = Py_BuildValue("[O]", PyTuple_GET_ITEM(result, 2));
    if (size != NULL && outputs != NULL &&
        fairseq_sync_valid(op, &outputs, &size, dummy) == 0) {
        PyObject *stack[] = {outputs, size};
        made = ctpy_call_hook(op, ctpy_state_borrow(op)->str__reduce_and_log_stats,
                              stack, 2);
    }
    Py_XDECREF(outputs);
    Py_XDECREF(size);
    return made;
}

/* The part without gradients. *retried: made is the result of a second try. */
static PyObject *
evaluate(PyObject *op, PyObject *sample, bool raise_oom, int *dummy, bool *retried)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *prepared, *made = NULL;
    if (eval_mode(op, names->str_model) < 0 ||
        eval_mode(op, names->str_criterion) < 0 ||
        fairseq_prepare(op, sample, &prepared, dummy) < 0) {
        return NULL;
    }
    made = task_valid_step(op, prepared);
    *retried = made == NULL && !raise_oom && fairseq_is_oom();
    if (*retried) {
        made = try_again(op, prepared);
    }
    Py_DECREF(prepared);
    return made;
}

static PyObject *
valid_step(PyObject *op, PyObject *sample, bool raise_oom)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *made = NULL;
    bool retried = false;
    int dummy = false;
    PyObject *context = PyObject_CallMethodNoArgs(op, names->str__no_grad);
    PyObject *entered = context == NULL
                            ? NULL
                            : PyObject_CallMethodNoArgs(context, names->str___enter__);
    if (entered != NULL) {
        made = evaluate(op, sample, raise_oom, &dummy, &retried);
        if (fairseq_leave(op, context) < 0) {
            Py_CLEAR(made);
        }
    }
    Py_XDECREF(entered);
    Py_XDECREF(context);
    if (made != NULL && !retried) {
        Py_SETREF(made, reduce(op, made, dummy));
    }
    return made;
}

const char FairseqTrainer_valid_step_doc[] =
    "valid_step($self, sample, raise_oom=False)\n--\n\n"
    "Evaluate one sample and return what was logged of it, a dict.\n"
    "\n"
    "A sample that runs out of memory is tried once more, unless raise_oom.";

PyObject *
FairseqTrainer_valid_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sample", "raise_oom", NULL};
    PyObject *sample, *output;
    int raise_oom = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:valid_step", names, &sample,
                                     &raise_oom)) {
        return NULL;
    }
    PyObject *context = fairseq_enter(op, "valid", NULL);
    if (context == NULL) {
        return NULL;
    }
    output = valid_step(op, sample, raise_oom);
    if (fairseq_leave(op, context) < 0) {
        Py_CLEAR(output);
    }
    Py_DECREF(context);
    return output;
}
