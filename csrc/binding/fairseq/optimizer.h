/* ctrainer._C.FairseqOptimizer for ctrainer._C.FairseqTrainer: an update that a GPU
 * makes without a wait of the host for the norm. */
#ifndef BINDING_FAIRSEQ_OPTIMIZER_H
#define BINDING_FAIRSEQ_OPTIMIZER_H

#include "binding/runtime/ctpy.h"

/* In place of clip_grad_norm(max_norm): the next step() measures and clips as well, and
 * the GPU skips an update whose gradients are not finite. 1; 0: nothing was done, as
 * for optimizers that are not ours, a loss scale, and parameters on the host; or -1. */
int ctpy_fairseq_defer(ctpy_state *names, PyObject *optimizer, double max_norm);

/* After step(): the engine whose update is enqueued, for ctpy_engine_await(), or NULL
 * for an update that was not: *norm is then that of the gradients. 0, or -1. */
int ctpy_fairseq_take_enqueued(PyObject *optimizer, PyObject **engine, double *norm);

#endif
