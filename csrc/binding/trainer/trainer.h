/* ctrainer._C.Trainer: what the files of the type share.
 *
 * Everything that Python sees (model, args, state, control, optimizer, ...) lives in
 * the instance's __dict__, where users read, replace and delete it; C reads it by
 * interned name when it needs it and keeps no copy across a hook. The struct holds
 * only what Python has no name for. */
#ifndef BINDING_TRAINER_TRAINER_H
#define BINDING_TRAINER_TRAINER_H

#include "binding/engine/targets.h"
#include "binding/engine/run.h"
#include "binding/engine/mode.h"
#include "binding/engine/adapt.h"
#include "binding/callbacks/handler.h"
#include "binding/runtime/ctpy.h"
#include "binding/runtime/signals.h"

#include "core/engine/step.h"

#include <stdbool.h>

/* binding/trainer/loop.c: the next micro-batches and what they weigh. */

/* binding/trainer/update.c: from the summed gradients to the end of the step. 0 or -1.
 */
int ctpy_finish_update(PyObject *op, ctpy_run *run);

/* binding/trainer/update.c: what of the update that begins is to be measured for the
 * log. */
int ctpy_metrics_plan(PyObject *op, ctpy_run *run, PyObject *batches);

/* binding/trainer/checkpoint.c: calls the hook _save_checkpoint in a transaction; None
 * or NULL. */
PyObject *ctpy_save_checkpoint(PyObject *op, PyObject *model, PyObject *trial);

/* binding/trainer/log.c */
int ctpy_add_loss(PyObject *op, PyObject *loss, double *value);
/* Brings what was summed on a device into the window. */
int ctpy_log_save_evaluate(PyObject *op, ctpy_run *run, PyObject *learning_rate);

#endif
