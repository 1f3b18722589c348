/* State of 8 bits in state[param]: codes, the map that says what they mean, and the
 * scales of their blocks. See math/quant.h. */
#include "binding/optim/state.h"

/* Arrays one behind the other, as a tensor with one more dimension in front. */
static int
check_stacked(const optim_slot *slot, const optim_value *value, const ctpy_view *param,
              const ctpy_view *view)
{
    const size_t n = param->span.n * (size_t)value->n_arrays;
    if (view->span.n == n && view->strides == NULL && param->strides == NULL) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd]%s has %zu elements for a parameter "
                 "of %zu; expected %zu, both in C order: make the parameter contiguous",
                 slot->group, slot->index, value->place, view->span.n, param->span.n,
                 n);
    return -1;
}

int
optim_view_coded(OptimEngine *self, const optim_slot *slot, const optim_value *value,
                 const ctpy_view *param, PyObject *op, ctpy_view *view)
{
    const ctpy_place place = {value->place, slot->group, slot->index};
    ctpy_view like = *param;
    if (ctpy_view_of(self->state, op, &place, view) < 0) {
        return -1;
    }
    if (value->n_arrays > 1) {
        return check_stacked(slot, value, param, view);
    }
    const ct_dtype dtype = view->span.dtype;
    if (dtype == CT_U8 || (dtype == CT_F32 && optim_is_half(param->span.dtype))) {
        like.span.dtype = dtype;
    }
    return optim_check_like(slot, &like, view, value->place);
}

/* A list of n numbers of float32. */
static int
view_numbers(OptimEngine *self, const optim_slot *slot, size_t i,
             const optim_value *value, size_t n, ctpy_view *view)
{
    const ctpy_place place = {value->place, slot->group, slot->index};
    if (ctpy_view_of(self->state, slot->values[i], &place, view) < 0) {
        return -1;
    }
    if (view->span.n == n && view->span.dtype == CT_F32 && view->strides == NULL) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd]%s has %zu elements of %s; expected "
                 "%zu of float32",
                 slot->group, slot->index, value->place, view->span.n,
                 ct_dtype_name(view->span.dtype), n);
    return -1;
}

/* The search for the nearest number needs them in order. */
static int
check_map(const optim_slot *slot, const optim_value *value, const float *map)
{
    for (size_t i = 1; i < CT_QUANT_CODES; i++) {
        if (!(map[i - 1] <= map[i])) {
            PyErr_Format(PyExc_ValueError,
                         "param_groups[%u]['params'][%zd]%s is not in ascending order "
                         "at element %zu",
                         slot->group, slot->index, value->place, i);
            return -1;
        }
    }
    return 0;
}

int
optim_view_scales(OptimEngine *self, optim_slot *slot, const optim_value_list *list,
                  ct_optim_param *to)
{
    const size_t n_blocks = (to->n + CT_QUANT_BLOCK - 1) / CT_QUANT_BLOCK;
    for (size_t i = 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        const bool is_map = value->shape == OPTIM_MAP;
        const size_t n_arrays = (size_t)value->n_arrays;
        ctpy_view view;
        if (!is_map && value->shape != OPTIM_SCALES) {
            continue;
        }
        if (optim_read_value(self->state, slot, list, i) < 0 ||
            view_numbers(self, slot, i, value,
                         is_map ? CT_QUANT_CODES : n_blocks * n_arrays, &view) < 0 ||
            (is_map && check_map(slot, value, view.span.data) < 0)) {
            return -1;
        }
        for (size_t k = 0; k < n_arrays; k++) {
            ct_quant *quant = &to->quant[(size_t)value->array + k];
            if (is_map) {
                quant->map = view.span.data;
            }
            else {
                quant->absmax = (float *)view.span.data + k * n_blocks;
            }
        }
    }
    return 0;
}
