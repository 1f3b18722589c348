/* The insides of LRScheduler, for the files that implement it. */
#ifndef CTPY_SCHEDULER_TYPE_H
#define CTPY_SCHEDULER_TYPE_H

#include "binding/ctpy.h"
#include "core/ct_schedule.h"

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
    ct_schedule schedule;
    long long last_epoch; /* scheduler steps done; the step whose rate is in force */
    long long step_count; /* calls of step(), the one of __init__ included */
} LRScheduler;

/* Writes one rate a group of the optimizer. */
int scheduler_write_rates(PyObject *op, PyObject *rates);

extern const char LRScheduler_state_dict_doc[];
extern const char LRScheduler_load_state_dict_doc[];
extern const char LRScheduler_setstate_doc[];
extern const char LRScheduler_reduce_doc[];
PyObject *LRScheduler_state_dict(PyObject *op, PyObject *unused);
PyObject *LRScheduler_load_state_dict(PyObject *op, PyObject *state);
PyObject *LRScheduler_setstate(PyObject *op, PyObject *state);
PyObject *LRScheduler_reduce(PyObject *op, PyObject *unused);

#endif
