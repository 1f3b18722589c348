/* How training and evaluation call hooks, the adapter, and the modes of a model.
 *
 * transformers has added parameters to hooks over the years, and an override written
 * before must run unchanged: a hook is called with the keywords that its signature
 * accepts. inspect.signature is asked once for each function object, so that
 * `t.compute_loss = f` works too. */
#include "binding/engine/run.h"
#include "binding/engine/adapt.h"

/* The object with the signature: a bound method's function, else the callable. */
static PyObject *
function_borrow(PyObject *callable)
{
    return PyMethod_Check(callable) ? PyMethod_GET_FUNCTION(callable) : callable;
}

/* True for a callable of ours, which takes every keyword that we pass. */
static bool
is_native(PyObject *callable)
{
    return PyCFunction_Check(callable);
}

/* New reference: frozenset of accepted keyword names, or None for all of them. */
static PyObject *
accepted_keywords(PyObject *callable)
{
    PyObject *module = PyImport_ImportModule("ctrainer.runtime.hooks");
    if (module == NULL) {
        return NULL;
    }
    PyObject *found = PyObject_CallMethod(module, "accepted_keywords", "O",
                                          function_borrow(callable));
    Py_DECREF(module);
    return found;
}

static PyObject *
accepted_cached(PyObject *op, PyObject *callable)
{
    PyObject *cache = ((Trainer *)op)->signatures;
    PyObject *key = function_borrow(callable);
    PyObject *found = PyDict_GetItemWithError(cache, key);
    if (found != NULL) {
        return Py_NewRef(found);
    }
    if (PyErr_Occurred()) { /* an unhashable callable: ask every time */
        return ctpy_forgive() ? accepted_keywords(callable) : NULL;
    }
    found = accepted_keywords(callable);
    if (found != NULL && PyDict_SetItem(cache, key, found) < 0) {
        Py_CLEAR(found);
    }
    return found;
}

/* Moves the accepted keywords to the front; returns their names, a new reference. */
static PyObject *
keep_accepted(PyObject *accepted, PyObject *names, PyObject **values)
{
    PyObject *kept = PyList_New(0);
    Py_ssize_t n = PyTuple_GET_SIZE(names), to = 0;
    for (Py_ssize_t i = 0; kept != NULL && i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int known = PySequence_Contains(accepted, name);
        if (known < 0 || (known && PyList_Append(kept, name) < 0)) {
            Py_CLEAR(kept);
        }
        else if (known) {
            values[to++] = values[i];
        }
    }
    if (kept == NULL) {
        return NULL;
    }
    PyObject *result = PyList_AsTuple(kept);
    Py_DECREF(kept);
    return result;
}

PyObject *
ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args, size_t nargs,
                  PyObject *kwnames)
{
    PyObject *stack[1 + CTPY_HOOK_MAX_ARGS];
    size_t n_keywords = kwnames == NULL ? 0 : (size_t)PyTuple_GET_SIZE(kwnames);
    PyObject *result = NULL, *accepted = NULL, *names = Py_XNewRef(kwnames);
    PyObject *callable = PyObject_GetAttr(op, name);
    assert(nargs + n_keywords <= CTPY_HOOK_MAX_ARGS);
    if (callable == NULL) {
        goto done;
    }
    for (size_t i = 0; i < nargs + n_keywords; i++) {
        stack[1 + i] = args[i];
    }
    if (n_keywords > 0 && !is_native(callable)) {
        accepted = accepted_cached(op, callable);
        if (accepted == NULL) {
            goto done;
        }
        if (accepted != Py_None) {
            Py_SETREF(names, keep_accepted(accepted, kwnames, &stack[1 + nargs]));
            if (names == NULL) {
                goto done;
            }
        }
    }
    result = PyObject_Vectorcall(callable, &stack[1],
                                 nargs | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
done:
    Py_XDECREF(accepted);
    Py_XDECREF(names);
    Py_XDECREF(callable);
    return result;
}

PyObject *
ctpy_adapter(PyObject *op)
{
    PyObject *adapter = ctpy_field(((Trainer *)op)->adapter);
    return adapter != NULL ? adapter
                           : PyErr_Format(PyExc_AttributeError,
                                          "%.100s.__init__() has not been called",
                                          Py_TYPE(op)->tp_name);
}

PyObject *
ctpy_ask_adapter(PyObject *op, PyObject *name, PyObject *const *args, size_t n)
{
    PyObject *adapter = ctpy_adapter(op);
    if (adapter == NULL) {
        return NULL;
    }
    PyObject *answer = ctpy_call_hook(adapter, name, args, n);
    Py_DECREF(adapter);
    return answer;
}

/* ---- train and eval mode of the model and of optimizers that have modes ---------- */

/* Is the model in eval mode? 1, 0 (also for a model without the flag `training`), -1.
 */
static int
is_in_eval_mode(PyObject *model, const ctpy_state *names)
{
    int failed;
    PyObject *flag = ctpy_get_optional(model, names->str_training, &failed);
    if (flag == NULL) {
        return failed ? -1 : 0;
    }
    const int training = PyObject_IsTrue(flag);
    Py_DECREF(flag);
    return training < 0 ? -1 : !training;
}

/* A wrapper keeps the flag when evaluation, or a package that saves a model, puts the
 * model within into eval mode: both flags count. */
int
ctpy_ensure_train_mode(PyObject *op, PyObject *model)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *optimizer, *within = PyObject_GetAttr(op, names->str_model);
    int result = within == NULL ? -1 : is_in_eval_mode(model, names);
    if (result == 0 && within != model) {
        result = is_in_eval_mode(within, names);
    }
    Py_XDECREF(within);
    if (result <= 0) {
        return result;
    }
    if (ctpy_call_if_there(model, names->str_train) < 0 ||
        (optimizer = PyObject_GetAttr(op, names->str_optimizer)) == NULL) {
        return -1;
    }
    result = ctpy_call_if_there(optimizer, names->str_train);
    Py_DECREF(optimizer);
    return result;
}

/* ---- the context that the loss is computed in, in training and evaluation -------- */

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

PyMethodDef Trainer_engine_adapt_methods[] = {
    {"compute_loss_context_manager",   Trainer_compute_loss_context_manager, METH_NOARGS,
     Trainer_compute_loss_context_manager_doc                                                                                       },
    {"autocast_smart_context_manager",
     (PyCFunction)(void (*)(void))Trainer_autocast_smart_context_manager,
     METH_VARARGS | METH_KEYWORDS,                                                        Trainer_autocast_smart_context_manager_doc},
    {NULL,                             NULL,                                 0,           NULL                                      },
};
