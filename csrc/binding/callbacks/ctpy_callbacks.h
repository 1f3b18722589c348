/* What the loop needs of the callbacks' binding. */
#ifndef CTPY_CALLBACKS_H
#define CTPY_CALLBACKS_H

#include "binding/runtime/ctpy.h"

#include <stdbool.h>

/* handler.<event>(args, state, control, **extra): fires the event by attribute lookup,
 * so that a replaced handler or a patched event is honoured. `event` is one of the
 * interned str_on_*; `extra` is a dict, or NULL for none (on_log wants logs,
 * on_evaluate and on_predict want metrics). Borrows everything. Returns the control
 * that the last callback left, a new reference, or NULL with the exception of the
 * callback. */
PyObject *ctpy_callbacks_fire(PyObject *handler, PyObject *event, PyObject *args,
                              PyObject *state, PyObject *control, PyObject *extra);

/* Would a callback of the user's own be called for this event? Then work that nobody
 * else sees (clipping before the update, waiting for a save) must be done first. 1, 0,
 * or -1 with an exception. */
int ctpy_callbacks_listens(const ctpy_state *state, PyObject *handler, PyObject *event);

/* Would DefaultFlow log after this step, or after the epoch if that ends with it? */
int ctpy_flow_log_due(const ctpy_state *names, PyObject *args, PyObject *state,
                      int64_t step, bool epoch_ends, bool *due);

#endif
