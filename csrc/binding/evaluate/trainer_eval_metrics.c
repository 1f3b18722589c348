/* Trainer: from the outputs of an evaluation to its metrics. */
#include "binding/evaluate/evaluate.h"

PyObject *
ctpy_eval_utility(const char *name, PyObject *args_steal, PyObject *kwargs)
{
    PyObject *function = NULL, *result = NULL;
    PyObject *module = PyImport_ImportModule("ctrainer.trainer_utils");
    if (module != NULL && args_steal != NULL &&
        (function = PyObject_GetAttrString(module, name)) != NULL) {
        result = PyObject_Call(function, args_steal, kwargs);
    }
    Py_XDECREF(function);
    Py_XDECREF(module);
    Py_XDECREF(args_steal);
    return result;
}

PyObject *
ctpy_eval_key(PyObject *prefix, const char *name)
{
    return PyUnicode_FromFormat("%S_%s", prefix, name);
}

static int
set_mean(PyObject *metrics, PyObject *prefix, const char *name, double sum, double n)
{
    PyObject *key = ctpy_eval_key(prefix, name);
    PyObject *mean = PyFloat_FromDouble(n > 0.0 ? sum / n : Py_NAN);
    int result = key == NULL || mean == NULL ? -1 : PyDict_SetItem(metrics, key, mean);
    Py_XDECREF(mean);
    Py_XDECREF(key);
    return result;
}

static int
copy_as(PyObject *to, PyObject *key, PyObject *value, PyObject *before)
{
    PyObject *name = PyUnicode_Concat(before, key);
    int result = name == NULL ? -1 : PyDict_SetItem(to, name, value);
    Py_XDECREF(name);
    return result;
}

/* Copies the items whose key begins with `bar`, or those whose key does not, which then
 * get it. */
static int
copy_items(PyObject *to, PyObject *from, PyObject *bar, int with_bar)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(from, &position, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError,
                         "compute_metrics must name its metrics by strings, got %R",
                         key);
            return -1;
        }
        const Py_ssize_t found = PyUnicode_Tailmatch(key, bar, 0, PY_SSIZE_T_MAX, -1);
        if (found < 0 || (found && with_bar && PyDict_SetItem(to, key, value) < 0) ||
            (!found && !with_bar && copy_as(to, key, value, bar) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* A metric that compute_metrics calls "loss" thus replaces the mean of the losses, as
 * it does in transformers. */
static PyObject *
prefixed(PyObject *metrics, PyObject *prefix)
{
    PyObject *bar = PyUnicode_FromFormat("%S_", prefix), *result = PyDict_New();
    if (bar == NULL || result == NULL || copy_items(result, metrics, bar, 1) < 0 ||
        copy_items(result, metrics, bar, 0) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(bar);
    return result;
}

static int
add_losses(PyObject *metrics, const ctpy_eval_store *store, PyObject *prefix)
{
    if (!store->has_loss) {
        return 0;
    }
    if (set_mean(metrics, prefix, "loss", store->loss_sum, store->loss_rows) < 0) {
        return -1;
    }
    return store->by_token ? set_mean(metrics, prefix, "loss_by_token",
                                      store->token_sum, store->token_count)
                           : 0;
}

PyObject *
ctpy_eval_metrics(PyObject *metrics, const ctpy_eval_store *store, PyObject *prefix)
{
    PyObject *plain, *result = NULL;
    if (metrics != Py_None && !PyDict_Check(metrics)) {
        PyErr_Format(
            PyExc_TypeError,
            "compute_metrics must return a dict of names to numbers, got %.200R",
            metrics);
        return NULL;
    }
    plain = metrics == Py_None ? PyDict_New()
                               : ctpy_eval_utility("denumpify_detensorize",
                                                   PyTuple_Pack(1, metrics), NULL);
    if (plain != NULL && add_losses(plain, store, prefix) == 0) {
        result = prefixed(plain, prefix);
    }
    Py_XDECREF(plain);
    return result;
}
