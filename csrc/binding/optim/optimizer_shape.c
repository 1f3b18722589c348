/* The shape of a parameter, where its optimizer looks at rows and columns. */
#include "binding/optim/engine.h"

static size_t
side(int64_t length)
{
    return length > 0 ? (size_t)length : 1;
}

void
optim_set_shape(ct_optim_param *param, const int64_t *shape, int ndim)
{
    param->ndim = (size_t)ndim;
    param->cols = ndim > 0 ? side(shape[ndim - 1]) : 1;
    param->rows = ndim > 1 ? side(shape[ndim - 2]) : 1;
}

/* From the attribute, where the view knows no shape. */
static int
ask_for_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
{
    PyObject *attribute = PyObject_GetAttr(slot->data, self->state->str_shape);
    PyObject *shape = attribute == NULL ? NULL : PySequence_Tuple(attribute);
    int64_t last[2] = {1, 1};
    int result = shape == NULL ? -1 : 0;
    const Py_ssize_t ndim = shape == NULL ? 0 : PyTuple_GET_SIZE(shape);
    for (Py_ssize_t i = ndim > 2 ? ndim - 2 : 0; result == 0 && i < ndim; i++) {
        last[i - (ndim > 2 ? ndim - 2 : 0)] =
            PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        result = PyErr_Occurred() ? -1 : 0;
    }
    if (result == 0) {
        optim_set_shape(param, last, ndim > 2 ? 2 : (int)ndim);
        param->ndim = (size_t)ndim;
    }
    Py_XDECREF(shape);
    Py_XDECREF(attribute);
    return result;
}

int
optim_plan_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param,
                 const ctpy_view *view)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[slot->group];
    param->ndim = param->rows = param->cols = 1;
    if (!optim_specs[group->kind].shaped) {
        return 0;
    }
    if (view->strides != NULL) {
        PyErr_Format(
            PyExc_ValueError,
            "param_groups[%u]['params'][%zd] is transposed or channels-last in "
            "memory, and %s looks at rows and columns: make it contiguous, or "
            "use another optimizer",
            slot->group, slot->index, ct_optim_kind_name(group->kind));
        return -1;
    }
    if (view->shape == NULL) {
        return ask_for_shape(self, slot, param);
    }
    optim_set_shape(param, view->shape, view->ndim);
    return 0;
}
