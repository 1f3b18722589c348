/* ArrayAccumulator: what its files share. */
#ifndef CTPY_ARRAYS_H
#define CTPY_ARRAYS_H

#include "binding/runtime/nested.h"
#include "binding/data/row_buffer.h"

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

/* Puts the leaf's name before the text of the TypeError or ValueError that is set. */
void ctpy_name_leaf_error(const ArrayAccumulator *self, const leaf_path *path);

/* A contiguous array of at least one dimension with the leaf's values, which fits
 * the rows before it. */
PyObject *ctpy_leaf_array(RowBuffer *leaf, PyObject *value);

/* A tensor, array or number as a contiguous array of at least one dimension. */
PyObject *ctpy_plain_array(PyObject *value, const ctpy_state *state);

/* Has the array bools, integers, floats or complex numbers? 1, 0, or -1. */
int ctpy_is_numeric(PyObject *array, const ctpy_state *state);

/* The structure of the first batch, with an empty RowBuffer for each leaf, which is
 * added to `leaves` too. */
PyObject *ctpy_tree_new(ArrayAccumulator *self, PyObject *value, PyObject *leaves);

/* Appends to the list `arrays` what each leaf of the tree gets from this batch; path is
 * NULL at the root. */
int ctpy_tree_flatten(ArrayAccumulator *self, PyObject *node, PyObject *value,
                      const leaf_path *path, PyObject *arrays);

/* The tree with its arrays in place of the buffers. */
PyObject *ctpy_tree_result(const ArrayAccumulator *self, PyObject *node);

#endif
