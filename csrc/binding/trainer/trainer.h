/* Functions of the Trainer's loop, by file.
 *
 * The attributes that users read, replace and delete (model, args, state, control,
 * optimizer, ...) live in the instance's __dict__; C reads them by interned name and
 * keeps no copy across a hook. The fields of binding/engine/fields.def are our own. */
#ifndef BINDING_TRAINER_TRAINER_H
#define BINDING_TRAINER_TRAINER_H

#include "binding/callbacks/handler.h"
#include "binding/engine/run.h"
#include "binding/runtime/ctpy.h"

#include "core/engine/step.h"

#include <stdbool.h>

/* ---- update.c; each function returns 0, or -1 with an exception ---- */

/* From the summed gradients to the end of the step: update, schedule, counters and
 * callbacks. *learning_rate is the update's, a new reference, also after a failure. */
int ctpy_finish_update(PyObject *op, ctpy_run *run, PyObject **learning_rate);

/* Waits for the result of an enqueued update: sets the norm, and after a skipped update
 * takes the schedule's step back and reports the update. */
int ctpy_await_update(PyObject *op);

#endif
