/* The optimizer's binding for the trainer, in C and without a Python call. */
#ifndef BINDING_OPTIM_OPTIM_H
#define BINDING_OPTIM_OPTIM_H

#include "binding/runtime/buffer.h"
#include "core/engine/step.h"

/* Makes state->optim_keys, the interned keys of every kind's options and state. 0, or
 * -1 with MemoryError. */
int ctpy_optim_intern(ctpy_state *state);

/* A ct_blas_fn: torch's product, where torch is in the process and its product is the
 * fastest at hand. */
bool ctpy_torch_gemm(const ct_gemm *gemm);

/* May the engine of `op` be driven directly: is op a wrapper of ctrainer.optim with an
 * OptimEngine in `_engine`, its own step() and no step hooks? 1 and a new reference in
 * *engine; 0: call op.step() as of any other optimizer; or -1 with an exception. */
int ctpy_optimizer_engine(ctpy_state *state, PyObject *op, PyObject **engine);

/* One update of an optimizer of ctrainer.optim, in two phases. The first reads the
 * gradients and measures; the second reads the live param_groups, state and addresses
 * of the wrapper `op`, makes state where torch would, and updates. Python code between
 * the phases may change hyperparameters; replaced gradients are read, but not measured
 * again. The GIL is released around the passes. Return 0, or -1 with an exception. */
int ctpy_engine_measure(PyObject *engine, PyObject *op, const ct_step_config *config,
                        double loss_scale, ct_step_result *result);
int ctpy_engine_apply(PyObject *engine, PyObject *op, const ct_step_config *config,
                      double loss_scale, ct_step_result *result);

/* As far as the last update shows, can ctpy_engine_enqueue() enqueue the next one? */
bool ctpy_engine_can_enqueue(PyObject *engine, const ct_step_config *config);

/* Both phases without a wait for the device: 1, or 0 and nothing done for an update
 * that needs the host (ct_step_can_enqueue), or -1. The update counts as made until
 * ctpy_engine_await, the properties of the engine or the next update read the result.
 * next_scale: NULL, or a tensor of a float32, the place of scale->next. */
int ctpy_engine_enqueue(PyObject *engine, PyObject *op, const ct_step_config *config,
                        ct_step_scale *scale, PyObject *next_scale);
int ctpy_engine_await(PyObject *engine, ct_step_result *result);

/* The next update of the engine writes this WeightAverage too, with config->ema_decay,
 * and marks the averaged values; NULL: none. */
int ctpy_engine_attach(PyObject *engine, PyObject *average);

/* The gradients of any optimizer's parameters (of its live param_groups), to be
 * measured and clipped in place, by kernels where there are some for their memory. */
typedef struct ctpy_grads {
    ctpy_state *state;
    ct_grads *list;     /* NULL: not open */
    PyObject *owners;   /* a list that keeps the spans alive */
    ctpy_target target; /* none without gradients */
    bool elsewhere;     /* no kernels for their memory, or on several devices: the list
                         * has groups and no spans */
} ctpy_grads;

int ctpy_grads_open(ctpy_state *state, PyObject *optimizer, ctpy_grads *grads);
void ctpy_grads_close(ctpy_grads *grads); /* {0} is fine */

/* Frees the list that is kept from one update to the next. */
void ctpy_grads_free_spare(ctpy_state *state);

/* ct_clip_measure; ct_clip_measure and ct_clip_decide; ct_clip_apply; without the GIL.
 * 0, or -1 with an exception. */
int ctpy_grads_sum(ctpy_grads *grads, const ct_clip *clip);
int ctpy_grads_measure(ctpy_grads *grads, const ct_clip *clip, double loss_scale,
                       double *norm);
int ctpy_grads_clip(ctpy_grads *grads, const ct_clip *clip, double loss_scale);

/* One update of any optimizer. */
typedef struct ctpy_step {
    PyObject *optimizer;
    PyObject
        *engine; /* of one of our optimizers whose step() nobody replaced, or NULL */
    PyObject *adapter; /* measures and clips where there are no kernels */
    PyObject *shards;  /* the Communicator of the ranks that each have a shard of every
                          parameter, or NULL */
    double loss_scale;
    bool overridden;  /* somebody else clips by norm */
    ctpy_grads grads; /* those clipped in place */
    ct_step_config config;
    ct_step_result result;
} ctpy_step;

static inline void
ctpy_step_release(ctpy_step *step)
{
    ctpy_grads_close(&step->grads);
    Py_CLEAR(step->shards);
    Py_CLEAR(step->adapter);
    Py_CLEAR(step->engine);
    Py_CLEAR(step->optimizer);
}

/* Has norms be of all ranks. 0, or -1 with an exception, as of all functions of a step.
 */
int ctpy_step_shard(ctpy_state *state, ctpy_step *step, PyObject *shards);

/* Opens the gradients and fills in the result and the factors of clipping. */
int ctpy_step_measure_in_place(ctpy_state *state, ctpy_step *step, const ct_clip *clip);

/* Divides the gradients by the loss scale and clips them, after the measurement. */
int ctpy_step_clip_in_place(ctpy_state *state, ctpy_step *step, const ct_clip *clip);

/* An option called name as a C value: a policy, and a number > 0, for which None leaves
 * *value as it is. 0, or -1 with an exception that names the option. */
int ctpy_parse_nonfinite(PyObject *arg, const char *name, ct_nonfinite *policy);
int ctpy_parse_limit(PyObject *arg, const char *name, double *value);

/* Sets .grad of every parameter of op's param_groups to None. */
int ctpy_grads_drop(ctpy_state *state, PyObject *optimizer);

#endif
