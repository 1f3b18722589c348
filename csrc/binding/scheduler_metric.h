/* What schedulers that are stepped with an evaluation's metric share. */
#ifndef CTPY_SCHEDULER_METRIC_H
#define CTPY_SCHEDULER_METRIC_H

#include "binding/scheduler.h"

/* Every Python object that one holds, for init, traverse and clear. */
#define METRIC_OBJECTS(X)                                                              \
    X(optimizer)      /* NULL before __init__, or something with param_groups */       \
    X(min_lrs)        /* list of float: no group's rate falls below its own */         \
    X(default_min_lr) /* the one min_lr of all groups, or None where each has one */   \
    X(max_lrs)        /* list of float, or NULL: no rate rises above its own */        \
    X(init_lrs)       /* list of float, or NULL: what a new start begins with */       \
    X(last_lr)        /* list of float: the rates after the last step */

/* The head of each such type. */
typedef struct MetricScheduler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    METRIC_OBJECTS(FIELD)
#undef FIELD
    int64_t last_epoch; /* evaluations seen */
} MetricScheduler;

int MetricScheduler_traverse(PyObject *op, visitproc visit, void *arg);
int MetricScheduler_clear(PyObject *op);
void MetricScheduler_dealloc(PyObject *op);

/* What a kind does with a metric: from `before`, the groups' rates, to new ones. epoch
 * is the number of the evaluation. */
typedef int metric_step(PyObject *op, double metric, int64_t epoch, PyObject *before);

/* step(metrics, epoch=None) of a kind; without an epoch it counts on. */
PyObject *MetricScheduler_step(PyObject *op, PyObject *args, PyObject *kwargs,
                               metric_step *step_from);
/* Writes what has changed to the groups and notes it as the last rates. */
int MetricScheduler_write(PyObject *op, const double *rates, PyObject *before,
                          int64_t epoch);
/* list, or an empty one for NULL, as a new list. */
PyObject *MetricScheduler_copy(PyObject *list);

extern const char MetricScheduler_get_last_lr_doc[];
extern const char MetricScheduler_setstate_doc[];
extern const char MetricScheduler_reduce_doc[];
PyObject *MetricScheduler_get_last_lr(PyObject *op, PyObject *unused);
PyObject *MetricScheduler_setstate(PyObject *op, PyObject *state);
PyObject *MetricScheduler_reduce(PyObject *op, PyObject *unused);

/* Their entries in the table of each such type. */
#define METRIC_SCHEDULER_METHODS                                                       \
    SCHEDULER_METHOD("get_last_lr", MetricScheduler_get_last_lr, METH_NOARGS,          \
                     MetricScheduler_get_last_lr_doc),                                 \
        SCHEDULER_METHOD("__setstate__", MetricScheduler_setstate, METH_O,             \
                         MetricScheduler_setstate_doc),                                \
        SCHEDULER_METHOD("__reduce__", MetricScheduler_reduce, METH_NOARGS,            \
                         MetricScheduler_reduce_doc)

#endif
