/* What the trainer needs of the optimizer's binding, in C and without a Python call. */
#ifndef CTPY_OPTIM_H
#define CTPY_OPTIM_H

#include "binding/runtime/buffer.h"
#include "core/engine/step.h"

/* May the engine of `op` be driven directly: is op one of our optimizer wrappers, whose
 * `_engine` is an OptimEngine, whose step() nobody has overridden and which has no
 * step hooks? On yes *engine is a new reference; on no, call op.step() as of any other
 * optimizer. 1, 0, or -1 with an exception. */
int ctpy_optimizer_engine(ctpy_state *state, PyObject *op, PyObject **engine);

/* One update of our own optimizer, in two phases. The first reads the gradients and
 * measures; the second reads the live param_groups, state and addresses of the wrapper
 * `op`, makes state where torch would, and updates. Python that runs between them may
 * change hyperparameters; gradients that it replaces are seen, but not measured again.
 * The GIL is released around the passes. Return 0, or -1 with an exception. */
int ctpy_engine_measure(PyObject *engine, PyObject *op, const ct_step_config *config,
                        double loss_scale, ct_step_result *result);
int ctpy_engine_apply(PyObject *engine, PyObject *op, const ct_step_config *config,
                      double loss_scale, ct_step_result *result);

/* The next update of the engine takes part in this WeightAverage, with
 * config->ema_decay, marking what it averages; NULL: in none. */
int ctpy_engine_attach(PyObject *engine, PyObject *average);

/* The gradients of any optimizer's parameters (its param_groups, live), to be measured
 * and clipped in place. Where they are not in host memory the list has groups and no
 * spans. */
typedef struct ctpy_grads {
    ct_grads list;
    PyObject *owners; /* a list: what keeps the spans alive; NULL without spans */
} ctpy_grads;

int ctpy_grads_open(ctpy_state *state, PyObject *optimizer, bool on_host,
                    ctpy_grads *grads);
void ctpy_grads_close(ctpy_grads *grads); /* {0} is fine */

/* Calls visit(state, param, grad, place, arg) for every parameter and its .grad, which
 * may be None, and returns a list that keeps the gradients alive; NULL when a visit
 * fails. */
typedef int ctpy_grad_visit(ctpy_state *state, PyObject *param, PyObject *grad,
                            const ctpy_place *place, void *arg);
PyObject *ctpy_grads_visit(ctpy_state *state, PyObject *optimizer,
                           ctpy_grad_visit *visit, void *arg);

/* A list of the parameters whose gradients are those of such a list, in its order. */
PyObject *ctpy_grads_params(ctpy_state *state, PyObject *optimizer);

/* ct_clip_measure; that and then ct_clip_decide; ct_clip_apply; without the GIL. 0, or
 * -1 with an exception. */
int ctpy_grads_sum(ctpy_grads *grads, const ct_clip *clip);
int ctpy_grads_measure(ctpy_grads *grads, const ct_clip *clip, double loss_scale,
                       double *norm);
int ctpy_grads_clip(ctpy_grads *grads, const ct_clip *clip, double loss_scale);

/* group["max_grad_norm"] as ct_grad_group has it: 0 where it is missing or None, Inf
 * where it is 0. g is for the message of the ValueError. */
int ctpy_group_max_norm(const ctpy_state *state, PyObject *group, Py_ssize_t g,
                        double *max_norm);

/* Sets .grad of every parameter of op's param_groups to None. */
int ctpy_grads_drop(ctpy_state *state, PyObject *optimizer);

/* The same in a GPU's memory if on_cuda, of torch 2.10 and newer. */
int ctpy_span_on(ctpy_state *state, PyObject *op, const char *what, int writable,
                 int on_cuda, ct_span *span);

#endif
