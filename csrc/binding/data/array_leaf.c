/* One leaf of a nested batch: its values as an array, and its name in errors. */
#include "binding/data/accumulator.h"

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

int
ctpy_is_numeric(PyObject *array, const ctpy_state *state)
{
    int result = -1;
    PyObject *kind = NULL, *dtype = PyObject_GetAttr(array, state->str_dtype);
    if (dtype != NULL && (kind = PyObject_GetAttrString(dtype, "kind")) != NULL) {
        const Py_UCS4 code = PyUnicode_READ_CHAR(kind, 0);
        result = code < 128 && strchr("biufc", (int)code) != NULL;
    }
    Py_XDECREF(kind);
    Py_XDECREF(dtype);
    return result;
}

static int
check_numeric(PyObject *array, PyObject *value, const ctpy_state *state)
{
    const int numeric = ctpy_is_numeric(array, state);
    if (numeric == 0) {
        PyErr_Format(PyExc_TypeError,
                     "expected a tensor, an array or a number, got %s; name its key in "
                     "ignore_keys, or drop it in preprocess_logits_for_metrics",
                     Py_TYPE(value)->tp_name);
    }
    return numeric > 0 ? 0 : -1;
}

PyObject *
ctpy_plain_array(PyObject *value, const ctpy_state *state)
{
    PyObject *array = NULL, *source = NULL, *numpy = PyImport_ImportModule("numpy");
    const int tensor = numpy == NULL ? -1 : ctpy_is_tensor(value);
    if (tensor >= 0) {
        source = tensor ? ctpy_tensor_array(value, state) : Py_NewRef(value);
    }
    if (source != NULL) {
        array = PyObject_CallMethod(numpy, "ascontiguousarray", "O", source);
        Py_DECREF(source);
    }
    Py_XDECREF(numpy);
    return array;
}

PyObject *
ctpy_leaf_array(RowBuffer *leaf, PyObject *value)
{
    const ctpy_state *state = ctpy_state_borrow((PyObject *)leaf);
    PyObject *array = ctpy_plain_array(value, state);
    if (array != NULL && (check_numeric(array, value, state) < 0 ||
                          RowBuffer_check((PyObject *)leaf, array) < 0)) {
        Py_CLEAR(array);
    }
    return array;
}
