/* What the types of learning-rate schedulers share, and LRScheduler's insides. */
#ifndef CTPY_SCHEDULER_TYPE_H
#define CTPY_SCHEDULER_TYPE_H

#include "binding/ctpy.h"
#include "core/ct_plateau.h"
#include "core/ct_schedule.h"

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

/* ---- rates of an optimizer's groups (scheduler_groups.c) -------------------------
 */

/* param_groups as a new tuple of dicts: a hook cannot take one away meanwhile.
 * optimizer may be NULL, which raises. */
PyObject *scheduler_groups(const ctpy_state *state, PyObject *optimizer);
/* groups[g][key] as a new float. */
PyObject *scheduler_group_rate(PyObject *groups, Py_ssize_t g, PyObject *key);
/* Every group's "lr" as a new list of floats. */
PyObject *scheduler_rates(const ctpy_state *state, PyObject *optimizer);
/* Writes rates, a list with a float for each group. Where old is such a list too,
 * rates equal to the old ones are left alone. */
int scheduler_write_rates(const ctpy_state *state, PyObject *optimizer, PyObject *rates,
                          PyObject *old);
/* numbers, a sequence with one for each of n groups, into values[n]. */
int
scheduler_doubles(PyObject *numbers, const char *name, double *values, Py_ssize_t n);
/* limit as a new list of n floats: one for all groups, or a list or tuple of n. */
PyObject *scheduler_limits(PyObject *limit, const char *name, Py_ssize_t n);

/* ---- fields in a state_dict (scheduler_fields.c) ---------------------------------
 */

/* A C field under its name in a state_dict; a table ends with name NULL. */
typedef struct scheduler_field {
    const char *name;
    enum {
        FIELD_REAL,
        FIELD_INTEGER,
        FIELD_FLAG,
        FIELD_WORD
    } form;
    size_t offset;            /* of a double, an int64_t, an int, an int */
    const char *const *words; /* FIELD_WORD: the int is a place in this pair */
} scheduler_field;

extern const char *const scheduler_modes[2];           /* "min", "max" */
extern const char *const scheduler_threshold_modes[2]; /* "rel", "abs" */

/* Sets a rule's mode and threshold_mode; ValueError where one is neither of its two. */
int scheduler_rule(const char *mode, const char *threshold_mode, ct_metric_rule *rule);
/* Adds the fields of *base to dict. */
int
scheduler_fields_save(const scheduler_field *fields, const void *base, PyObject *dict);
/* Reads them from a state_dict: KeyError, TypeError or ValueError where one is wrong;
 * *base is then partly changed. */
int scheduler_fields_load(const scheduler_field *fields, void *base, PyObject *state);
/* state[key] as a new list of floats, one for each of n groups. */
PyObject *scheduler_state_rates(PyObject *state, const char *key, Py_ssize_t n);

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
