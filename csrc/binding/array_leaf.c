/* One leaf of a nested batch: its values as an array, and its name in errors. */
#include "binding/arrays.h"

static PyObject *
path_text(PyObject *name, const leaf_path *path)
{
    if (path == NULL) {
        return Py_NewRef(name);
    }
    PyObject *before = path_text(name, path->up), *text = NULL;
    if (before != NULL && path->key != NULL) {
        text = PyUnicode_FromFormat("%U[%R]", before, path->key);
    }
    else if (before != NULL) {
        text = PyUnicode_FromFormat("%U[%zd]", before, path->position);
    }
    Py_XDECREF(before);
    return text;
}

void
ctpy_name_leaf_error(const ArrayAccumulator *self, const leaf_path *path)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = path_text(self->name, path);
    if (text != NULL) {
        PyErr_Format(type, "%U: %S", text, value);
        Py_DECREF(text);
    }
    Py_XDECREF(traceback);
    Py_XDECREF(value);
    Py_XDECREF(type);
}

static int
check_numeric(PyObject *array, PyObject *value, const ctpy_state *state)
{
    int result = -1;
    PyObject *kind = NULL, *dtype = PyObject_GetAttr(array, state->str_dtype);
    if (dtype == NULL || (kind = PyObject_GetAttrString(dtype, "kind")) == NULL) {
        goto done;
    }
    const Py_UCS4 code = PyUnicode_READ_CHAR(kind, 0);
    if (code < 128 && strchr("biufc", (int)code) != NULL) {
        result = 0;
    }
    else {
        PyErr_Format(PyExc_TypeError,
                     "expected a tensor, an array or a number, got %s; name its key in "
                     "ignore_keys, or drop it in preprocess_logits_for_metrics",
                     Py_TYPE(value)->tp_name);
    }
done:
    Py_XDECREF(kind);
    Py_XDECREF(dtype);
    return result;
}

PyObject *
ctpy_leaf_array(ArrayAccumulator *self, RowBuffer *leaf, PyObject *value)
{
    const ctpy_state *state = ctpy_state_borrow((PyObject *)leaf);
    PyObject *array = NULL, *source = NULL;
    const int tensor = ctpy_is_tensor(value);
    if (tensor < 0) {
        return NULL;
    }
    source = tensor ? ctpy_tensor_array(value, state) : Py_NewRef(value);
    if (source != NULL) {
        array = PyObject_CallOneArg(self->as_array, source);
        Py_DECREF(source);
    }
    if (array != NULL && (check_numeric(array, value, state) < 0 ||
                          RowBuffer_check((PyObject *)leaf, array) < 0)) {
        Py_CLEAR(array);
    }
    return array;
}
