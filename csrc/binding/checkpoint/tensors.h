/* Named tensors on their way to a file or back. */
#ifndef BINDING_CHECKPOINT_TENSORS_H
#define BINDING_CHECKPOINT_TENSORS_H

#include "binding/runtime/ctpy.h"

#include "core/checkpoint/safetensors.h"

/* Starts with the flags set. The entries borrow from items. */
typedef struct ctpy_tensors {
    PyObject *items; /* list of (name, value), strong */
    ct_st_entry *entries;
    uint64_t *extents; /* of all shapes, in order */
    size_t n;
    bool writable;    /* the tensors are to be read into */
    bool may_excerpt; /* data may be excerpts of other files */
} ctpy_tensors;

void ctpy_tensors_fini(ctpy_tensors *tensors);

/* Reads a dict of name -> tensor or array, or -> (bytes as uint8, tag, shape) for a
 * dtype of the file format only. 0, or -1 with an exception that names the tensor. */
int ctpy_tensors_from(ctpy_state *state, PyObject *dict, ctpy_tensors *tensors);

/* A tuple of (path as bytes or None, offset, n) as excerpts that borrow the paths, and
 * the sum of all n; release with ct_free. NULL with an exception that names `what`. */
ct_excerpt *ctpy_excerpts_from(PyObject *tuple, const char *what, size_t *n_bytes);

/* The memory of a contiguous tensor or array, in the host's memory or where kernels of
 * ctrainer work, and its place. 0, or -1 with an exception that names `what`. */
int ctpy_memory_from(ctpy_state *state, PyObject *op, const char *what, ct_span *span,
                     ct_place *place);

/* str, bytes or PathLike as a new bytes object for the file system. */
PyObject *ctpy_path_from(PyObject *op);

#endif
