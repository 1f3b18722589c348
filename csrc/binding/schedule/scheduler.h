/* What the types of learning-rate schedulers share, and LRScheduler's insides. */
#ifndef BINDING_SCHEDULE_SCHEDULER_H
#define BINDING_SCHEDULE_SCHEDULER_H

#include "binding/runtime/ctpy.h"

#include "core/schedule/schedule.h"

/* An entry of a table of methods; function may take keywords. */
#define SCHEDULER_METHOD(name, function, flags, doc)                                   \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

/* ---- options (schedule.c) --------------------------------------------------------
 */

/* Gives a schedule the options of a dict, or of None. A value of None counts as not
 * given. Returns 0, or -1 with a ValueError or TypeError that names the option. */
int ctpy_schedule_set_options(ct_schedule *schedule, PyObject *options);
/* One option from a Python number or word. */
int ctpy_schedule_set_option(ct_schedule *schedule, const char *name, PyObject *value);
/* The options that the kind reads and that have a value, as a new dict. */
PyObject *ctpy_schedule_options(const ct_schedule *schedule);

/* ---- rates of an optimizer's groups (binding/schedule/scheduler.c)
 * -------------------------
 */

/* ---- LRScheduler -----------------------------------------------------------------
 */

/* Every Python object that a scheduler holds, for init, traverse and clear. */
#define LRSCHEDULER_OBJECTS(X)                                                         \
    X(optimizer) /* NULL before __init__, or something with param_groups */            \
    X(base_lrs)  /* list of float: each group's rate at factor 1 */                    \
    X(last_lr)   /* list of float: what the last step wrote */

typedef struct LRScheduler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    LRSCHEDULER_OBJECTS(FIELD)
#undef FIELD
    ct_schedule schedule; /* kind is NULL before __init__ */
    int64_t last_epoch;   /* scheduler steps done; the step whose rate is in force */
    int64_t step_count;   /* calls of step(), the one of __init__ included */
} LRScheduler;

/* What the trainer needs of the learning-rate scheduler's binding. */

/* Is op an LRScheduler of ours itself, not of a subclass that may override step()? */
static inline int
ctpy_scheduler_is_native(const ctpy_state *state, PyObject *op)
{
    return Py_IS_TYPE(op, state->LRScheduler);
}

/* What step() does, for a native scheduler: one step on, and the new rate written to
 * every group of its optimizer. Returns 0, or -1 with an exception and nothing
 * changed but, at most, some groups' rates. */
int ctpy_scheduler_step(PyObject *op);

#endif
