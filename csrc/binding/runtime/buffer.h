/* The memory, shape, dtype and device of a tensor or an array, and nested batches. */
#ifndef BINDING_RUNTIME_BUFFER_H
#define BINDING_RUNTIME_BUFFER_H

#include "binding/runtime/ctpy.h"
#include "binding/runtime/dlpack_abi.h"

#include "core/base/span.h"
#include "core/comm/plugin.h"

#include <stdint.h>

/* Borrowed memory of a tensor or array without gaps. shape is NULL for an array without
 * dimensions. strides, in elements, is NULL for elements in C order; a transposed or
 * channels-last tensor has strides, and may be processed in the order of memory if
 * every operand has equal strides. */
typedef struct ctpy_view {
    ct_span span;
    int ndim;
    const int64_t *shape, *strides;
    int readonly;
    int memory;  /* its kind, a DLDeviceType of DLPack; CTPY_DL_CPU: the host's */
    int ordinal; /* which GPU's */
} ctpy_view;

/* The place of an object, for error messages: "what" alone, or with group >= 0
 * param_groups[group]['params'][index] followed by "what", such as ".grad". */
typedef struct ctpy_place {
    const char *what;
    Py_ssize_t group, index;
} ctpy_place;

/* Starts to load memory that will be used soon, `at` bytes from an address; NULL does
 * nothing. GCC deletes calls of functions that do nothing but prefetch: the empty
 * instruction keeps them. */
static inline void
ctpy_prefetch(const void *memory, ptrdiff_t at)
{
#if defined(__GNUC__)
    if (memory != NULL) {
        __asm__ volatile("" : : "r"(memory));
        __builtin_prefetch((const char *)memory + at);
    }
#else
    (void)memory, (void)at;
#endif
}

/* The same for a tensor: the Python object, and torch's memory around the shape of the
 * last view. */
static inline void
ctpy_prefetch_tensor(const void *op, const void *shape)
{
    ctpy_prefetch(op, 0);
    ctpy_prefetch(op, 16);
    ctpy_prefetch(shape, -64);
    ctpy_prefetch(shape, 0);
    ctpy_prefetch(shape, 64);
    ctpy_prefetch(shape, 112);
}

/* Is op a torch.Tensor or of a subclass? 1, 0, or -1 with an exception. */
int ctpy_is_torch_tensor(ctpy_state *state, PyObject *op);

/* Fills *view from an exact torch.Tensor, torch.nn.Parameter or numpy.ndarray. -1 with
 * an exception that names the place. */
int
ctpy_view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, ctpy_view *view);

/* The same, of a tensor on any device (of torch 2.10 and newer). */
int ctpy_view_anywhere(ctpy_state *state, PyObject *op, const ctpy_place *place,
                       ctpy_view *view);

/* Raises the ValueError of a tensor on a device that cannot be used; -1. */
int ctpy_reject_device(ctpy_state *state, PyObject *op, const ctpy_place *place);

/* 1 when both have the same dtype, shape and order. */
int ctpy_view_matches(const ctpy_view *a, const ctpy_view *b);

/* Tensors and arrays to spans. `op` is an exact torch.Tensor or Parameter, or a NumPy
 * array; contiguous; in memory of the kind `memory`, a DLDeviceType (that of a device
 * with torch 2.10 and newer). TypeError or ValueError name `what`, the
 * object, the requirement and the remedy. The span borrows op's memory: own op while
 * the span is in use. `writable` rejects read-only arrays. */
int ctpy_span_on(ctpy_state *state, PyObject *op, const char *what, int writable,
                 int memory, ct_span *span);

/* The same in the host's memory. */
static inline int
ctpy_span_from(ctpy_state *state, PyObject *op, const char *what, int writable,
               ct_span *span)
{
    return ctpy_span_on(state, op, what, writable, CTPY_DL_CPU, span);
}

/* ---- devices ------------------------------------------------------------------- */

/* The tables of a plugin's capsule, if their version is ours; else NULL with an
 * exception. They live as long as the process. */
const ct_plugin *ctpy_plugin_borrow(PyObject *capsule);

/* The device of a plugin's capsule, the host's for None; NULL with an exception. */
const ct_device *ctpy_device_borrow(PyObject *capsule);

/* The device in whose memory the view of op is: the host, or that of ctrainer._cuda,
 * which is imported for the first such tensor. NULL with a ValueError that names the
 * place, for a device of neither. */
const ct_device *ctpy_device_of(ctpy_state *state, PyObject *op,
                                const ctpy_place *place, const ctpy_view *view);

/* The stream that torch works on now, on a device with memory of this kind; NULL for
 * the host. 0, or -1 with an exception. */
int ctpy_current_stream(ctpy_state *state, int memory, int ordinal, void **stream);

/* Where kernels work: on a device's memory, in the order of torch's current stream. */
typedef struct ctpy_target {
    const ct_device *device; /* NULL: not chosen yet */
    int memory, ordinal;
    void *stream;
} ctpy_target;

/* The target in whose memory the view of op is. 0, or -1 with an exception, as for
 * ctpy_device_of. */
int ctpy_target_of(ctpy_state *state, PyObject *op, const ctpy_place *place,
                   const ctpy_view *view, ctpy_target *target);

static inline bool
ctpy_target_has(const ctpy_target *target, const ctpy_view *view)
{
    return view->memory == target->memory && view->ordinal == target->ordinal;
}

/* The memory of a tensor on the target's device; a target not chosen yet becomes the
 * tensor's. 0, or -1 with an exception. */
int ctpy_view_at(ctpy_state *state, PyObject *op, const char *what, ctpy_target *target,
                 ctpy_view *view);

/* ---- nested batches: tensors, arrays and numbers in containers ------------------- */

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

/* batch[key]; NULL without an exception for a mapping without the key and for a batch
 * that is no mapping: a list of rows, a tensor or an object for the user's hooks.
 * *failed is set on error. */
PyObject *ctpy_batch_entry(PyObject *batch, PyObject *key, int *failed);

/* Length of the first dimension of the first tensor or array in op; -1 without any, -2
 * with an exception. For a list of unconverted rows the length of the list. */
Py_ssize_t ctpy_batch_size(PyObject *op, const ctpy_state *state);

/* A copy of op with every tensor as a NumPy array, bfloat16 as float32; arrays and
 * numbers stay unchanged. */
PyObject *ctpy_numpify_all(PyObject *op, const ctpy_state *state);

/* A tensor's values as a NumPy array, over the tensor's memory if possible; bfloat16,
 * unknown to NumPy, becomes float32. */
PyObject *ctpy_tensor_array(PyObject *tensor, const ctpy_state *state);

/* A new tensor of the dtype and on the device of `like` with an array's values. */
PyObject *ctpy_tensor_like(PyObject *like, PyObject *array);

#endif
