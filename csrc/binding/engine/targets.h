/* The targets of a batch, for training and evaluation alike. */
#ifndef BINDING_ENGINE_TARGETS_H
#define BINDING_ENGINE_TARGETS_H

#include "binding/runtime/ctpy.h"

/* Targets of a batch: labels that are not -100; -1 for a batch without labels to count,
 * with *failed set on error. */
int64_t ctpy_count_targets(PyObject *op, PyObject *batch, int *failed);

/* The same of a list of batches; -1 for an empty list too. */
int64_t ctpy_count_batches(PyObject *op, PyObject *batches, int *failed);

#endif
