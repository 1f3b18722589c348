/* A batch in parts of fewer rows, for want of memory. `parts` is a
 * ctrainer.runtime.parts.Parts, which chooses the size of parts. A failure in the
 * forward pass repeats the part. A failure in the backward pass, after some gradients
 * have been added, repeats the part with held gradients, or the update. */
#ifndef BINDING_ENGINE_PARTS_H
#define BINDING_ENGINE_PARTS_H

#include "binding/runtime/ctpy.h"

#include <stdbool.h>

/* Runs a part, which weighs `weight` in the batch. 0, or -1 with an exception and
 * nothing in `context` changed. */
typedef int (*ctpy_part_run)(void *context, PyObject *part, double weight, bool last);

/* Runs a batch in parts, or whole. 1: the update has to begin anew; -1 with an
 * exception, of another kind or from a part of a single row. */
int ctpy_parts_run(PyObject *parts, PyObject *batch, ctpy_part_run run, void *context);

/* parts.name() of an update: "begin", "rewind" or "end". parts may be NULL. */
static inline int
ctpy_parts_call(PyObject *parts, const char *name)
{
    return parts == NULL ? 0 : ctpy_drop_steal(PyObject_CallMethod(parts, name, NULL));
}

/* parts.end(); keeps the exception that is set. */
void ctpy_parts_end(PyObject *parts);

/* After the passes of an update. 1: the update has to begin anew; 0; -1. */
int ctpy_parts_agree(PyObject *parts);

#endif
