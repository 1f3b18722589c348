/* The values of state[param]: the count of steps, and arrays of several shapes. */
#include "binding/optim/state.h"

#include <math.h>

int
optim_read_step(OptimEngine *self, optim_slot *slot, uint64_t *count)
{
    const ctpy_place place = {" state 'step'", slot->group, slot->index};
    ctpy_view view;
    double step = NAN;
    slot->step = NULL;
    if (PyLong_Check(slot->values[0])) {
        *count = PyLong_AsUnsignedLongLong(slot->values[0]);
        return *count == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
    }
    if (ctpy_view_of(self->state, slot->values[0], &place, &view) < 0) {
        return -1;
    }
    if (view.span.n == 1 && !view.readonly) {
        step = view.span.dtype == CT_F32   ? *(float *)view.span.data
               : view.span.dtype == CT_F64 ? *(double *)view.span.data
               : view.span.dtype == CT_I64 ? (double)*(int64_t *)view.span.data
                                           : NAN;
    }
    if (!(step >= 0.0 && step < 9007199254740992.0)) {
        PyErr_Format(PyExc_ValueError,
                     "state of param_groups[%u]['params'][%zd] has 'step' %R; expected "
                     "one float32, float64 or int64 number >= 0",
                     slot->group, slot->index, slot->values[0]);
        return -1;
    }
    slot->step = view.span.data;
    slot->step_dtype = view.span.dtype;
    *count = (uint64_t)step;
    return 0;
}

int
optim_view_like(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
                PyObject *op, const char *what, bool fp32, ctpy_view *view)
{
    const ctpy_place place = {what, slot->group, slot->index};
    ctpy_view like = *param;
    if (ctpy_view_of(self->state, op, &place, view) < 0) {
        return -1;
    }
    if (fp32 || (optim_is_half(param->span.dtype) && view->span.dtype == CT_F32)) {
        like.span.dtype = CT_F32;
    }
    return optim_check_like(slot, &like, view, what);
}

/* An array whose length follows from the parameter's shape, of the type that it is
 * computed in. */
static int
view_sized(OptimEngine *self, const optim_slot *slot, const optim_value *value,
           PyObject *op, const ct_optim_param *to, ctpy_view *view)
{
    const ctpy_place place = {value->place, slot->group, slot->index};
    const ct_dtype dtype = to->dtype == CT_F64 ? CT_F64 : CT_F32;
    const size_t all = to->part.comm != NULL ? to->part.whole : to->n;
    const size_t n = value->shape == OPTIM_ROWS   ? all / to->cols
                     : value->shape == OPTIM_COLS ? all / to->rows
                                                  : 1;
    if (ctpy_view_of(self->state, op, &place, view) < 0) {
        return -1;
    }
    if ((view->span.n == n || all == 0) && view->span.dtype == dtype &&
        view->strides == NULL) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd]%s has %zu elements of %s; expected "
                 "%zu of %s, in C order",
                 slot->group, slot->index, value->place, view->span.n,
                 ct_dtype_name(view->span.dtype), n, ct_dtype_name(dtype));
    return -1;
}

static int
view_product(OptimEngine *self, const optim_slot *slot, const optim_value *value,
             PyObject *op, ct_optim_param *to)
{
    const ctpy_place place = {value->place, slot->group, slot->index};
    ctpy_view view;
    if (ctpy_view_of(self->state, op, &place, &view) < 0) {
        return -1;
    }
    to->product = view.span.data;
    to->product_dtype = view.span.dtype;
    if (view.span.n == 1 && !view.readonly &&
        (view.span.dtype == CT_F32 || view.span.dtype == CT_F64)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd]%s is %R; expected one number of "
                 "float32 or float64",
                 slot->group, slot->index, value->place, op);
    return -1;
}

/* The arrays that the rule works on share a dtype. */
static int
check_dtype(const optim_slot *slot, const optim_value *value, ct_dtype dtype,
            ct_dtype expected)
{
    if (dtype == expected) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd]%s is %s; expected %s, as the rest of "
                 "its state is",
                 slot->group, slot->index, value->place, ct_dtype_name(dtype),
                 ct_dtype_name(expected));
    return -1;
}

/* Views slot->values[i], of whatever shape. */
static int
view_value(OptimEngine *self, const optim_slot *slot, const optim_value *value,
           const ctpy_view *param, PyObject *op, const ct_optim_param *to,
           ctpy_view *view)
{
    switch (value->shape) {
    case OPTIM_LIKE:
        return optim_view_like(self, slot, param, op, value->place, false, view);
    case OPTIM_CODED:
        return optim_view_coded(self, slot, value, param, op, view);
    default:
        return view_sized(self, slot, value, op, to, view);
    }
}

int
optim_view_values(OptimEngine *self, optim_slot *slot, const ctpy_view *param,
                  const optim_value_list *list, ct_optim_param *to)
{
    bool first = true;
    for (size_t i = list->counts ? 1 : 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        ctpy_view view;
        if (!optim_keeps(list, i)) {
            continue;
        }
        if (value->shape == OPTIM_PRODUCT) {
            if (view_product(self, slot, value, slot->values[i], to) < 0) {
                return -1;
            }
            continue;
        }
        if (view_value(self, slot, value, param, slot->values[i], to, &view) < 0 ||
            (!first &&
             check_dtype(slot, value, view.span.dtype, to->state_dtype) < 0)) {
            return -1;
        }
        const ct_dtype dtype = view.span.dtype;
        for (size_t k = 0; k < (size_t)value->n_arrays; k++) {
            to->state[(size_t)value->array + k] =
                (char *)view.span.data + k * to->n * ct_dtype_size(dtype);
        }
        to->state_dtype = dtype;
        first = false;
    }
    return to->state_dtype == CT_U8 ? optim_view_scales(self, slot, list, to) : 0;
}

/* Writes the count into the memory of a tensor. */
static void
write_step(void *step, ct_dtype dtype, uint64_t count)
{
    switch (dtype) {
    case CT_F32:
        *(float *)step = (float)count;
        break;
    case CT_F64:
        *(double *)step = (double)count;
        break;
    default:
        *(int64_t *)step = (int64_t)count;
    }
}

/* state[param]["step"], where it is an int, which its kind counts in. */
static int
replace_step(OptimEngine *self, optim_slot *slot, uint64_t count)
{
    PyObject *step = PyLong_FromUnsignedLongLong(count);
    int result =
        step == NULL ? -1 : PyDict_SetItem(slot->state, self->state->str_step, step);
    Py_XDECREF(step);
    return result;
}

int
optim_count_steps(OptimEngine *self)
{
    const ct_optim_param *params = ct_optim_params_borrow(self->core);
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        if (slot->grad == NULL) {
            continue;
        }
        slot->fresh = false;
        if (slot->step != NULL) {
            write_step(slot->step, slot->step_dtype, params[k].step);
        }
        else if (slot->values[0] != NULL && PyLong_Check(slot->values[0]) &&
                 replace_step(self, slot, params[k].step) < 0) {
            return -1;
        }
    }
    return 0;
}
