/* Attributes of Python objects as C values, and back. */
#include "binding/trainer.h"

int
ctpy_lookup(PyObject *op, PyObject *name, PyObject **value)
{
    *value = PyObject_GetAttr(op, name);
    if (*value != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

int
ctpy_get_bool(PyObject *op, PyObject *name, int *value)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    *value = PyObject_IsTrue(found);
    Py_DECREF(found);
    return *value < 0 ? -1 : 0;
}

int
ctpy_get_double(PyObject *op, PyObject *name, double *value)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

int
ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    PyObject *index = PyNumber_Long(found); /* a step count may come as a float */
    Py_DECREF(found);
    if (index == NULL) {
        return -1;
    }
    *value = PyLong_AsLongLong(index);
    Py_DECREF(index);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
set_steal(PyObject *op, PyObject *name, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int result = PyObject_SetAttr(op, name, value);
    Py_DECREF(value);
    return result;
}

int
ctpy_set_int64(PyObject *op, PyObject *name, int64_t value)
{
    return set_steal(op, name, PyLong_FromLongLong(value));
}

int
ctpy_set_double(PyObject *op, PyObject *name, double value)
{
    return set_steal(op, name, PyFloat_FromDouble(value));
}
