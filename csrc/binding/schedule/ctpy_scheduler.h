/* What the trainer needs of the learning-rate scheduler's binding. */
#ifndef CTPY_SCHEDULER_H
#define CTPY_SCHEDULER_H

#include "binding/runtime/ctpy.h"

/* Is op an LRScheduler of ours itself, not of a subclass that may override step()? */
static inline int
ctpy_scheduler_is_native(const ctpy_state *state, PyObject *op)
{
    return Py_IS_TYPE(op, state->LRScheduler);
}

/* What step() does, for a native scheduler: one step on, and the new rate written to
 * every group of its optimizer. Returns 0, or -1 with an exception and nothing
 * changed but, at most, some groups' rates. */
int ctpy_scheduler_step(PyObject *op);

#endif
