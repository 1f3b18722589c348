/* One update of the trainer, between the files that make it. */
#ifndef CTPY_TRAINER_UPDATE_H
#define CTPY_TRAINER_UPDATE_H

#include "binding/optim/grads.h"
#include "binding/trainer/trainer.h"

typedef struct ctpy_update {
    PyObject *optimizer;
    PyObject
        *engine; /* of one of our optimizers whose step() nobody replaced, or NULL */
    PyObject *scaler;  /* the loss scaler, or NULL */
    PyObject *average; /* of the weights, or NULL */
    PyObject *blocks;  /* a BMUF, whose ranks train apart, or NULL */
    PyObject *shards;  /* the Communicator of the ranks that each have a shard of every
                          parameter, or NULL */
    bool average_due;
    double loss_scale;
    bool on_host;     /* the gradients are in host memory */
    bool overridden;  /* somebody else's _clip_grad_norm clips by norm */
    bool clip_first;  /* somebody looks at the gradients between clipping and update */
    ctpy_grads grads; /* those clipped in place */
    ct_step_config config;
    ct_step_result result;
} ctpy_update;

/* binding/trainer/trainer_clip.c */

/* Reads what the arguments and overrides say of clipping. */
int ctpy_update_read_clip(PyObject *op, ctpy_update *u);

/* Measures the gradients of an update: by the engine, or to be clipped in place. */
int ctpy_update_measure(PyObject *op, ctpy_update *u);

/* Unscales and clips in place, unless the engine will, in its update. */
int ctpy_update_clip(PyObject *op, ctpy_run *run, ctpy_update *u);

/* The L2 norm of the gradients as they are, divided by the loss scale. */
int ctpy_update_norm(PyObject *op, const ctpy_update *u, double *norm);

/* binding/trainer/trainer_shards.c */

/* Reads over which ranks parameters are sharded, if they are. */
int ctpy_update_open_shards(PyObject *op, ctpy_update *u);

/* Adds up, over these ranks, sums of powers of gradients for the p-norm. */
int ctpy_update_share_sums(PyObject *op, const ctpy_update *u, double p, double *sums,
                           size_t n);

/* binding/trainer/trainer_metrics.c: what is due of metrics; after measuring, before clipping. */
int ctpy_metrics_measure(PyObject *op, const ctpy_run *run, const ctpy_update *u);

#endif
