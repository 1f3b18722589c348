/* ArrayAccumulator: what its files share. */
#ifndef BINDING_DATA_ACCUMULATOR_H
#define BINDING_DATA_ACCUMULATOR_H

#include "binding/runtime/ctpy.h"
#include "binding/runtime/nested.h"

#include "core/data/rows.h"

/* RowBuffer: the rows of one array of an ArrayAccumulator, and the owner of the memory
 * behind the NumPy array that they become. */

#define CTPY_ROW_MAX_DIMS 32

typedef struct RowBuffer {
    PyObject_HEAD
    ct_rows rows;
    PyObject *dtype;  /* NumPy's, of every batch; NULL before the first */
    PyObject *folder; /* bytes: where rows.spill_folder points, or NULL */
    int ndim;         /* >= 1 once dtype is set */
    Py_ssize_t
        shape[CTPY_ROW_MAX_DIMS]; /* beyond the first two: equal in all batches */
    Py_ssize_t item_bytes;
} RowBuffer;

typedef struct ArrayAccumulator {
    PyObject_HEAD
    PyObject *name;          /* str: what the errors call the whole */
    PyObject *padding_index; /* number */
    PyObject *tree;   /* structure: RowBuffer | None | (type, keys, children) | NULL */
    PyObject *leaves; /* list of the RowBuffers in the tree, in order */
    PyObject *folder; /* bytes: where arrays beyond spill_bytes go */
    size_t expected_rows;
    size_t spill_bytes;
    bool busy; /* in append or result, which let other threads run */
} ArrayAccumulator;

/* Where a leaf lies, from the leaf upwards; formatted only when an error names it. */
typedef struct leaf_path {
    const struct leaf_path *up; /* NULL at the root */
    PyObject *key;              /* borrowed; NULL for a position */
    Py_ssize_t position;
} leaf_path;

/* A tensor, array or number as a contiguous array of at least one dimension. */
PyObject *ctpy_plain_array(PyObject *value, const ctpy_state *state);

/* Has the array bools, integers, floats or complex numbers? 1, 0, or -1. */
int ctpy_is_numeric(PyObject *array, const ctpy_state *state);

#endif
