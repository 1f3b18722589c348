/* Trainer: train and eval mode of the model and of optimizers that have modes. */
#include "binding/trainer/trainer.h"

int
ctpy_set_optimizer_mode(PyObject *op, PyObject *mode)
{
    PyObject *optimizer = PyObject_GetAttr(op, ctpy_state_borrow(op)->str_optimizer);
    int result = optimizer == NULL ? -1 : ctpy_call_if_there(optimizer, mode);
    Py_XDECREF(optimizer);
    return result;
}

int
ctpy_has_eval_mode(PyObject *model, const ctpy_state *names, bool *on)
{
    int failed, training;
    PyObject *flag = ctpy_get_optional(model, names->str_training, &failed);
    *on = false;
    if (flag == NULL) {
        return failed ? -1 : 0;
    }
    training = PyObject_IsTrue(flag);
    Py_DECREF(flag);
    *on = training == 0;
    return training < 0 ? -1 : 1;
}

/* A wrapper keeps its flag when the model within is put into eval mode, as evaluation
 * and packages that save a model do: both are asked. */
int
ctpy_ensure_train_mode(PyObject *op, PyObject *model)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    bool outer, inner;
    PyObject *answer = NULL, *within = PyObject_GetAttr(op, names->str_model);
    int result = within == NULL ? -1 : ctpy_has_eval_mode(model, names, &outer);
    if (result >= 0 && within != model) {
        result = ctpy_has_eval_mode(within, names, &inner);
        outer = outer || inner;
    }
    Py_XDECREF(within);
    if (result < 0 || !outer) {
        return result < 0 ? -1 : 0;
    }
    answer = PyObject_CallMethodOneArg(op, names->str__train_mode, model);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}
