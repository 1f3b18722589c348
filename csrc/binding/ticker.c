/* ctrainer._C.Ticker: a callback that acts by the clock, not by the step.
 *
 * A display that is redrawn ten times a second must not cost a Python call in each of
 * the ten thousand steps of that second: the clock is read here, and the Python method
 * runs when a redraw is due. */
#include "binding/ctpy.h"

#include <time.h>

typedef struct Ticker {
    PyObject_HEAD
    double interval;     /* seconds between two calls of a tick */
    double due;          /* time of the next, on the monotonic clock; 0: at once */
    long long predicted; /* batches since the last evaluation or prediction ended */
} Ticker;

static double
seconds_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int
Ticker_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    Ticker *self = (Ticker *)op;
    static char *names[] = {"interval", NULL};
    double interval = 0.1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:Ticker", names, &interval)) {
        return -1;
    }
    if (!(interval >= 0.0)) {
        PyErr_SetString(PyExc_ValueError, "interval must be at least 0 seconds");
        return -1;
    }
    self->interval = interval;
    self->due = 0.0;
    self->predicted = 0;
    return 0;
}

/* Calls op.<name> with the event's arguments when a tick is due. */
static PyObject *
tick(PyObject *op, PyObject *name, PyObject *const *args, Py_ssize_t nargs,
     PyObject *kwnames)
{
    Ticker *self = (Ticker *)op;
    double now = seconds_now();
    if (now < self->due) {
        Py_RETURN_NONE;
    }
    self->due = now + self->interval;
    PyObject *method = PyObject_GetAttr(op, name);
    if (method == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_Vectorcall(method, args, (size_t)nargs, kwnames);
    Py_DECREF(method);
    return result;
}

PyDoc_STRVAR(on_step_end_doc,
             "on_step_end($self, args, state, control, /, **kwargs)\n--\n\n"
             "Call on_step_tick with the same arguments, once per interval.");

static PyObject *
Ticker_on_step_end(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    return tick(op, ctpy_state_borrow(op)->str_on_step_tick, args, nargs, kwnames);
}

PyDoc_STRVAR(
    on_prediction_step_doc,
    "on_prediction_step($self, args, state, control, /, **kwargs)\n--\n\n"
    "Count a batch in `predicted`; call on_prediction_tick once per interval.");

static PyObject *
Ticker_on_prediction_step(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    ((Ticker *)op)->predicted++;
    return tick(op, ctpy_state_borrow(op)->str_on_prediction_tick, args, nargs,
                kwnames);
}

#define METHOD(name)                                                                   \
    {#name, (PyCFunction)(void (*)(void))Ticker_##name, METH_FASTCALL | METH_KEYWORDS, \
     name##_doc}
static PyMethodDef Ticker_methods[] = {
    METHOD(on_step_end),
    METHOD(on_prediction_step),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Ticker_members[] = {
    {"interval", T_DOUBLE, offsetof(Ticker, interval), 0, "Seconds between two ticks."},
    {"due", T_DOUBLE, offsetof(Ticker, due), 0,
     "Monotonic time of the next tick; 0 makes it come at once."},
    {"predicted", T_LONGLONG, offsetof(Ticker, predicted), 0,
     "Batches predicted since it was last set to 0."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(Ticker_doc,
             "Ticker(interval=0.1)\n--\n\n"
             "Calls on_step_tick and on_prediction_tick at most once per interval.");

static PyType_Slot Ticker_slots[] = {
    {Py_tp_doc,      (void *)Ticker_doc},
    {Py_tp_init,     Ticker_init       },
    {Py_tp_traverse, ctpy_leaf_traverse},
    {Py_tp_dealloc,  ctpy_leaf_dealloc },
    {Py_tp_methods,  Ticker_methods    },
    {Py_tp_members,  Ticker_members    },
    {0,              NULL              },
};

PyType_Spec Ticker_spec = {
    .name = "ctrainer._C.Ticker",
    .basicsize = sizeof(Ticker),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Ticker_slots,
};
