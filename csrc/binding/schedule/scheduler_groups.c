/* Rates of an optimizer's groups, for every type of scheduler. */
#include "binding/schedule/scheduler.h"

PyObject *
scheduler_groups(const ctpy_state *state, PyObject *optimizer)
{
    if (optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the scheduler has no optimizer: __init__ was not called");
        return NULL;
    }
    PyObject *found = PyObject_GetAttr(optimizer, state->str_param_groups);
    PyObject *groups = found == NULL ? NULL : PySequence_Tuple(found);
    Py_XDECREF(found);
    for (Py_ssize_t g = 0; groups != NULL && g < PyTuple_GET_SIZE(groups); g++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(groups, g))) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zd] is a %.200s; expected a dict", g,
                         Py_TYPE(PyTuple_GET_ITEM(groups, g))->tp_name);
            Py_CLEAR(groups);
        }
    }
    return groups;
}

PyObject *
scheduler_group_rate(PyObject *groups, Py_ssize_t g, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(groups, g), key);
    if (value == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_KeyError,
                         "param_groups[%zd] has no %R: load the optimizer's state_dict "
                         "before a scheduler that starts at last_epoch >= 0",
                         g, key);
        }
        return NULL;
    }
    Py_INCREF(value);
    PyObject *rate = PyNumber_Float(value);
    Py_DECREF(value);
    return rate;
}

/* A rate kept in a tensor is filled, so that whoever holds the tensor sees it. */
static int
write_rate(const ctpy_state *state, PyObject *group, PyObject *rate)
{
    PyObject *old = PyDict_GetItemWithError(group, state->str_lr);
    if (old == NULL ? PyErr_Occurred() != NULL : PyFloat_CheckExact(old)) {
        return old == NULL ? -1 : PyDict_SetItem(group, state->str_lr, rate);
    }
    PyObject *fill;
    int tensor = old == NULL ? 0 : ctpy_lookup(old, state->str_fill_, &fill);
    if (tensor < 1) {
        return tensor < 0 ? -1 : PyDict_SetItem(group, state->str_lr, rate);
    }
    PyObject *done = PyObject_CallOneArg(fill, rate);
    Py_DECREF(fill);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
scheduler_write_rates(const ctpy_state *state, PyObject *optimizer, PyObject *rates)
{
    PyObject *groups = scheduler_groups(state, optimizer);
    int result = groups == NULL ? -1 : 0;
    if (result == 0 && PyTuple_GET_SIZE(groups) != PyList_GET_SIZE(rates)) {
        PyErr_Format(PyExc_ValueError,
                     "the optimizer has %zd groups, and had %zd when the scheduler was "
                     "made: make a new scheduler after add_param_group()",
                     PyTuple_GET_SIZE(groups), PyList_GET_SIZE(rates));
        result = -1;
    }
    for (Py_ssize_t g = 0; result == 0 && g < PyTuple_GET_SIZE(groups); g++) {
        result =
            write_rate(state, PyTuple_GET_ITEM(groups, g), PyList_GET_ITEM(rates, g));
    }
    Py_XDECREF(groups);
    return result;
}

const char ctpy_write_rates_doc[] =
    "write_rates(optimizer, rates, /)\n--\n\n"
    "Write rates, a list with a float for each of optimizer.param_groups, to the\n"
    "groups' 'lr'. A rate kept in a tensor is filled. ValueError: one list is longer.";

PyObject *
ctpy_write_rates(PyObject *module, PyObject *args)
{
    PyObject *optimizer, *rates;
    if (!PyArg_ParseTuple(args, "OO!:write_rates", &optimizer, &PyList_Type, &rates)) {
        return NULL;
    }
    if (scheduler_write_rates(PyModule_GetState(module), optimizer, rates) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
