/* Python context managers from C. */
#include "binding/runtime/ctpy.h"

/* Calls exit with the exception that is set; 1 when it was suppressed. */
static int
leave_with_exception(PyObject *context, PyObject *exit_name)
{
    PyObject *type, *value, *trace, *answer;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    PyObject *stack[] = {context, type, value, trace == NULL ? Py_None : trace};
    answer = PyObject_VectorcallMethod(exit_name, stack, 4, NULL);
    int suppressed = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (suppressed == 0) {
        PyErr_Restore(type, value, trace);
        return 0;
    }
    Py_XDECREF(trace);
    Py_XDECREF(value);
    Py_XDECREF(type);
    return suppressed;
}

static int
leave(PyObject *context, PyObject *exit_name)
{
    if (PyErr_Occurred()) {
        if (leave_with_exception(context, exit_name) > 0) {
            PyErr_Format(PyExc_RuntimeError,
                         "%.100s swallowed an exception that training cannot go on "
                         "from; let it pass",
                         Py_TYPE(context)->tp_name);
        }
        return -1;
    }
    PyObject *stack[] = {context, Py_None, Py_None, Py_None};
    PyObject *answer = PyObject_VectorcallMethod(exit_name, stack, 4, NULL);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

PyObject *
ctpy_enter_context_steal(PyObject *context, PyObject *enter_name)
{
    PyObject *entered =
        context == NULL ? NULL : PyObject_CallMethodNoArgs(context, enter_name);
    if (entered == NULL) {
        Py_CLEAR(context);
    }
    Py_XDECREF(entered);
    return context;
}

PyObject *
ctpy_leave_context_steal(PyObject *context, PyObject *exit_name, PyObject *result)
{
    if (context != NULL && leave(context, exit_name) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(context);
    return result;
}
