/* Attributes of Python objects as C values, and back. */
#include "binding/callbacks/ctpy_callbacks.h"
#include "binding/trainer/trainer.h"

int
ctpy_lookup(PyObject *op, PyObject *name, PyObject **value)
{
#if PY_VERSION_HEX >= 0x030d0000
    return PyObject_GetOptionalAttr(op, name, value);
#else
    return _PyObject_LookupAttr(op, name, value); /* the same under its old name */
#endif
}

int
ctpy_item(PyObject *mapping, const char *name, PyObject **value)
{
    *value = PyMapping_GetItemString(mapping, name);
    if (*value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        return 0;
    }
    return *value == NULL ? -1 : 1;
}

bool
ctpy_forgive(void)
{
    if (PyErr_Occurred() && (!PyErr_ExceptionMatches(PyExc_Exception) ||
                             PyErr_ExceptionMatches(PyExc_MemoryError))) {
        return false;
    }
    PyErr_Clear();
    return true;
}

static int
bool_steal(PyObject *found, int *value)
{
    if (found == NULL) {
        return -1;
    }
    *value = PyObject_IsTrue(found);
    Py_DECREF(found);
    return *value < 0 ? -1 : 0;
}

static int
double_steal(PyObject *found, double *value)
{
    if (found == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
int64_steal(PyObject *found, int64_t *value)
{
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

int
ctpy_get_bool(PyObject *op, PyObject *name, int *value)
{
    return bool_steal(PyObject_GetAttr(op, name), value);
}

int
ctpy_get_double(PyObject *op, PyObject *name, double *value)
{
    return double_steal(PyObject_GetAttr(op, name), value);
}

int
ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value)
{
    return int64_steal(PyObject_GetAttr(op, name), value);
}

static PyObject *
field(PyObject *op, PyObject *outer, PyObject *name)
{
    PyObject *holder = PyObject_GetAttr(op, outer);
    if (holder == NULL) {
        return NULL;
    }
    PyObject *found = PyObject_GetAttr(holder, name);
    Py_DECREF(holder);
    return found;
}

int
ctpy_field_bool(PyObject *op, PyObject *outer, PyObject *name, int *value)
{
    return bool_steal(field(op, outer, name), value);
}

int
ctpy_field_int64(PyObject *op, PyObject *outer, PyObject *name, int64_t *value)
{
    return int64_steal(field(op, outer, name), value);
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

PyObject *
ctpy_get_optional(PyObject *op, PyObject *name, int *failed)
{
    PyObject *found;
    *failed = ctpy_lookup(op, name, &found) < 0;
    return found;
}

int
ctpy_call_if_there(PyObject *op, PyObject *name)
{
    int failed;
    PyObject *method = ctpy_get_optional(op, name, &failed), *answer = NULL;
    if (method == NULL || !PyCallable_Check(method)) {
        Py_XDECREF(method);
        return failed ? -1 : 0;
    }
    answer = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

int
ctpy_get_flag(PyObject *op, PyObject *name, bool *value)
{
    int failed;
    PyObject *found = ctpy_get_optional(op, name, &failed);
    const int truth = found == NULL ? (failed ? -1 : 0) : PyObject_IsTrue(found);
    Py_XDECREF(found);
    *value = truth > 0;
    return truth < 0 ? -1 : 0;
}

int
ctpy_is_default(PyObject *op, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    int native = PyCFunction_Check(found) && PyCFunction_GET_SELF(found) == op;
    Py_DECREF(found);
    return native;
}

int
ctpy_trainer_fire(PyObject *op, PyObject *event, PyObject *extra)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *handler = NULL, *args = NULL, *state = NULL, *control = NULL,
             *left = NULL;
    int result = -1;
    if ((handler = PyObject_GetAttr(op, names->str_callback_handler)) == NULL ||
        (args = PyObject_GetAttr(op, names->str_args)) == NULL ||
        (state = PyObject_GetAttr(op, names->str_state)) == NULL ||
        (control = PyObject_GetAttr(op, names->str_control)) == NULL) {
        goto done;
    }
    left = ctpy_callbacks_fire(handler, event, args, state, control, extra);
    if (left != NULL) {
        result = left == control ? 0 : PyObject_SetAttr(op, names->str_control, left);
    }
done:
    Py_XDECREF(left);
    Py_XDECREF(control);
    Py_XDECREF(state);
    Py_XDECREF(args);
    Py_XDECREF(handler);
    return result;
}
