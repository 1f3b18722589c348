/* ctrainer._C.ArrayAccumulator, and values as arrays. */
#ifndef BINDING_DATA_ACCUMULATOR_H
#define BINDING_DATA_ACCUMULATOR_H

#include "binding/runtime/ctpy.h"

typedef struct ArrayAccumulator {
    PyObject_HEAD
    PyObject *name;          /* str: for errors */
    PyObject *padding_index; /* number */
    PyObject *tree;   /* structure: RowBuffer | None | (type, keys, children) | NULL */
    PyObject *leaves; /* list of the RowBuffers in the tree, in order */
    PyObject *folder; /* bytes: the folder of arrays beyond spill_bytes */
    size_t expected_rows;
    size_t spill_bytes;
    bool busy; /* in append or result, while other threads may run */
} ArrayAccumulator;

/* A tensor, array or number as a contiguous array of at least one dimension. */
PyObject *ctpy_plain_array(PyObject *value, const ctpy_state *state);

/* Has the array bools, integers, floats or complex numbers? 1, 0, or -1. */
int ctpy_is_numeric(PyObject *array, const ctpy_state *state);

#endif
