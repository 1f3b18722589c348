/* What the loop needs of the callbacks' binding. */
#ifndef BINDING_CALLBACKS_HANDLER_H
#define BINDING_CALLBACKS_HANDLER_H

#include "binding/runtime/ctpy.h"

#include <stdbool.h>

/* Would a callback of the user's own be called for this event? Then work that nobody
 * else sees (clipping before the update, waiting for a save) must be done first. 1, 0,
 * or -1 with an exception. */
int ctpy_callbacks_listens(const ctpy_state *state, PyObject *handler, PyObject *event);

/* Would DefaultFlow log after this step, or after the epoch if that ends with it? */
int ctpy_flow_log_due(const ctpy_state *names, PyObject *args, PyObject *state,
                      int64_t step, bool epoch_ends, bool *due);

/* Fires a callback event and stores the control that comes back. extra: a dict or NULL.
 * Returns 0, or -1 with an exception. */
int ctpy_trainer_fire(PyObject *op, PyObject *event, PyObject *extra);

#endif
