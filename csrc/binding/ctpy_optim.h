/* What the trainer needs of the optimizer's binding, in C and without a Python call. */
#ifndef CTPY_OPTIM_H
#define CTPY_OPTIM_H

#include "binding/ctpy.h"
#include "core/ct_step.h"

/* Is op one of our optimizer faces: an object whose `_engine` is an OptimEngine? On
 * yes *engine is a new reference. 1, 0, or -1 with an exception. */
int ctpy_optimizer_engine(PyObject *op, PyObject **engine);

/* One update of our own optimizer, in two phases. The first reads the live
 * param_groups and state of the face `op` and the gradients' addresses, then measures;
 * the second updates. Between them nothing may run Python that touches parameters.
 * The GIL is released around the passes. Return 0, or -1 with an exception. */
int ctpy_engine_measure(PyObject *engine, PyObject *op, const ct_step_config *config,
                        double loss_scale, ct_step_result *result);
int ctpy_engine_apply(PyObject *engine, PyObject *op, const ct_step_config *config,
                      double loss_scale, ct_step_result *result);

/* Gradients of the parameters of a foreign optimizer (its param_groups, live): their
 * L2 norm, and their scaling in place. Returns 0, or -1 with an exception. */
int ctpy_grads_norm(PyObject *optimizer, double *norm);
int ctpy_grads_scale(PyObject *optimizer, double factor);

/* Sets .grad of every parameter of op's param_groups to None. */
int ctpy_grads_drop(PyObject *optimizer);

/* Tensors and arrays to spans. `op` is an exact torch.Tensor or Parameter, or a NumPy
 * array; contiguous and on the CPU. TypeError or ValueError name `what` and what was
 * wrong. The span borrows op's memory. `writable` refuses read-only arrays. */
int ctpy_span_from(PyObject *op, const char *what, int writable, ct_span *span);

#endif
