/* The memory, shape and dtype of a tensor or an array, for the binding's files. */
#ifndef BINDING_RUNTIME_BUFFER_H
#define BINDING_RUNTIME_BUFFER_H

#include "binding/runtime/ctpy.h"

#include "core/base/span.h"

struct ctpy_dlpack_api;

/* Borrowed memory of a tensor or array without gaps. shape is NULL if only the number
 * of elements is known (torch before 2.10). strides, in elements, is NULL for elements
 * in C order; a transposed or channels-last tensor has strides, and may be processed in
 * the order of memory if every operand has equal strides. */
typedef struct ctpy_view {
    ct_span span;
    int ndim;
    const int64_t *shape, *strides;
    int readonly;
    int on_cuda; /* in a GPU's memory; else in the host's */
} ctpy_view;

/* The place of an object, for error messages: "what" alone, or with group >= 0
 * param_groups[group]['params'][index] followed by "what", such as ".grad". */
typedef struct ctpy_place {
    const char *what;
    Py_ssize_t group, index;
} ctpy_place;

/* Is op a torch.Tensor or of a subclass? 1, 0, or -1 with an exception. */
int ctpy_is_torch_tensor(ctpy_state *state, PyObject *op);

/* Fills *view from an exact torch.Tensor, torch.nn.Parameter or numpy.ndarray. -1 with
 * an exception that names the place. */
int
ctpy_view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, ctpy_view *view);

/* The same, of a tensor in a GPU's memory too (of torch 2.10 and newer). */
int ctpy_view_anywhere(ctpy_state *state, PyObject *op, const ctpy_place *place,
                       ctpy_view *view);

/* 1 when both have the same dtype, shape and order, as far as the shapes are known. */
int ctpy_view_matches(const ctpy_view *a, const ctpy_view *b);

/* ---- the sources of views -------------------------------------------------------- */

/* What is wrong with an object. */
typedef enum ctpy_problem {
    CTPY_PROBLEM_NONE,
    CTPY_PROBLEM_ADDRESS, /* torch has none to give; an exception may be set */
    CTPY_PROBLEM_TYPE,
    CTPY_PROBLEM_DEVICE,
    CTPY_PROBLEM_DTYPE,
    CTPY_PROBLEM_STRIDES,
    CTPY_PROBLEM_STORAGE
} ctpy_problem;

/* Tensors and arrays to spans. `op` is an exact torch.Tensor or Parameter, or a NumPy
 * array; contiguous and on the CPU. TypeError or ValueError name `what`, the
 * object, the requirement and the remedy. The span borrows op's memory: own op while
 * the span is in use. `writable` rejects read-only arrays. */
int ctpy_span_from(ctpy_state *state, PyObject *op, const char *what, int writable,
                   ct_span *span);

#endif
