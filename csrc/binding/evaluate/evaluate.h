/* The batches of an evaluation, and their exchange between ranks. */
#ifndef BINDING_EVALUATE_EVALUATE_H
#define BINDING_EVALUATE_EVALUATE_H

#include "binding/engine/ranks.h"

#include <stdbool.h>

/* The values of a batch that are kept. */
enum {
    CTPY_EVAL_PREDICTIONS,
    CTPY_EVAL_LABELS,
    CTPY_EVAL_INPUTS,
    CTPY_EVAL_KINDS
};

/* A batch that has run. All borrowed; None for what is absent. */
typedef struct ctpy_eval_batch {
    PyObject *values[CTPY_EVAL_KINDS];
    PyObject *whole; /* the model's inputs, for compute_metrics by batch */
    PyObject *loss;
    Py_ssize_t rows; /* 0: a dummy batch, for the collectives of other ranks */
    int64_t targets; /* labels that count, or 0 when nobody asks for the count */
} ctpy_eval_batch;

typedef struct ctpy_eval_ranks {
    PyObject *group; /* Communicator, owned; NULL: the trainer is alone */
    Py_ssize_t left; /* rows still wanted of a loader that repeats some; -1: all */
    bool gathered;   /* the user's gather_function has joined the values already */
    bool reported;   /* all ranks know of the failure */
} ctpy_eval_ranks;

/* The loss as a number: the mean of a vector, which an override may return. */
int ctpy_eval_loss_value(PyObject *loss, const ctpy_state *names, double *value);

/* Sends this rank's batch to all and calls visit with every rank's, in rank order: each
 * row comes once. last: is it the last batch of this round? as_tensors: values
 * that are tensors here arrive as tensors, else as arrays. 0 or -1. */
typedef int ctpy_eval_visit(void *context, const ctpy_eval_batch *batch, bool last);
int ctpy_eval_exchange(ctpy_eval_ranks *ranks, ctpy_state *names,
                       const ctpy_eval_batch *batch, bool as_tensors,
                       ctpy_eval_visit *visit, void *context);

/* Reports to the other ranks before each round whether this rank has a batch, or the
 * exception that is set. Returns how many ranks have a batch and the first of these
 * ranks in *first; or -1 with an exception: this rank's own, or that another rank has
 * failed or was asked to stop. */
int ctpy_eval_sync_round(ctpy_eval_ranks *ranks, ctpy_state *names, bool has_batch,
                         int *first);

/* The batch of rank `root` on every rank. */
PyObject *ctpy_eval_broadcast_batch(ctpy_eval_ranks *ranks, ctpy_state *names,
                                    PyObject *inputs, int root);

#endif
