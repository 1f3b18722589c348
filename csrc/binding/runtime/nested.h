/* Nested batches: tensors, arrays and numbers in tuples, lists and mappings. */
#ifndef BINDING_RUNTIME_NESTED_H
#define BINDING_RUNTIME_NESTED_H

#include "binding/runtime/ctpy.h"

typedef enum ctpy_kind {
    CTPY_LEAF, /* a tensor, an array, a number: anything else */
    CTPY_NONE,
    CTPY_SEQUENCE, /* tuple or list, subclasses too */
    CTPY_MAPPING   /* dict, subclasses too, or anything else with keys() */
} ctpy_kind;

/* The kind of op; -1 with an exception when the lookup fails. */
int ctpy_kind_of(PyObject *op);

/* Is op a tensor: something with detach()? 1, 0, or -1. */
int ctpy_is_tensor(PyObject *op);

/* The items of a sequence or the values of a mapping as a tuple; *keys, if wanted, is
 * the tuple of a mapping's keys or None. */
PyObject *ctpy_children(PyObject *op, ctpy_kind kind, PyObject **keys);

/* A container of the given type (namedtuples and dict subclasses too) with the items
 * of a tuple; keys is a tuple or None. */
PyObject *ctpy_container(PyObject *type, PyObject *keys, PyObject *items);

/* Maps fn over the leaves, keeping the structure. None stays None. */
typedef PyObject *ctpy_map_fn(PyObject *leaf, const ctpy_state *state);

/* batch[key]; NULL without an exception for a mapping without the key and for a batch
 * that is no mapping: a list of rows, a tensor or an object for the user's hooks.
 * *failed is set on error. */
PyObject *ctpy_batch_entry(PyObject *batch, PyObject *key, int *failed);

/* Length of the first dimension of the first tensor or array in op; -1 without any, -2
 * with an exception. For a list of unconverted rows the length of the list. */
Py_ssize_t ctpy_batch_size(PyObject *op, const ctpy_state *state);

/* A copy of op with every tensor detached. */
PyObject *ctpy_detach_all(PyObject *op, const ctpy_state *state);

/* A copy of op with every tensor as a NumPy array, bfloat16 as float32; arrays and
 * numbers stay unchanged. */
PyObject *ctpy_numpify_all(PyObject *op, const ctpy_state *state);

/* A tensor's values as a NumPy array, over the tensor's memory if possible; bfloat16,
 * unknown to NumPy, becomes float32. */
PyObject *ctpy_tensor_array(PyObject *tensor, const ctpy_state *state);

/* A new tensor of the dtype and on the device of `like` with an array's values. */
PyObject *ctpy_tensor_like(PyObject *like, PyObject *array);

#endif
