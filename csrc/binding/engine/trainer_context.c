/* Trainer: the context that the loss is computed in, in training and evaluation. */
#include "binding/trainer/trainer.h"

const char Trainer_compute_loss_context_manager_doc[] =
    "compute_loss_context_manager($self, /)\n--\n\n"
    "Return the context in which the loss is computed: "
    "autocast_smart_context_manager's."
    "\n\nMixed precision does not need it: the model's own forward runs under "
    "autocast.";

PyObject *
Trainer_compute_loss_context_manager(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyObject_CallMethodNoArgs(
        op, ctpy_state_borrow(op)->str_autocast_smart_context_manager);
}

const char Trainer_autocast_smart_context_manager_doc[] =
    "autocast_smart_context_manager($self, cache_enabled=True)\n--\n\n"
    "Return no context: under mixed precision the model's own forward autocasts.\n\n"
    "An override is what compute_loss_context_manager returns.";

PyObject *
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
