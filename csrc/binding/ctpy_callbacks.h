/* What the loop needs of the callbacks' binding. */
#ifndef CTPY_CALLBACKS_H
#define CTPY_CALLBACKS_H

#include "binding/ctpy.h"

/* handler.<event>(args, state, control, **extra): fires the event by attribute lookup,
 * so that a replaced handler or a patched event is honoured. `event` is one of the
 * interned str_on_*; `extra` is a dict, or NULL for none (on_log wants logs,
 * on_evaluate and on_predict want metrics). Borrows everything. Returns the control
 * that the last callback left, a new reference, or NULL with the exception of the
 * callback. */
PyObject *ctpy_callbacks_fire(PyObject *handler, PyObject *event, PyObject *args,
                              PyObject *state, PyObject *control, PyObject *extra);

#endif
