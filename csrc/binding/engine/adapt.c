/* Calls a hook with the keywords that its signature accepts.
 *
 * transformers has added parameters to hooks over the years; an override written
 * before must run unchanged. What a function accepts is asked of inspect.signature
 * once and remembered by the function object, so that `t.compute_loss = f` works too.
 */
#include "binding/engine/run.h"
#include "binding/engine/adapt.h"

/* The object whose signature decides: a bound method's function, else the callable. */
static PyObject *
function_borrow(PyObject *callable)
{
    return PyMethod_Check(callable) ? PyMethod_GET_FUNCTION(callable) : callable;
}

/* True for a callable that is ours: it takes every keyword that we pass. */
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
