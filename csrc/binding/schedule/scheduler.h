/* What the types of learning-rate schedulers share, and LRScheduler's insides. */
#ifndef CTPY_SCHEDULER_TYPE_H
#define CTPY_SCHEDULER_TYPE_H

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

/* ---- rates of an optimizer's groups (binding/schedule/scheduler_groups.c) -------------------------
 */

/* param_groups as a new tuple of dicts: a hook cannot take one away meanwhile.
 * optimizer may be NULL, which raises. */
PyObject *scheduler_groups(const ctpy_state *state, PyObject *optimizer);
/* groups[g][key] as a new float. */
PyObject *scheduler_group_rate(PyObject *groups, Py_ssize_t g, PyObject *key);
/* Writes rates, a list with a float for each group. */
int
scheduler_write_rates(const ctpy_state *state, PyObject *optimizer, PyObject *rates);

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

extern const char LRScheduler_state_dict_doc[];
extern const char LRScheduler_load_state_dict_doc[];
extern const char LRScheduler_setstate_doc[];
extern const char LRScheduler_reduce_doc[];
PyObject *LRScheduler_state_dict(PyObject *op, PyObject *unused);
PyObject *LRScheduler_load_state_dict(PyObject *op, PyObject *state);
PyObject *LRScheduler_setstate(PyObject *op, PyObject *state);
PyObject *LRScheduler_reduce(PyObject *op, PyObject *unused);

#endif
