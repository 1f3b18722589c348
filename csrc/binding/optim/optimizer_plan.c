/* Which memory an update works on: parameters, gradients and state of a face.
 *
 * Identities are cached and addresses are not. The lists of param_groups and the
 * entries of `state` are compared by pointer with what they were, a few nanoseconds
 * each; every tensor is asked for its address each time, since x.data = y and .to()
 * move memory without a trace. */
#include "binding/optim/engine.h"

#include "core/base/alloc.h"

/* ---- parameters ------------------------------------------------------------------ */

static void
slot_clear(optim_slot *slot)
{
    Py_CLEAR(slot->param);
    Py_CLEAR(slot->data);
    Py_CLEAR(slot->grad);
    Py_CLEAR(slot->state);
    Py_CLEAR(slot->master);
    Py_CLEAR(slot->part.communicator);
    for (int i = 0; i < OPTIM_MAX_VALUES; i++) {
        Py_CLEAR(slot->values[i]);
    }
    slot->fresh = false;
    slot->average_known = false;
}

void
optim_drop_slots(OptimEngine *self, size_t n)
{
    while (self->n_slots > n) {
        self->n_slots--;
        slot_clear(&self->slots[self->n_slots]);
    }
}

static int
resize(OptimEngine *self, size_t n_groups, size_t n_params)
{
    ct_error err;
    void *block = self->slots;
    if (ct_grow(&block, &self->slots_capacity, n_params, sizeof *self->slots, &err) !=
        CT_OK) {
        return ctpy_raise_int(&err);
    }
    self->slots = block;
    optim_drop_slots(self, n_params);
    if (ct_optim_resize(self->core, n_groups, n_params, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    while (self->n_slots < n_params) {
        self->slots[self->n_slots++] = (optim_slot){.param = NULL};
    }
    return 0;
}

/* A parameter listed twice would be updated twice at once, by two threads. */
static int
refuse_duplicates(OptimEngine *self)
{
    int result = 0;
    PyObject *seen = PySet_New(NULL);
    for (size_t k = 0; seen != NULL && result == 0 && k < self->n_slots; k++) {
        const optim_slot *slot = &self->slots[k];
        PyObject *id = PyLong_FromVoidPtr(slot->param);
        result = id == NULL ? -1 : PySet_Contains(seen, id);
        if (result == 1) {
            PyErr_Format(PyExc_ValueError,
                         "param_groups[%u]['params'][%zd] is listed a second time: a "
                         "parameter belongs to one place in one group",
                         slot->group, slot->index);
            result = -1;
        }
        else if (result == 0) {
            result = PySet_Add(seen, id);
        }
        Py_XDECREF(id);
    }
    Py_XDECREF(seen);
    return seen == NULL ? -1 : result;
}

/* group["params"] as a new list or tuple. */
static PyObject *
group_params(OptimEngine *self, PyObject *group, size_t g)
{
    ctpy_state *state = self->state;
    PyObject *params =
        PyDict_Check(group) ? PyDict_GetItemWithError(group, state->str_params) : NULL;
    if (params == NULL || !(PyList_Check(params) || PyTuple_Check(params))) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zu] is not a dict whose 'params' is a list", g);
        }
        return NULL;
    }
    return Py_NewRef(params);
}

/* Runs no Python code. Returns the number of slots that changed. */
static size_t
fill_group(OptimEngine *self, size_t first, PyObject *params, uint32_t g)
{
    size_t changed = 0;
    PyObject **items = PySequence_Fast_ITEMS(params);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); i++) {
        optim_slot *slot = &self->slots[first + (size_t)i];
        slot->group = g;
        slot->index = i;
        if (slot->param != items[i]) {
            slot_clear(slot);
            slot->param = Py_NewRef(items[i]);
            changed++;
        }
    }
    return changed;
}

static int
count_params(OptimEngine *self, PyObject *groups, size_t *n)
{
    *n = 0;
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); g++) {
        PyObject *params = group_params(self, PyList_GET_ITEM(groups, g), (size_t)g);
        if (params == NULL) {
            return -1;
        }
        *n += (size_t)PySequence_Fast_GET_SIZE(params);
        Py_DECREF(params);
    }
    return 0;
}

static int
plan_slots(OptimEngine *self, PyObject *groups)
{
    size_t n, changed = 0, k = 0;
    if (count_params(self, groups, &n) < 0 ||
        resize(self, (size_t)PyList_GET_SIZE(groups), n) < 0) {
        return -1;
    }
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); g++) {
        PyObject *params = group_params(self, PyList_GET_ITEM(groups, g), (size_t)g);
        if (params == NULL) {
            return -1;
        }
        Py_ssize_t size = PySequence_Fast_GET_SIZE(params);
        if (k + (size_t)size > n) {
            PyErr_SetString(PyExc_RuntimeError,
                            "param_groups changed while being read");
            Py_DECREF(params);
            return -1;
        }
        changed += fill_group(self, k, params, (uint32_t)g);
        k += (size_t)size;
        Py_DECREF(params);
    }
    if (changed == 0) {
        return 0;
    }
    self->n_known = 0; /* the slots' state has to be looked up anew */
    self->parts_asked = false;
    return refuse_duplicates(self);
}

int
optim_plan_params(OptimEngine *self, PyObject *face)
{
    ctpy_state *state = self->state;
    PyObject *groups = PyObject_GetAttr(face, state->str_param_groups);
    int result = -1;
    if (groups != NULL && !PyList_Check(groups)) {
        PyErr_Format(PyExc_TypeError, "param_groups is a %.200s; expected a list",
                     Py_TYPE(groups)->tp_name);
    }
    else if (groups != NULL) {
        result = plan_slots(self, groups) < 0 ? -1 : optim_read_groups(self, groups);
    }
    Py_XDECREF(groups);
    if (result == 0 && !self->parts_asked) {
        result = optim_read_parts(self);
        self->parts_asked = result == 0;
    }
    if (result < 0) {
        optim_drop_slots(self, 0);
    }
    return result;
}

/* ---- gradients ------------------------------------------------------------------- */

/* Views slot->grad and copies its place in memory into the core's parameter. */
static int
view_grad(OptimEngine *self, optim_slot *slot, ct_optim_param *param)
{
    const ctpy_place place = {".grad", slot->group, slot->index};
    const ct_span *span = &slot->grad_view.span;
    if (ctpy_view_of(self->state, slot->grad, &place, &slot->grad_view) < 0) {
        return -1;
    }
    if (!ct_dtype_is_float(span->dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "param_groups[%u]['params'][%zd].grad has dtype %s; expected "
                     "float32, float64, bfloat16 or float16",
                     slot->group, slot->index, ct_dtype_name(span->dtype));
        return -1;
    }
    /* What is empty lies nowhere, and is a gradient all the same where it is a part. */
    param->grad = slot->part.whole != 0 && span->n == 0 ? (void *)slot : span->data;
    param->n = span->n;
    param->grad_dtype = span->dtype;
    return 0;
}

int
optim_plan_grads(OptimEngine *self)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (optim_share_presence(self) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        params[k] = (ct_optim_param){.group = slot->group};
        Py_XSETREF(slot->grad, PyObject_GetAttr(slot->param, self->state->str_grad));
        if (slot->grad == NULL) {
            return -1;
        }
        if (Py_IsNone(slot->grad)) {
            Py_CLEAR(slot->grad);
        }
        else if (view_grad(self, slot, &params[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- operands: parameters and state of every slot with a gradient -----------------
 */

/* n integers as a tuple; () where there are none to show. */
static PyObject *
tuple_of(const int64_t *values, int n)
{
    PyObject *tuple = PyTuple_New(values == NULL ? 0 : n);
    for (int i = 0; tuple != NULL && values != NULL && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
        }
        else {
            PyTuple_SET_ITEM(tuple, i, value);
        }
    }
    return tuple;
}

static PyObject *
describe(const ctpy_view *view)
{
    const char *dtype = ct_dtype_name(view->span.dtype);
    PyObject *text = NULL, *shape = tuple_of(view->shape, view->ndim);
    PyObject *strides = shape == NULL ? NULL : tuple_of(view->strides, view->ndim);
    if (strides != NULL) {
        text = view->strides == NULL ? PyUnicode_FromFormat("%s %R", dtype, shape)
                                     : PyUnicode_FromFormat("%s %R with strides %R",
                                                            dtype, shape, strides);
    }
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return text;
}

/* Checks that `what` of the slot, seen as view, is like its parameter. */
int
optim_check_like(const optim_slot *slot, const ctpy_view *param, const ctpy_view *view,
                 const char *what)
{
    if (ctpy_view_matches(param, view)) {
        return 0;
    }
    PyObject *got = describe(view);
    PyObject *expected = got == NULL ? NULL : describe(param);
    if (expected != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%u]['params'][%zd]%s is %U; expected %U, as its "
                     "parameter is",
                     slot->group, slot->index, what, got, expected);
    }
    Py_XDECREF(expected);
    Py_XDECREF(got);
    return -1;
}

/* A torch parameter is its own data; a NumPy parameter has an array in .data. */
static int
find_data(ctpy_state *state, optim_slot *slot)
{
    PyTypeObject *type = Py_TYPE(slot->param);
    PyObject *data;
    if ((PyObject *)type == state->torch_parameter ||
        (PyObject *)type == state->torch_tensor ||
        (state->torch_tensor != NULL &&
         PyType_IsSubtype(type, (PyTypeObject *)state->torch_tensor))) {
        data = Py_NewRef(slot->param);
    }
    else {
        data = PyObject_GetAttr(slot->param, state->str_data);
    }
    Py_XSETREF(slot->data, data);
    return data == NULL ? -1 : 0;
}

static int
view_param(OptimEngine *self, optim_slot *slot, ctpy_view *view)
{
    const ctpy_place place = {"", slot->group, slot->index};
    if (find_data(self->state, slot) < 0 ||
        ctpy_view_of(self->state, slot->data, &place, view) < 0 ||
        optim_check_like(slot, view, &slot->grad_view, ".grad") < 0) {
        return -1;
    }
    if (view->readonly) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%u]['params'][%zd] is a read-only array; expected "
                     "one that can be written",
                     slot->group, slot->index);
        return -1;
    }
    return 0;
}

int
optim_plan_operands(OptimEngine *self, PyObject *face)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (optim_sync_state(self, face) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        ctpy_view view;
        if (slot->grad == NULL) {
            continue;
        }
        if (view_param(self, slot, &view) < 0) {
            return -1;
        }
        params[k].param = view.span.data;
        params[k].dtype = view.span.dtype;
        if (optim_plan_shape(self, slot, &params[k], &view) < 0 ||
            optim_plan_part(self, slot, &params[k]) < 0) {
            return -1;
        }
        if (optim_plan_state(self, face, slot, &params[k], &view) < 0 ||
            (self->averages && optim_plan_average(self, k, &params[k], &view) < 0)) {
            return -1;
        }
    }
    return optim_remember_state(self, face);
}
