/* What an optimizer's engine and the trainer need of _C.WeightAverage, in C.
 *
 * An update takes part in an average in three steps: ask whether one is due; let the
 * engine average what it updates in its own pass, marking it; finish, which averages
 * the rest and counts, or drop the marks when the update came to nothing. */
#ifndef CTPY_AVERAGE_H
#define CTPY_AVERAGE_H

#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"

#include <stdbool.h>

/* Is an average due after the next update? Then *decay is what it keeps of the old. */
bool ctpy_average_due(PyObject *average, double *decay);

/* The place of `value` among the averaged, looked for from `hint` on; -1: it is not. */
Py_ssize_t ctpy_average_find(PyObject *average, PyObject *value, Py_ssize_t hint);

/* The average at that place, which must be like `value` but for its dtype. */
int ctpy_average_view(PyObject *average, Py_ssize_t place, const ctpy_view *value,
                      ctpy_view *view);
void ctpy_average_mark(PyObject *average, Py_ssize_t place);

/* Averages what is not marked, if one was due, and counts the update. */
int ctpy_average_finish(PyObject *average, bool due, double decay);
void ctpy_average_drop(PyObject *average);

#endif
