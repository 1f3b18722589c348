/* LRScheduler's step, for callers that take the short way past Python. */
#ifndef BINDING_SCHEDULE_SCHEDULER_H
#define BINDING_SCHEDULE_SCHEDULER_H

#include "binding/runtime/ctpy.h"

/* Whether op is an LRScheduler whose step() is C's: a subclass may override step(). */
bool ctpy_scheduler_is_native(const ctpy_state *state, PyObject *op);

/* step() of a native scheduler: advances a step and writes the new learning rate to
 * every group of the optimizer. Returns 0, or -1 with an exception and nothing changed
 * but, at most, some groups' learning rates. */
int ctpy_scheduler_step(PyObject *op);

/* Takes the last step() back. */
int ctpy_scheduler_step_back(PyObject *op);

#endif
