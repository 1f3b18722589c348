/* What the loop needs of the callbacks' binding. */
#ifndef BINDING_CALLBACKS_HANDLER_H
#define BINDING_CALLBACKS_HANDLER_H

#include "binding/runtime/ctpy.h"

/* Would a callback of the user's own be called for this event? Then work that nobody
 * else sees (clipping before the update, waiting for a save) must be done first. 1, 0,
 * or -1 with an exception. */
int ctpy_callbacks_listens(const ctpy_state *state, PyObject *handler, PyObject *event);

/* Fires the event of that interned name at the trainer's handler, and stores the
 * control that comes back. Returns 0, or -1 with an exception. */
int ctpy_trainer_fire(PyObject *op, PyObject *event);

#endif
