/* One update of the trainer, between the files that make it. */
#ifndef BINDING_TRAINER_UPDATE_H
#define BINDING_TRAINER_UPDATE_H

#include "binding/engine/ranks.h"
#include "binding/trainer/agree.h"
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

#endif
