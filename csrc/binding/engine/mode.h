/* Train and eval mode of models and optimizers, and the context a loss is computed in.
 */
#ifndef BINDING_ENGINE_MODE_H
#define BINDING_ENGINE_MODE_H

#include "binding/runtime/ctpy.h"

/* Enters compute_loss_context_manager(); *context is what to leave, or NULL where
 * nobody has overridden it. Returns 0, or -1 with an exception. */
int ctpy_enter_loss_context(PyObject *op, PyObject **context);

/* optimizer.train() or .eval(), by the mode's name, where it has modes. 0 or -1. */
int ctpy_set_optimizer_mode(PyObject *op, PyObject *mode);

/* *on: is the model in eval mode? Returns 1, 0 where it has no `training` to tell by,
 * or -1 with an exception. */
int ctpy_has_eval_mode(PyObject *model, const ctpy_state *names, bool *on);

/* model.train(), and the optimizer's, unless `model` and op.model are in that mode
 * already: asking costs 80 ns where setting it walks all modules. 0 or -1. */
int ctpy_ensure_train_mode(PyObject *op, PyObject *model);

#endif
