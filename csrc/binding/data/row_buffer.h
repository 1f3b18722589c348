/* RowBuffer: the rows of one array of an ArrayAccumulator, and the owner of the memory
 * behind the NumPy array that they become. */
#ifndef CTPY_ROW_BUFFER_H
#define CTPY_ROW_BUFFER_H

#include "binding/runtime/ctpy.h"
#include "core/data/rows.h"

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

/* A new, empty buffer. spill_folder (bytes) is kept when spill_bytes > 0. */
PyObject *RowBuffer_make(ctpy_state *state, size_t expected_rows, size_t spill_bytes,
                         PyObject *spill_folder);

/* Checks that a contiguous ndarray may be appended; the first one decides dtype and
 * shape. Returns 0, or -1 with TypeError or ValueError whose text fits after "name: ".
 */
int RowBuffer_check(PyObject *op, PyObject *array);

/* Copies the rows of an array that RowBuffer_check has passed. The GIL is released
 * around large copies. Returns 0, or -1 with nothing added. */
int RowBuffer_append(PyObject *op, PyObject *array);

/* Makes room for the rows of that array too, so that appending it cannot fail. */
int RowBuffer_reserve(PyObject *op, PyObject *array);

/* What `n_rows` rows like those of `array` take. */
size_t RowBuffer_projected_bytes(PyObject *op, PyObject *array, size_t n_rows);

/* All rows as one array over this buffer's memory, gaps filled with padding_index.
 * Nothing may be appended afterwards. */
PyObject *RowBuffer_result(PyObject *op, PyObject *padding_index);

#endif
