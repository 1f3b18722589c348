/* Functions of the Trainer's loop, by file.
 *
 * The attributes that users read, replace and delete (model, args, state, control,
 * optimizer, ...) live in the instance's __dict__; C reads them by interned name and
 * keeps no copy across a hook. The fields of binding/engine/fields.def are our own. */
#ifndef BINDING_TRAINER_TRAINER_H
#define BINDING_TRAINER_TRAINER_H

#include "binding/callbacks/handler.h"
#include "binding/engine/adapt.h"
#include "binding/engine/ranks.h"
#include "binding/engine/run.h"
#include "binding/engine/targets.h"
#include "binding/runtime/ctpy.h"

#include "core/engine/step.h"

#include <stdbool.h>

/* ---- update.c; each function returns 0, or -1 with an exception ---- */

/* Runs an update from the summed gradients to the callbacks after the step. */
int ctpy_finish_update(PyObject *op, ctpy_run *run);

/* Decides before an update whether the norms of layers are measured for the log. */
int ctpy_metrics_plan(PyObject *op, ctpy_run *run, PyObject *batches);

/* ---- log.c; each function returns 0, or -1 with an exception ---- */

/* Reads the loss of a micro-batch in host memory. A loss on a device is added to
 * device_loss, and *value is 0. */
int ctpy_add_loss(PyObject *op, PyObject *loss, double *value);

/* Calls the hook _maybe_log_save_evaluate if the hook is overridden, or if a log, an
 * evaluation or a checkpoint is due. */
int ctpy_log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate);

/* ---- agree.c: agreement of the ranks, at no cost on one rank; 0, or -1 with an
 * exception ---- */

/* Before an update: *enough is whether all ranks have a batch; run->targets is the sum
 * of the ranks' targets. Ranks with different numbers of batches all raise, with each
 * rank's number, or warn of batches that are left over where the arguments allow them.
 */
int ctpy_ranks_begin(PyObject *op, ctpy_run *run, PyObject *batches, bool *enough);

/* *finite becomes false on all ranks where it is false on one, so that all ranks skip
 * the update, or none. */
int ctpy_ranks_agree_finite(PyObject *op, bool *finite);

/* ctpy_log_save_evaluate() on all ranks if a callback of one rank requests a log, an
 * evaluation or a checkpoint. */
int ctpy_do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate);

/* Whether a signal on some rank ends the run on all ranks. */
bool ctpy_ranks_stop(PyObject *op);

/* On several ranks: enters model.no_sync(), by which gradients are exchanged after the
 * last micro-batch of an update only. *context is NULL for a model without no_sync(),
 * or if the arguments ask for an exchange after each micro-batch. */
int ctpy_enter_no_sync(PyObject *op, PyObject *model, PyObject **context);

#endif
