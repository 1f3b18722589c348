/* The insides of GreedyLR, for the two files that implement it. */
#ifndef CTPY_SCHEDULER_GREEDY_H
#define CTPY_SCHEDULER_GREEDY_H

#include "binding/scheduler_metric.h"
#include "core/ct_greedy.h"

typedef struct GreedyLR {
    MetricScheduler base;
    ct_greedy core;      /* core.window is owned */
    int64_t window_size; /* also where core.smooth is off */
    int verbose;         /* print each change to sys.stdout */
} GreedyLR;

extern const char GreedyLR_state_dict_doc[];
extern const char GreedyLR_load_state_dict_doc[];
PyObject *GreedyLR_state_dict(PyObject *op, PyObject *unused);
PyObject *GreedyLR_load_state_dict(PyObject *op, PyObject *state);

#endif
