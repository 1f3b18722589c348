/* Trainer: the model while it is evaluated: wrapped, in another dtype, in eval mode;
 * and as it was before. */
#include "binding/evaluate/evaluate.h"

PyObject *
ctpy_eval_wrap_model(PyObject *op, const ctpy_state *names)
{
    PyObject *model = PyObject_GetAttr(op, names->str_model), *wrapped = NULL;
    PyObject *keyword = PyTuple_Pack(1, names->str_training);
    if (model != NULL && keyword != NULL) {
        PyObject *stack[] = {model, Py_False};
        wrapped = ctpy_call_adapted(op, names->str__wrap_model, stack, 1, keyword);
    }
    Py_XDECREF(keyword);
    Py_XDECREF(model);
    return wrapped;
}

/* fp16_full_eval and bf16_full_eval, unless this happens within a training: then the
 * weights are needed as they are. */
static int
cast_model(ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    int fp16, bf16;
    if (ctpy_get_bool(loop->args, names->str_fp16_full_eval, &fp16) < 0 ||
        ctpy_get_bool(loop->args, names->str_bf16_full_eval, &bf16) < 0) {
        return -1;
    }
    if (loop->in_train || (!fp16 && !bf16)) {
        return 0;
    }
    PyObject *device = PyObject_GetAttr(loop->args, names->str_device);
    if (device != NULL) {
        loop->uncast = PyObject_CallMethod(adapter, "cast_model", "OsO", loop->model,
                                           fp16 ? "float16" : "bfloat16", device);
        Py_DECREF(device);
    }
    return loop->uncast == NULL ? -1 : 0;
}

/* model.eval() or model.train(), and the optimizer's. */
static int
set_mode(const ctpy_eval_loop *loop, PyObject *mode)
{
    return ctpy_call_if_there(loop->model, mode) < 0
               ? -1
               : ctpy_set_optimizer_mode(loop->op, mode);
}

int
ctpy_eval_ready_model(ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    return cast_model(loop, adapter, names) < 0 ? -1 : set_mode(loop, names->str_eval);
}

/* Its own weights, and its own forward, which _wrap_model may have put under autocast.
 */
static int
undo_precision(const ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    PyObject *answer;
    if (loop->uncast != NULL) {
        if ((answer = PyObject_CallNoArgs(loop->uncast)) == NULL) {
            return -1;
        }
        Py_DECREF(answer);
    }
    answer = PyObject_CallMethodOneArg(adapter, names->str_leave_mixed_precision,
                                       loop->model);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* A training goes on. The model stays in eval mode until the next training_step, as it
 * does with transformers: logs and callbacks tell evaluations by it. One that has no
 * flag to tell by, or whose evaluation has failed, is put back at once. */
static int
resume_training(const ctpy_eval_loop *loop, bool failed, const ctpy_state *names)
{
    bool on = false;
    const int flagged = failed ? 0 : ctpy_has_eval_mode(loop->model, names, &on);
    if (flagged < 0) {
        return -1;
    }
    return flagged ? ctpy_set_optimizer_mode(loop->op, names->str_train)
                   : set_mode(loop, names->str_train);
}

int
ctpy_eval_release_model(const ctpy_eval_loop *loop, PyObject *adapter,
                        const ctpy_state *names)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int result = loop->in_train ? resume_training(loop, type != NULL, names)
                                : undo_precision(loop, adapter, names);
    if (type != NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return result;
}
