/* A tensor or an array as the engine sees it, for the binding's own files. */
#ifndef CTPY_BUFFER_H
#define CTPY_BUFFER_H

#include "binding/ctpy.h"
#include "core/ct_span.h"

/* Contiguous host memory of a tensor or array, borrowed from it. shape is NULL where
 * only the number of elements is known (torch before 2.10). */
typedef struct ctpy_view {
    ct_span span;
    int ndim;
    const int64_t *shape;
    int readonly;
} ctpy_view;

/* Where an object was found, for error messages: "what" alone, or with group >= 0
 * param_groups[group]['params'][index] and then what, ".grad" for example. */
typedef struct ctpy_place {
    const char *what;
    Py_ssize_t group, index;
} ctpy_place;

/* Fills *view from an exact torch.Tensor, torch.nn.Parameter or numpy.ndarray. -1 with
 * an exception that names the place. */
int ctpy_view_of(ctpy_state *state, PyObject *op, const ctpy_place *place,
                 ctpy_view *view);

/* 1 when both have the same dtype and shape, as far as the shapes are known. */
int ctpy_view_matches(const ctpy_view *a, const ctpy_view *b);

/* "param_groups[0]['params'][3].grad" as a new string. */
PyObject *ctpy_place_text(const ctpy_place *place);

#endif
