/* _C.WeightAverage for an optimizer's engine and the trainer, in C.
 *
 * An update writes an average in three steps: ask whether an average is due; let the
 * engine average and mark the parameters in its own pass; finish, which averages the
 * rest and counts, or drop the marks of a skipped update. An update that turns out not
 * to have been made after that is taken back. */
#ifndef CTPY_AVERAGE_H
#define CTPY_AVERAGE_H

#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"

#include <stdbool.h>

/* Is an average due after the next update? Then *decay is the weight of the old one. */
bool ctpy_average_due(PyObject *average, double *decay);

/* The index of `value` among the averaged values, searched from `hint` on; or -1. */
Py_ssize_t ctpy_average_find(PyObject *average, PyObject *value, Py_ssize_t hint);

/* The average at that index, which must be like `value` but for the dtype, for the pass
 * of the engine: it is marked. */
int ctpy_average_take(PyObject *average, Py_ssize_t place, const ctpy_view *value,
                      ctpy_view *view);

/* Averages the values without a mark, if an average was due, and counts the update. */
int ctpy_average_finish(PyObject *average, bool due, double decay);
void ctpy_average_drop(PyObject *average);

/* Is a value left that the engine has not averaged? */
bool ctpy_average_has_rest(PyObject *average);

/* As if ctpy_average_finish() had not been called, for averages without a rest. */
void ctpy_average_take_back(PyObject *average, bool due);

#endif
