/* The insides of FairseqOptimizer, for the files that implement it. */
#ifndef CTPY_FAIRSEQ_OPTIMIZER_H
#define CTPY_FAIRSEQ_OPTIMIZER_H

#include "binding/optim/grads.h"

#include <stdbool.h>

/* What is done about a norm that is not finite, and how the norm is clipped. */
typedef enum fairseq_rules {
    FAIRSEQ_PLAIN, /* nothing; max / (norm + 1e-6), at most 1 */
    FAIRSEQ_FP16,  /* OverflowError from clip_grad_norm(); max / norm */
    FAIRSEQ_AMP    /* the next step() is skipped; as plain */
} fairseq_rules;

typedef struct FairseqOptimizer {
    PyObject_HEAD
    PyObject *inner;  /* the torch-like optimizer; NULL before __init__ */
    PyObject *scaler; /* LossScaler, or NULL: the loss is not scaled */
    fairseq_rules rules;
    bool on_host;          /* every parameter is in host memory */
    bool in_backward;      /* a backward pass has begun and not come to its end */
    bool measured;         /* clip_grad_norm() was called since the last zero_grad() */
    double divisor;        /* what the gradients are to be divided by; > 0 */
    ct_step_result result; /* of the last measurement */
} FairseqOptimizer;

/* binding/fairseq/fairseq_optimizer_step.c: the methods that touch gradients. */
PyObject *FairseqOptimizer_clip_grad_norm(PyObject *op, PyObject *args, PyObject *kw);
PyObject *FairseqOptimizer_step(PyObject *op, PyObject *args, PyObject *kw);
extern const char FairseqOptimizer_clip_grad_norm_doc[], FairseqOptimizer_step_doc[];

/* What the loss is multiplied by before backward(); 1 without a scaler. */
int fairseq_loss_scale(FairseqOptimizer *self, double *scale);

/* 0, or -1 with a RuntimeError where __init__ was not called. */
int fairseq_optimizer_ready(const FairseqOptimizer *self);

#endif
