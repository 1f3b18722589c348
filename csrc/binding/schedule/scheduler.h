/* Options of schedules, and the struct of LRScheduler. */
#ifndef BINDING_SCHEDULE_SCHEDULER_H
#define BINDING_SCHEDULE_SCHEDULER_H

#include "binding/runtime/ctpy.h"

#include "core/schedule/schedule.h"

/* An entry of a table of methods; function may take keywords. */
#define SCHEDULER_METHOD(name, function, flags, doc)                                   \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

/* ---- options (schedule.c) -------------------------------------------------------- */

/* Sets the options in a dict, or in None; a value of None is skipped. Returns 0, or -1
 * with a ValueError or TypeError that names the option. */
int ctpy_schedule_set_options(ct_schedule *schedule, PyObject *options);
/* Sets an option to a Python number or word. */
int ctpy_schedule_set_option(ct_schedule *schedule, const char *name, PyObject *value);
/* The options of the kind that have a value, as a new dict. */
PyObject *ctpy_schedule_options(const ct_schedule *schedule);

/* ---- LRScheduler ----------------------------------------------------------------- */

/* The Python objects of a scheduler, for init, traverse and clear. */
#define LRSCHEDULER_OBJECTS(X)                                                         \
    X(optimizer) /* NULL before __init__; has param_groups */                          \
    X(base_lrs)  /* list of float: each group's learning rate at factor 1 */           \
    X(last_lr)   /* list of float: written by the last step */

typedef struct LRScheduler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    LRSCHEDULER_OBJECTS(FIELD)
#undef FIELD
    ct_schedule schedule; /* kind is NULL before __init__ */
    int64_t last_epoch;   /* scheduler steps done: the step of last_lr */
    int64_t step_count;   /* calls of step(), with that of __init__ */
} LRScheduler;

/* Whether op is exactly an LRScheduler: a subclass may override step(). */
static inline int
ctpy_scheduler_is_native(const ctpy_state *state, PyObject *op)
{
    return Py_IS_TYPE(op, state->LRScheduler);
}

/* step() of a native scheduler: advances a step and writes the new learning rate to
 * every group of the optimizer. Returns 0, or -1 with an exception and nothing changed
 * but, at most, some groups' learning rates. */
int ctpy_scheduler_step(PyObject *op);

#endif
