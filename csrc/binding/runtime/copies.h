/* Copies of our objects, by copy.copy(), copy.deepcopy() and pickle. */
#ifndef CTPY_COPIES_H
#define CTPY_COPIES_H

#include "binding/runtime/ctpy.h"

/* What __getstate__ returns: (the instance's own attributes or None, fields). Takes
 * `fields`, a dict or NULL, over. */
PyObject *ctpy_copy_state_steal(PyObject *op, PyObject *fields);

/* The fields of such a state, borrowed, once the instance has its own attributes again;
 * NULL with TypeError for anything else. */
PyObject *ctpy_take_copy_state_borrow(PyObject *op, PyObject *state);

/* Makes types of which no copy can be right say so, and what to do. 0, or -1. */
int ctpy_refuse_copies(const ctpy_state *state);

#endif
