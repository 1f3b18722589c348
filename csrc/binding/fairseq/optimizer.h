/* ctrainer._C.FairseqOptimizer for ctrainer._C.FairseqTrainer: an update that a GPU
 * makes without a wait of the host for the norm. */
#ifndef BINDING_FAIRSEQ_OPTIMIZER_H
#define BINDING_FAIRSEQ_OPTIMIZER_H

#include "binding/runtime/ctpy.h"

/* Can a GPU make the next update without a wait? 1; 0, as for optimizers that are not
 * ours, a loss scale, and parameters on the host; or -1. */
int ctpy_fairseq_can_defer(ctpy_state *names, PyObject *optimizer, double max_norm);

/* In place of clip_grad_norm(max_norm): the next step() measures and clips as well, and
 * the GPU skips an update whose gradients are not finite. 0, or -1 with a TypeError for
 * anything but a FairseqOptimizer. */
int ctpy_fairseq_defer(ctpy_state *names, PyObject *optimizer, double max_norm);

/* After step() of such an optimizer: the engine whose update is enqueued, for
 * ctpy_engine_await(), or NULL for an update that was not: *norm is then that of the
 * gradients. 0, or -1. */
int ctpy_fairseq_take_enqueued(PyObject *optimizer, PyObject **engine, double *norm);

#endif
