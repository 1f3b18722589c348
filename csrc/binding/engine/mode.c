/* Trainer: train and eval mode of the model and of optimizers that have modes. */
#include "binding/engine/run.h"
#include "binding/engine/adapt.h"
#include "binding/engine/mode.h"

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

/* Trainer: the context that the loss is computed in, in training and evaluation. */

static const char Trainer_compute_loss_context_manager_doc[] =
    "compute_loss_context_manager($self, /)\n--\n\n"
    "Return the context in which the loss is computed: "
    "autocast_smart_context_manager's."
    "\n\nMixed precision does not need it: the model's own forward runs under "
    "autocast.";

static PyObject *
Trainer_compute_loss_context_manager(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_CallMethodNoArgs(
        op, ctpy_state_borrow(op)->str_autocast_smart_context_manager);
}

static const char Trainer_autocast_smart_context_manager_doc[] =
    "autocast_smart_context_manager($self, cache_enabled=True)\n--\n\n"
    "Return no context: under mixed precision the model's own forward autocasts.\n\n"
    "An override is what compute_loss_context_manager returns.";

static PyObject *
Trainer_autocast_smart_context_manager(PyObject *Py_UNUSED(op), PyObject *args,
                                       PyObject *kwargs)
{
    static char *keywords[] = {"cache_enabled", NULL};
    PyObject *cache_enabled, *contextlib, *context;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:autocast_smart_context_manager",
                                     keywords, &cache_enabled) ||
        (contextlib = PyImport_ImportModule("contextlib")) == NULL) {
        return NULL;
    }
    context = PyObject_CallMethod(contextlib, "nullcontext", NULL);
    Py_DECREF(contextlib);
    return context;
}

int
ctpy_enter_loss_context(PyObject *op, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int plain = ctpy_is_default(op, names->str_compute_loss_context_manager);
    *context = NULL;
    if (plain > 0) {
        plain = ctpy_is_default(op, names->str_autocast_smart_context_manager);
    }
    if (plain != 0) {
        return plain < 0 ? -1 : 0;
    }
    *context = ctpy_enter_context_steal(
        PyObject_CallMethodNoArgs(op, names->str_compute_loss_context_manager),
        names->str___enter__);
    return *context == NULL ? -1 : 0;
}

PyMethodDef Trainer_engine_mode_methods[] = {
    {"compute_loss_context_manager",   Trainer_compute_loss_context_manager, METH_NOARGS,
     Trainer_compute_loss_context_manager_doc                                                                                       },
    {"autocast_smart_context_manager",
     (PyCFunction)(void (*)(void))Trainer_autocast_smart_context_manager,
     METH_VARARGS | METH_KEYWORDS,                                                        Trainer_autocast_smart_context_manager_doc},
    {NULL,                             NULL,                                 0,           NULL                                      },
};
