#include "binding/engine/parts.h"

/* After an exception in the part from `row` on. 0: smaller parts are to be tried. The
 * answer None of parts.recover() keeps the exception. */
static int
recover(PyObject *parts, PyObject *part, Py_ssize_t row)
{
    PyObject *error = ctpy_take_exception();
    PyObject *answer = PyObject_CallMethod(parts, "recover", "OOn", part, error, row);
    int anew = -1;
    if (answer == Py_None) {
        ctpy_set_exception_steal(Py_NewRef(error));
    }
    else if (answer != NULL) {
        anew = PyObject_IsTrue(answer);
    }
    Py_XDECREF(answer);
    Py_DECREF(error);
    return anew;
}

/* The part from *row on. Sets *row to the first row after the part, or to -1 at the
 * end. */
static int
run_part(PyObject *parts, PyObject *batch, Py_ssize_t *row, ctpy_part_run run,
         void *context)
{
    PyObject *part, *taken = PyObject_CallMethod(parts, "take", "On", batch, *row);
    double weight;
    Py_ssize_t next;
    int result = -1;
    if (taken != NULL && PyArg_ParseTuple(taken, "Odn", &part, &weight, &next)) {
        result = run(context, part, weight, next < 0);
        if (result == 0) {
            *row = next;
        }
        else {
            result = recover(parts, part, *row);
        }
    }
    Py_XDECREF(taken);
    return result;
}

int
ctpy_parts_run(PyObject *parts, PyObject *batch, ctpy_part_run run, void *context)
{
    Py_ssize_t row = 0;
    int result = 0;
    while (result == 0 && row >= 0) {
        result = run_part(parts, batch, &row, run, context);
    }
    return result;
}

void
ctpy_parts_end(PyObject *parts)
{
    PyObject *error = PyErr_Occurred() ? ctpy_take_exception() : NULL;
    if (ctpy_parts_call(parts, "end") < 0) {
        PyErr_WriteUnraisable(parts);
    }
    if (error != NULL) {
        ctpy_set_exception_steal(error);
    }
}

int
ctpy_parts_agree(PyObject *parts)
{
    PyObject *answer = PyObject_CallMethod(parts, "agree", NULL);
    const int anew = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return anew;
}
