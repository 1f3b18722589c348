/* What the files of Trainer's evaluation share. */
#ifndef BINDING_EVALUATE_EVALUATE_H
#define BINDING_EVALUATE_EVALUATE_H

#include "binding/callbacks/handler.h"
#include "binding/engine/targets.h"
#include "binding/engine/ranks.h"
#include "binding/engine/run.h"
#include "binding/engine/mode.h"
#include "binding/runtime/nested.h"
#include "binding/engine/adapt.h"

#include <stdbool.h>

/* What is kept of every batch. */
enum {
    CTPY_EVAL_PREDICTIONS,
    CTPY_EVAL_LABELS,
    CTPY_EVAL_INPUTS,
    CTPY_EVAL_LOSSES, /* one per row, for compute_metrics */
    CTPY_EVAL_KINDS
};

/* One batch for the store. All borrowed; None where there is nothing. */
typedef struct ctpy_eval_batch {
    PyObject *values[CTPY_EVAL_LOSSES]; /* predictions, labels, inputs */
    PyObject *whole; /* the model's inputs, for compute_metrics by batch */
    PyObject *loss;
    Py_ssize_t rows; /* 0: a dummy batch, for the others' collectives */
    int64_t targets; /* labels that count, or 0 when they are not asked for */
} ctpy_eval_batch;

/* What an evaluation knows of the other ranks. */
typedef struct ctpy_eval_ranks {
    PyObject *group; /* Communicator, owned; NULL: there are no others */
    Py_ssize_t left; /* rows still wanted of a loader that repeats some; -1: all */
    bool gathered;   /* the user's gather_function has joined the values already */
    bool told;       /* the others know of the failure */
} ctpy_eval_ranks;

/* The outputs of an evaluation as they grow. All pointers are owned, but for ranks. */
typedef struct ctpy_eval_store {
    PyObject *sinks[CTPY_EVAL_KINDS]; /* ArrayAccumulator, list, or NULL: none yet */
    PyObject *waiting;                /* list of batches that are still on the device */
    Py_ssize_t max_waiting;           /* 0 where the model runs in host memory */
    PyObject *expected_rows;          /* int or None */
    PyObject *spill_bytes;            /* int or None */
    int concat;      /* one array for all batches, not a list of them */
    int keep_losses; /* per row, for compute_metrics */
    int by_token;    /* weigh batches by their targets too */
    int has_loss;
    Py_ssize_t n_rows;             /* of all ranks */
    ctpy_eval_ranks *ranks;        /* whose batches it takes too; NULL: nobody's */
    double loss_sum, loss_rows;    /* of each row its batch's loss */
    double token_sum, token_count; /* of each target its batch's loss */
} ctpy_eval_store;

/* Reads args' settings. n_rows: how many are expected, or -1. Returns 0, or -1 with an
 * exception and nothing to release. */
int ctpy_eval_store_init(ctpy_eval_store *store, PyObject *op, PyObject *args,
                         Py_ssize_t n_rows);
void ctpy_eval_store_fini(ctpy_eval_store *store);

/* Adds a batch; on a device it may wait there until the next ones are under way. */
int ctpy_eval_store_add(ctpy_eval_store *store, ctpy_state *names,
                        const ctpy_eval_batch *batch);

/* Brings what still waits into host memory. */
int ctpy_eval_store_flush(ctpy_eval_store *store, ctpy_state *names);

/* The arrays (or lists) of one kind, a new reference; None where there are none. The
 * store gives them up. */
PyObject *ctpy_eval_store_take(ctpy_eval_store *store, int kind);

/* binding/evaluate/outputs.c, binding/evaluate/outputs.c */

#define CTPY_EVALUATING "evaluation" /* what messages say that a rank was doing */

/* Is the trainer alone? If not, its group and what the loader repeats. 0 or -1. */
int ctpy_eval_ranks_init(ctpy_eval_ranks *ranks, PyObject *op, PyObject *loader);

/* Gives this rank's batch to all and calls visit with every rank's, in rank order:
 * each row comes once. last: is it the last batch of this round? as_tensors: values
 * that are tensors here arrive as such, else as arrays. 0 or -1. */
typedef int ctpy_eval_visit(void *context, const ctpy_eval_batch *batch, bool last);
int
ctpy_eval_share(ctpy_eval_ranks *ranks, ctpy_state *names, const ctpy_eval_batch *batch,
                bool as_tensors, ctpy_eval_visit *visit, void *context);

/* Tells the others before each round whether this rank has a batch, and if not why.
 * Returns how many ranks have one and the first of these in *first; or -1 with an
 * exception: this rank's own, or that another has failed or was asked to stop. */
int ctpy_eval_sync_round(ctpy_eval_ranks *ranks, ctpy_state *names, bool has_batch,
                         int *first);

/* The batch of rank `root` on every rank, pickled on its way. */
PyObject *ctpy_eval_broadcast_batch(ctpy_eval_ranks *ranks, ctpy_state *names,
                                    PyObject *inputs, int root);

/* One run of the loop. Owned, but for op. */
typedef struct ctpy_eval_loop {
    PyObject *op;
    PyObject *args, *loader, *model;
    PyObject *loss_only;       /* bool, for prediction_step */
    PyObject *ignore_keys;     /* or None */
    PyObject *main_input_name; /* str, or NULL: inputs are not kept */
    PyObject *gather;          /* the user's gather_function, or NULL */
    PyObject *preprocess;      /* preprocess_logits_for_metrics, or None */
    PyObject *compute_metrics; /* or None */
    PyObject *metrics;         /* of the last compute_metrics by batch, or None */
    PyObject *uncast;          /* gives the model its own weights back, or NULL */
    ctpy_eval_ranks ranks;
    ctpy_eval_store store;
    int in_train;            /* the model's modes and weights are train()'s */
    int by_batch;            /* compute_metrics sees each batch alone */
    int is_prediction;       /* predict(): outputs are kept even if by_batch */
    Py_ssize_t default_rows; /* of a batch without a tensor */
    Py_ssize_t n_batches;    /* that have run here */
} ctpy_eval_loop;

/* op._wrap_model(op.model, training=False), a new reference. */
PyObject *ctpy_eval_wrap_model(PyObject *op, const ctpy_state *names);

/* Brings loop->model into the dtype of a full evaluation and into eval mode. Whatever
 * this returns, ctpy_eval_release_model has to follow. */
int
ctpy_eval_ready_model(ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names);

/* Within a training the modes go back to what they were; else the model gets its own
 * weights and forward back. May be called with an exception set, which stays. */
int ctpy_eval_release_model(const ctpy_eval_loop *loop, PyObject *adapter,
                            const ctpy_state *names);

/* ctrainer.trainer_utils.<name>(*args, **kwargs) */
PyObject *ctpy_eval_utility(const char *name, PyObject *args_steal, PyObject *kwargs);

/* The metrics of a finished loop: what compute_metrics returned, in plain numbers,
 * with the losses, every key beginning with "<prefix>_". metrics is None or what the
 * last batch's compute_metrics gave. */
PyObject *
ctpy_eval_metrics(PyObject *metrics, const ctpy_eval_store *store, PyObject *prefix);

/* args.past_index, of models such as XLNet: op._past is the output of that index (it
 * counts the loss, which is not among these outputs), or gone. */
int ctpy_eval_keep_past(PyObject *op, PyObject *outputs, const ctpy_state *names);
int ctpy_eval_drop_past(PyObject *op, const ctpy_state *names);

#endif
