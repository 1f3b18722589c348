/* Named tensors on their way to a file or back. */
#ifndef BINDING_CHECKPOINT_TENSORS_H
#define BINDING_CHECKPOINT_TENSORS_H

#include "binding/runtime/ctpy.h"

#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/source.h"
#include "core/checkpoint/zip.h"

/* Starts as {0}, or with may_excerpt set. The entries borrow from items, so those must
 * outlive their use. */
typedef struct ctpy_tensors {
    PyObject *items; /* list of (name, value), strong */
    ct_st_entry *entries;
    uint64_t *extents; /* the shapes, one after the other */
    size_t n;
    bool may_excerpt; /* set by the caller: the data may lie in other files */
} ctpy_tensors;

void ctpy_tensors_fini(ctpy_tensors *tensors);

/* Reads a dict of name -> tensor or array, or -> (bytes of it as uint8, tag, shape) for
 * a dtype that only the file format has. Returns 0, or -1 with an exception that names
 * the tensor. */
int ctpy_tensors_from(ctpy_state *state, PyObject *dict, int writable,
                      ctpy_tensors *tensors);

/* A dict of str to str as *n pairs that borrow its strings; release with ct_free. NULL
 * with an exception. */
ct_st_pair *ctpy_pairs_from(PyObject *dict, size_t *n);

/* A list of (name, bytes or tensor or array, or excerpts where they may be) as records
 * that borrow from it; release with ctpy_records_free. NULL with an exception. */
ct_zip_record *ctpy_records_from(ctpy_state *state, PyObject *list, bool may_excerpt);
void ctpy_records_free(ct_zip_record *records, PyObject *list); /* NULL is fine */

/* A path as the file system wants it: a new bytes object. str, bytes or PathLike. */
PyObject *ctpy_path_from(PyObject *op);

#endif
