/* ctrainer._C.DefaultFlow: when to log, evaluate, save and stop.
 *
 * Runs every step, so it is C. Steps may come as floats (a user's `logging_steps=10.0`)
 * and are compared as such. */
#include "binding/callbacks/handler.h"

#include <math.h>
#include <stdbool.h>

typedef struct DefaultFlow {
    PyObject_HEAD
} DefaultFlow;

/* args, state and control of one event, and the names to read them by. */
typedef struct flow {
    const ctpy_state *names;
    PyObject *args, *state, *control; /* borrowed from the caller of the event */
} flow;

static int
read_number(PyObject *op, PyObject *name, double *value)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    *value = found == Py_None ? 0.0 : PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Is the strategy args.<name> the word? Strategies are str enumerations. */
static int
strategy_is(const flow *f, PyObject *name, const char *word)
{
    PyObject *found = PyObject_GetAttr(f->args, name);
    if (found == NULL) {
        return -1;
    }
    int same =
        PyUnicode_Check(found) && PyUnicode_CompareWithASCIIString(found, word) == 0;
    Py_DECREF(found);
    return same;
}

static int
raise_flag(const flow *f, PyObject *name)
{
    return PyObject_SetAttr(f->control, name, Py_True);
}

/* Has the evaluation's delay passed at `now` (a step or an epoch)? */
static int
delay_passed(const flow *f, double now, int *passed)
{
    double delay;
    if (read_number(f->args, f->names->str_eval_delay, &delay) < 0) {
        return -1;
    }
    *passed = delay <= now;
    return 0;
}

/* Is `step` a multiple of state.<every>? */
static int
is_multiple(const flow *f, PyObject *every, double step, bool *due)
{
    double period;
    if (read_number(f->state, every, &period) < 0) {
        return -1;
    }
    *due = period > 0.0 && fmod(step, period) == 0.0;
    return 0;
}

static int
is_true(PyObject *op, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(op, name);
    int truth = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return truth;
}

static int
log_due(const flow *f, double step, bool *due)
{
    int by_steps = strategy_is(f, f->names->str_logging_strategy, "steps");
    *due = false;
    if (by_steps < 0 ||
        (by_steps && is_multiple(f, f->names->str_logging_steps, step, due) < 0)) {
        return -1;
    }
    if (!*due && step == 1.0) {
        int first = is_true(f->args, f->names->str_logging_first_step);
        if (first < 0) {
            return -1;
        }
        *due = first;
    }
    return 0;
}

int
ctpy_flow_log_due(const ctpy_state *names, PyObject *args, PyObject *state,
                  int64_t step, bool epoch_ends, bool *due)
{
    const flow f = {.names = names, .args = args, .state = state};
    int by_epoch = strategy_is(&f, names->str_logging_strategy, "epoch");
    if (by_epoch < 0 || log_due(&f, (double)step, due) < 0) {
        return -1;
    }
    *due = *due || (by_epoch && epoch_ends);
    return 0;
}

static int
flow_log(const flow *f, double step)
{
    bool due;
    if (log_due(f, step, &due) < 0) {
        return -1;
    }
    return due ? raise_flag(f, f->names->str_should_log) : 0;
}

/* By steps, the last step is evaluated too, whatever the period (transformers 5). */
static int
flow_evaluate(const flow *f, double step, bool last)
{
    bool due;
    int passed;
    int by_steps = strategy_is(f, f->names->str_eval_strategy, "steps");
    if (by_steps <= 0) {
        return by_steps;
    }
    if (is_multiple(f, f->names->str_eval_steps, step, &due) < 0) {
        return -1;
    }
    if (!due && !last) {
        return 0;
    }
    if (delay_passed(f, step, &passed) < 0) {
        return -1;
    }
    return passed ? raise_flag(f, f->names->str_should_evaluate) : 0;
}

static int
flow_save(const flow *f, double step, bool last)
{
    bool due;
    int by_steps = strategy_is(f, f->names->str_save_strategy, "steps");
    if (by_steps <= 0) {
        return by_steps;
    }
    if (is_multiple(f, f->names->str_save_steps, step, &due) < 0) {
        return -1;
    }
    return due || last ? raise_flag(f, f->names->str_should_save) : 0;
}

static int
take_event(PyObject *op, PyObject *const *args, Py_ssize_t nargs, flow *f)
{
    if (nargs != 3) {
        PyErr_Format(PyExc_TypeError,
                     "%s: an event takes args, state and control, not %zd values",
                     Py_TYPE(op)->tp_name, nargs);
        return -1;
    }
    *f = (flow){ctpy_state_borrow(op), args[0], args[1], args[2]};
    return 0;
}

PyDoc_STRVAR(on_step_end_doc,
             "on_step_end($self, args, state, control, /, **kwargs)\n--\n\n"
             "Raise the flags that are due after this step; return the control.");

static PyObject *
DefaultFlow_on_step_end(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *Py_UNUSED(kwnames))
{
    flow f;
    double step, max_steps;
    if (take_event(op, args, nargs, &f) < 0 ||
        read_number(f.state, f.names->str_global_step, &step) < 0 ||
        read_number(f.state, f.names->str_max_steps, &max_steps) < 0) {
        return NULL;
    }
    bool last = step >= max_steps;
    if (flow_log(&f, step) < 0 || flow_evaluate(&f, step, last) < 0 ||
        flow_save(&f, step, last) < 0) {
        return NULL;
    }
    if (last && raise_flag(&f, f.names->str_should_training_stop) < 0) {
        return NULL;
    }
    return Py_NewRef(f.control);
}

PyDoc_STRVAR(on_epoch_end_doc,
             "on_epoch_end($self, args, state, control, /, **kwargs)\n--\n\n"
             "Raise the flags that are due after this epoch; return the control.");

static PyObject *
DefaultFlow_on_epoch_end(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *Py_UNUSED(kwnames))
{
    flow f;
    double epoch;
    int log, evaluate, save, passed;
    if (take_event(op, args, nargs, &f) < 0 ||
        read_number(f.state, f.names->str_epoch, &epoch) < 0 ||
        delay_passed(&f, epoch, &passed) < 0 ||
        (log = strategy_is(&f, f.names->str_logging_strategy, "epoch")) < 0 ||
        (evaluate = strategy_is(&f, f.names->str_eval_strategy, "epoch")) < 0 ||
        (save = strategy_is(&f, f.names->str_save_strategy, "epoch")) < 0) {
        return NULL;
    }
    if ((log && raise_flag(&f, f.names->str_should_log) < 0) ||
        (evaluate && passed && raise_flag(&f, f.names->str_should_evaluate) < 0) ||
        (save && raise_flag(&f, f.names->str_should_save) < 0)) {
        return NULL;
    }
    return Py_NewRef(f.control);
}

#define METHOD(name)                                                                   \
    {#name, (PyCFunction)(void (*)(void))DefaultFlow_##name,                           \
     METH_FASTCALL | METH_KEYWORDS, name##_doc}
static PyMethodDef DefaultFlow_methods[] = {
    METHOD(on_step_end),
    METHOD(on_epoch_end),
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(DefaultFlow_doc,
             "DefaultFlow()\n--\n\n"
             "The flags of the control by the strategies of the arguments.");

static PyType_Slot DefaultFlow_slots[] = {
    {Py_tp_doc,      (void *)DefaultFlow_doc},
    {Py_tp_traverse, ctpy_leaf_traverse     },
    {Py_tp_dealloc,  ctpy_leaf_dealloc      },
    {Py_tp_methods,  DefaultFlow_methods    },
    {0,              NULL                   },
};

PyType_Spec DefaultFlow_spec = {
    .name = "ctrainer._C.DefaultFlow",
    .basicsize = sizeof(DefaultFlow),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = DefaultFlow_slots,
};
