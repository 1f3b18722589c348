/* The state of parameters: the dict state[param] in torch's own layout, so that
 * state_dict() of either side loads into the other.
 *
 * Identities are cached, addresses are not: the entries of `state` are compared by
 * pointer, a few nanoseconds each, while every tensor reports its address at each
 * update, since x.data = y and .to() move memory without a trace. Updates ask the same
 * tensors in the same order, and most of a thousand are not in the processor's caches:
 * they are prefetched in the order of the last update, as the locked instructions of
 * torch's reference counts keep the processor from loading several at once itself. */
#include "binding/optim/engine.h"

#include "core/base/alloc.h"
#include "math/compact.h"

#include <math.h>

/* ---- views of a slot's arrays ---------------------------------------------------- */

static bool
is_half(ct_dtype dtype)
{
    return dtype == CT_BF16 || dtype == CT_F16;
}

int
optim_fail(PyObject *type, const optim_slot *slot, const char *what, const char *format,
           ...)
{
    va_list args;
    va_start(args, format);
    PyObject *text = PyUnicode_FromFormatV(format, args);
    va_end(args);
    if (text != NULL) {
        PyErr_Format(type, "param_groups[%u]['params'][%zd]%s %U", slot->group,
                     slot->index, what, text);
        Py_DECREF(text);
    }
    return -1;
}

/* Without memory for the list nothing is prefetched. */
static void
note_view(OptimEngine *self, const void *object, const void *shape)
{
    void *block = self->viewed;
    const size_t at = self->views++;
    if (ct_grow(&block, &self->viewed_capacity, at + 1, sizeof *self->viewed, NULL) ==
        CT_OK) {
        self->viewed = block;
        self->viewed[at] = (optim_viewed){object, shape};
        self->n_viewed = at < self->n_viewed ? self->n_viewed : at + 1;
    }
}

static void
prefetch_views(const OptimEngine *self)
{
    enum {
        AHEAD = 8 /* two parameters with their state: about a microsecond */
    };
    const size_t next = self->views + AHEAD;
    if (next < self->n_viewed) {
        ctpy_prefetch_tensor(self->viewed[next].object, self->viewed[next].shape);
    }
}

int
optim_view(OptimEngine *self, const optim_slot *slot, const char *what, PyObject *op,
           ctpy_view *view)
{
    const ctpy_place place = {what, slot->group, slot->index};
    prefetch_views(self);
    if (ctpy_view_anywhere(self->state, op, &place, view) < 0) {
        return -1;
    }
    note_view(self, op, view->shape);
    if (ctpy_target_has(&self->target, view)) {
        return 0;
    }
    if (self->target.memory == CTPY_DL_CPU) {
        return ctpy_reject_device(self->state, op, &place);
    }
    return optim_fail(PyExc_ValueError, slot, what,
                      "is not on %s %d, where the first gradient is: keep the "
                      "parameters of an optimizer, their gradients and state on one "
                      "device, or use torch.optim",
                      self->target.device->name, self->target.ordinal);
}

/* Views op, which is `what` of the slot in messages, in the host's memory, where single
 * numbers are. */
static int
view_on_host(OptimEngine *self, const optim_slot *slot, const char *what, PyObject *op,
             ctpy_view *view)
{
    const ctpy_place place = {what, slot->group, slot->index};
    prefetch_views(self);
    if (ctpy_view_of(self->state, op, &place, view) < 0) {
        return -1;
    }
    note_view(self, op, view->shape);
    return 0;
}

static PyObject *
describe(const ctpy_view *view)
{
    const char *dtype = ct_dtype_name(view->span.dtype);
    PyObject *text = NULL, *shape = ctpy_int64_tuple(view->shape, view->ndim);
    PyObject *strides =
        shape == NULL ? NULL : ctpy_int64_tuple(view->strides, view->ndim);
    if (strides != NULL) {
        text = view->strides == NULL ? PyUnicode_FromFormat("%s %R", dtype, shape)
                                     : PyUnicode_FromFormat("%s %R with strides %R",
                                                            dtype, shape, strides);
    }
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return text;
}

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
        (void)optim_fail(PyExc_ValueError, slot, what,
                         "is %U; expected %U, as its parameter is", got, expected);
    }
    Py_XDECREF(expected);
    Py_XDECREF(got);
    return -1;
}

/* Views one array of a parameter: of the parameter's shape and order, and of its dtype
 * or, beside a bf16 or fp16 parameter, of fp32. */
static int
view_like(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
          PyObject *op, const char *what, bool fp32, ctpy_view *view)
{
    ctpy_view like = *param;
    if (optim_view(self, slot, what, op, view) < 0) {
        return -1;
    }
    if (fp32 || (is_half(param->span.dtype) && view->span.dtype == CT_F32)) {
        like.span.dtype = CT_F32;
    }
    return optim_check_like(slot, &like, view, what);
}

/* ---- state[param], found by walking the dict ------------------------------------- */

/* Has the wrapper's state other keys or values than when slots[].state was set? A walk
 * costs 3 ns an entry, a look-up a call of Tensor.__hash__. */
static bool
state_changed(const OptimEngine *self, PyObject *state)
{
    Py_ssize_t position = 0;
    PyObject *key, *value;
    size_t i = 0;
    if ((size_t)PyDict_GET_SIZE(state) != self->n_known) {
        return true;
    }
    while (PyDict_Next(state, &position, &key, &value)) {
        if (self->known[i].key != key || self->known[i].value != value) {
            return true;
        }
        i++;
    }
    return false;
}

static int
remember_state(OptimEngine *self, PyObject *state)
{
    ct_error err;
    size_t n = (size_t)PyDict_GET_SIZE(state);
    void *block = self->known;
    if (ct_grow(&block, &self->known_capacity, n, sizeof *self->known, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    self->known = block;
    self->n_known = 0;
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(state, &position, &key, &value)) {
        self->known[self->n_known++] = (optim_entry){key, value};
    }
    return 0;
}

static int
find_states(OptimEngine *self, PyObject *state)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        PyObject *entry = PyDict_GetItemWithError(state, slot->param);
        if (entry == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (entry != NULL && !PyDict_Check(entry)) {
            PyErr_Format(PyExc_TypeError,
                         "state of param_groups[%u]['params'][%zd] is a %.200s; "
                         "expected a dict",
                         slot->group, slot->index, Py_TYPE(entry)->tp_name);
            return -1;
        }
        Py_XSETREF(slot->state, Py_XNewRef(entry));
    }
    return remember_state(self, state);
}

static PyObject *
wrapper_state(OptimEngine *self, PyObject *wrapper)
{
    PyObject *state = PyObject_GetAttr(wrapper, self->state->str_state);
    if (state != NULL && !PyDict_Check(state)) {
        PyErr_Format(PyExc_TypeError, "state is a %.200s; expected a dict",
                     Py_TYPE(state)->tp_name);
        Py_CLEAR(state);
    }
    return state;
}

int
optim_sync_state(OptimEngine *self, PyObject *wrapper)
{
    PyObject *state = wrapper_state(self, wrapper);
    int result = state == NULL                ? -1
                 : state_changed(self, state) ? find_states(self, state)
                                              : 0;
    if (result < 0) {
        self->n_known = 0;
    }
    Py_XDECREF(state);
    return result;
}

int
optim_remember_state(OptimEngine *self, PyObject *wrapper)
{
    PyObject *state = self->n_known > 0 ? NULL : wrapper_state(self, wrapper);
    int result = state != NULL      ? remember_state(self, state)
                 : PyErr_Occurred() ? -1
                                    : 0;
    Py_XDECREF(state);
    return result;
}

/* ---- making state ---------------------------------------------------------------- */

/* Adds the entries of `made` to state[param], which becomes slot->state. */
static int
add_state(OptimEngine *self, PyObject *wrapper, optim_slot *slot, PyObject *made)
{
    PyObject *state = wrapper_state(self, wrapper), *entry = NULL;
    int result = -1;
    if (state != NULL) {
        entry = PyObject_GetItem(state, slot->param); /* a defaultdict makes it */
    }
    if (entry != NULL && !PyDict_Check(entry)) {
        PyErr_Format(PyExc_TypeError, "state[param] is a %.200s; expected a dict",
                     Py_TYPE(entry)->tp_name);
    }
    else if (entry != NULL && PyDict_Update(entry, made) == 0) {
        Py_XSETREF(slot->state, Py_NewRef(entry));
        self->n_known = 0;
        result = 0;
    }
    Py_XDECREF(entry);
    Py_XDECREF(state);
    return result;
}

/* wrapper.param_groups[g], owned. */
static PyObject *
wrapper_group(OptimEngine *self, PyObject *wrapper, uint32_t g)
{
    PyObject *groups = PyObject_GetAttr(wrapper, self->state->str_param_groups);
    PyObject *group = NULL;
    if (groups != NULL && PyList_Check(groups) && g < (size_t)PyList_GET_SIZE(groups)) {
        group = Py_NewRef(PyList_GET_ITEM(groups, (Py_ssize_t)g));
    }
    else if (groups != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "param_groups changed while being read");
    }
    Py_XDECREF(groups);
    return group;
}

/* state[param].update(wrapper._new_state(like, group)): like is the parameter or, for
 * state of higher precision, an fp32 copy. */
static int
make_state(OptimEngine *self, PyObject *wrapper, optim_slot *slot, PyObject *like)
{
    PyObject *args[] = {like, wrapper_group(self, wrapper, slot->group)};
    PyObject *made =
        args[1] == NULL ? NULL
                        : ctpy_call_hook(wrapper, self->state->str__new_state, args, 2);
    Py_XDECREF(args[1]);
    if (made != NULL && !PyDict_Check(made)) {
        PyErr_Format(PyExc_TypeError, "_new_state() returned a %.200s; expected a dict",
                     Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    int result = made == NULL ? -1 : add_state(self, wrapper, slot, made);
    slot->fresh = result == 0;
    Py_XDECREF(made);
    return result;
}

static int
keep_master(OptimEngine *self, PyObject *wrapper, optim_slot *slot, PyObject *master)
{
    PyObject *made = PyDict_New();
    int result =
        made == NULL ? -1 : PyDict_SetItem(made, self->state->str_master_param, master);
    if (result == 0) {
        result = add_state(self, wrapper, slot, made);
    }
    Py_XDECREF(made);
    return result;
}

/* state[param]["master_param"] as slot->master; NULL before the first update. */
static int
find_master(OptimEngine *self, optim_slot *slot)
{
    PyObject *found =
        slot->state == NULL
            ? NULL
            : PyDict_GetItemWithError(slot->state, self->state->str_master_param);
    Py_XSETREF(slot->master, Py_XNewRef(found));
    return PyErr_Occurred() ? -1 : 0;
}

/* Makes the state if `lacks`, and the master copy if `master` and there is none. */
static int
make_missing(OptimEngine *self, PyObject *wrapper, optim_slot *slot, int lacks,
             bool master, bool wide)
{
    PyObject *copy = NULL;
    int result = 0;
    if (master && find_master(self, slot) < 0) {
        return -1;
    }
    const bool new_master = master && slot->master == NULL;
    if (self->capturing && (lacks || new_master)) {
        return optim_fail(PyExc_ValueError, slot, " state",
                          "is missing, and a graph cannot make it: call step() once "
                          "before the capture");
    }
    if (new_master || (lacks && wide)) {
        copy = slot->master != NULL
                   ? Py_NewRef(slot->master)
                   : ctpy_call_hook(wrapper, self->state->str__new_master, &slot->param,
                                    1);
        result = copy == NULL ? -1 : 0;
    }
    if (result == 0 && lacks) {
        result = make_state(self, wrapper, slot, wide ? copy : slot->param);
    }
    if (result == 0 && new_master) {
        result = keep_master(self, wrapper, slot, copy);
        Py_XSETREF(slot->master, Py_NewRef(copy));
    }
    Py_XDECREF(copy);
    return result;
}

/* ---- values of state[param] ------------------------------------------------------ */

/* The values in state[param] by the slot's kind; bit i of `kept`: this slot has value
 * i.
 */
typedef struct value_list {
    const optim_spec *spec;
    unsigned kept;
    bool counts; /* values[0] is the count of steps */
} value_list;

static bool
keeps(const value_list *list, size_t i)
{
    return (list->kept >> i & 1) != 0;
}

/* Does a bfloat16 parameter have the corrections of a 24-bit master weight? */
static bool
is_corrected(const ct_optim_group *group, ct_dtype dtype)
{
    return dtype == CT_BF16 && group->master_weight_bits == 24.0;
}

static value_list
kept_values(OptimEngine *self, uint32_t g, const ct_optim_param *param)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[g];
    const unsigned states = ct_optim_arrays(group, param);
    value_list list = {.spec = &optim_specs[group->kind]};
    for (size_t i = 0; i < list.spec->n_values; i++) {
        const int array = list.spec->values[i].array;
        const ct_state_shape shape = list.spec->values[i].shape;
        if (shape == CT_STATE_SCALES || shape == CT_STATE_MAP) {
            continue; /* read with quantized state alone */
        }
        const bool kept = shape == CT_STATE_CORRECTION
                              ? is_corrected(group, param->dtype)
                              : array < 0 || (states >> array & 1) != 0;
        list.kept |= (unsigned)kept << i;
    }
    list.counts = list.spec->n_values > 0 && list.spec->values[0].array < 0;
    return list;
}

static bool
is_compact(const value_list *list)
{
    return list->spec->n_values > 1 && list->spec->values[1].shape == CT_STATE_COMPACT;
}

static PyObject *
value_key(const ctpy_state *state, const value_list *list, size_t i)
{
    return optim_key_borrow(state, list->spec, list->spec->n_fields + i);
}

/* Has state to be made? torch.optim.AdamW starts from an empty entry, torch.optim.SGD
 * also from a buffer of None, as in its old state_dicts. A master copy may be all state
 * so far. An entry with other names is another optimizer's, and raises when it is read.
 */
static int
lacks_state(const ctpy_state *state, const optim_slot *slot, const value_list *list)
{
    if (slot->state == NULL || PyDict_GET_SIZE(slot->state) == 0) {
        return 1;
    }
    if (list->counts) {
        return 0;
    }
    PyObject *name = value_key(state, list, 0);
    PyObject *value = PyDict_GetItemWithError(slot->state, name);
    if (value != NULL || PyErr_Occurred()) {
        return value == NULL ? -1 : Py_IsNone(value);
    }
    const int has_master = PyDict_Contains(slot->state, state->str_master_param);
    return has_master < 0 ? -1 : PyDict_GET_SIZE(slot->state) == has_master;
}

/* state[param][name of values[i]] as slot->values[i]. */
static int
read_value(const ctpy_state *state, optim_slot *slot, const value_list *list, size_t i)
{
    PyObject *name = value_key(state, list, i);
    PyObject *value = PyDict_GetItemWithError(slot->state, name);
    if (value == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError,
                         "state of param_groups[%u]['params'][%zd] has no %R: "
                         "delete the entry to start it anew, or load a whole one",
                         slot->group, slot->index, name);
        }
        return -1;
    }
    if (slot->values[i] != value) {
        if (list->spec->values[i].shape == CT_STATE_MAP) {
            slot->maps_checked = false;
        }
        Py_XSETREF(slot->values[i], Py_NewRef(value));
    }
    return 0;
}

static int
read_values(const ctpy_state *state, optim_slot *slot, const value_list *list)
{
    int result = 0;
    for (size_t i = 0; result == 0 && i < list->spec->n_values; i++) {
        result = keeps(list, i) ? read_value(state, slot, list, i) : 0;
    }
    return result;
}

/* ---- the count of updates -------------------------------------------------------- */

/* The count of steps in slot->values[0]: a tensor or array of one number, or an int. */
static int
read_step(OptimEngine *self, optim_slot *slot, uint64_t *count)
{
    ctpy_view view;
    double step = NAN;
    slot->step = NULL;
    if (PyLong_Check(slot->values[0])) {
        *count = PyLong_AsUnsignedLongLong(slot->values[0]);
        return *count == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
    }
    if (view_on_host(self, slot, " state 'step'", slot->values[0], &view) < 0) {
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

/* Replaces state[param]["step"] where it is an int. */
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
        if (params[k].grad == NULL) {
            continue;
        }
        slot->fresh = params[k].step == 0;
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

/* ---- arrays of state ------------------------------------------------------------- */

/* An array with a length by the parameter's shape, of the dtype of the computation. */
static int
view_sized(OptimEngine *self, const optim_slot *slot, const optim_value *value,
           PyObject *op, const ct_optim_param *to, ctpy_view *view)
{
    const ct_dtype dtype = to->dtype == CT_F64 ? CT_F64 : CT_F32;
    const size_t all = to->part.comm != NULL ? to->part.whole : to->n;
    const size_t n = value->shape == CT_STATE_ROWS   ? all / to->cols
                     : value->shape == CT_STATE_COLS ? all / to->rows
                                                     : 1;
    if (optim_view(self, slot, value->place, op, view) < 0) {
        return -1;
    }
    if ((view->span.n == n || all == 0) && view->span.dtype == dtype &&
        view->strides == NULL) {
        return 0;
    }
    return optim_fail(PyExc_ValueError, slot, value->place,
                      "has %zu elements of %s; expected "
                      "%zu of %s, in C order",
                      view->span.n, ct_dtype_name(view->span.dtype), n,
                      ct_dtype_name(dtype));
}

static int
view_product(OptimEngine *self, const optim_slot *slot, const optim_value *value,
             PyObject *op, ct_optim_param *to)
{
    ctpy_view view;
    if (view_on_host(self, slot, value->place, op, &view) < 0) {
        return -1;
    }
    to->product = view.span.data;
    to->product_dtype = view.span.dtype;
    if (view.span.n == 1 && !view.readonly &&
        (view.span.dtype == CT_F32 || view.span.dtype == CT_F64)) {
        return 0;
    }
    return optim_fail(PyExc_ValueError, slot, value->place,
                      "is %R; expected one number of "
                      "float32 or float64",
                      op);
}

/* The arrays that the rule works on share a dtype. */
static int
check_dtype(const optim_slot *slot, const optim_value *value, ct_dtype dtype,
            ct_dtype expected)
{
    if (dtype == expected) {
        return 0;
    }
    return optim_fail(PyExc_ValueError, slot, value->place,
                      "is %s; expected %s, as the rest of "
                      "its state is",
                      ct_dtype_name(dtype), ct_dtype_name(expected));
}

/* Several arrays in one tensor, with one more dimension in front. */
static int
check_stacked(const optim_slot *slot, const optim_value *value, const ctpy_view *param,
              const ctpy_view *view)
{
    const size_t n = param->span.n * (size_t)value->n_arrays;
    if (view->span.n == n && view->strides == NULL && param->strides == NULL) {
        return 0;
    }
    return optim_fail(
        PyExc_ValueError, slot, value->place,
        "has %zu elements for a parameter "
        "of %zu; expected %zu, both in C order: make the parameter contiguous",
        view->span.n, param->span.n, n);
}

/* Views state that may be quantized. */
static int
view_quantized(OptimEngine *self, const optim_slot *slot, const optim_value *value,
               const ctpy_view *param, PyObject *op, ctpy_view *view)
{
    ctpy_view like = *param;
    if (optim_view(self, slot, value->place, op, view) < 0) {
        return -1;
    }
    if (value->n_arrays > 1) {
        return check_stacked(slot, value, param, view);
    }
    const ct_dtype dtype = view->span.dtype;
    if (dtype == CT_U8 || (dtype == CT_F32 && is_half(param->span.dtype))) {
        like.span.dtype = dtype;
    }
    return optim_check_like(slot, &like, view, value->place);
}

/* Views slot->values[i], of whatever shape. */
static int
view_value(OptimEngine *self, const optim_slot *slot, const optim_value *value,
           const ctpy_view *param, PyObject *op, const ct_optim_param *to,
           ctpy_view *view)
{
    switch (value->shape) {
    case CT_STATE_LIKE:
        return view_like(self, slot, param, op, value->place, false, view);
    case CT_STATE_QUANTIZED:
        return view_quantized(self, slot, value, param, op, view);
    default:
        return view_sized(self, slot, value, op, to, view);
    }
}

/* A list of n numbers. */
static int
view_numbers(OptimEngine *self, const optim_slot *slot, size_t i,
             const optim_value *value, size_t n, ct_dtype dtype, ctpy_view *view)
{
    if (optim_view(self, slot, value->place, slot->values[i], view) < 0) {
        return -1;
    }
    if (view->span.n == n && view->span.dtype == dtype && view->strides == NULL) {
        return 0;
    }
    return optim_fail(PyExc_ValueError, slot, value->place,
                      "has %zu elements of %s; expected "
                      "%zu of %s",
                      view->span.n, ct_dtype_name(view->span.dtype), n,
                      ct_dtype_name(dtype));
}

/* The search for the nearest number needs an ascending order. Reading it waits for a
 * GPU: a map is read there once. */
static int
check_map(OptimEngine *self, const optim_slot *slot, const optim_value *value,
          const float *map)
{
    float copy[CT_QUANT_MAP_SIZE];
    if (self->target.memory != CTPY_DL_CPU) {
        ct_error err;
        if (slot->maps_checked) {
            return 0;
        }
        if (self->target.device->transfer(self->target.stream, copy, map, sizeof copy,
                                          &err) != CT_OK) {
            return ctpy_raise_int(&err);
        }
        map = copy;
    }
    for (size_t i = 1; i < CT_QUANT_MAP_SIZE; i++) {
        if (!(map[i - 1] <= map[i])) {
            return optim_fail(PyExc_ValueError, slot, value->place,
                              "is not in ascending order "
                              "at element %zu",
                              i);
        }
    }
    return 0;
}

/* The maps and the scales of quantized state. */
static int
view_scales(OptimEngine *self, optim_slot *slot, const value_list *list,
            ct_optim_param *to)
{
    const size_t n_blocks = (to->n + CT_QUANT_BLOCK - 1) / CT_QUANT_BLOCK;
    for (size_t i = 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        const bool is_map = value->shape == CT_STATE_MAP;
        const size_t n_arrays = (size_t)value->n_arrays;
        ctpy_view view;
        if (!is_map && value->shape != CT_STATE_SCALES) {
            continue;
        }
        if (read_value(self->state, slot, list, i) < 0 ||
            view_numbers(self, slot, i, value,
                         is_map ? CT_QUANT_MAP_SIZE : n_blocks * n_arrays, CT_F32,
                         &view) < 0 ||
            (is_map && check_map(self, slot, value, view.span.data) < 0)) {
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
    slot->maps_checked = true;
    return 0;
}

/* The arrays and the scales of compact state, and the corrections. */
static int
view_compact(OptimEngine *self, optim_slot *slot, const ctpy_view *param,
             const value_list *list, ct_optim_param *to)
{
    const size_t n_groups = (to->n + CT_COMPACT_GROUP - 1) / CT_COMPACT_GROUP;
    for (size_t i = 1; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        ctpy_view view, like = *param;
        like.span.dtype = value->array == 1 ? CT_U8 : CT_I8;
        if (!keeps(list, i)) {
            continue;
        }
        if (value->shape == CT_STATE_GROUPS) {
            if (view_numbers(self, slot, i, value, n_groups, CT_F16, &view) < 0) {
                return -1;
            }
            to->quant[value->array].scales = view.span.data;
            continue;
        }
        if (optim_view(self, slot, value->place, slot->values[i], &view) < 0 ||
            optim_check_like(slot, &like, &view, value->place) < 0) {
            return -1;
        }
        if (value->shape == CT_STATE_CORRECTION) {
            to->correction = view.span.data;
        }
        else {
            to->state[value->array] = view.span.data;
        }
    }
    to->state_dtype = CT_I8;
    return 0;
}

/* Every array of slot->values in the list, as the core's state. */
static int
view_values(OptimEngine *self, optim_slot *slot, const ctpy_view *param,
            const value_list *list, ct_optim_param *to)
{
    bool first = true;
    if (is_compact(list)) {
        return view_compact(self, slot, param, list, to);
    }
    for (size_t i = list->counts ? 1 : 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        ctpy_view view;
        if (!keeps(list, i)) {
            continue;
        }
        if (value->shape == CT_STATE_PRODUCT) {
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
    return to->state_dtype == CT_U8 ? view_scales(self, slot, list, to) : 0;
}

/* ---- one parameter's state ------------------------------------------------------- */

/* Has the core update the master copy and write it rounded to the parameter. */
static int
use_master(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
           ct_optim_param *to)
{
    ctpy_view view;
    if (view_like(self, slot, param, slot->master, " state 'master_param'", true,
                  &view) < 0) {
        return -1;
    }
    to->copy = to->param;
    to->copy_dtype = to->dtype;
    to->param = view.span.data;
    to->dtype = CT_F32;
    return 0;
}

static int
check_rounding(const ct_optim_group *group, const optim_slot *slot, ct_dtype dtype)
{
    if (!group->stochastic || dtype != CT_F16) {
        return 0;
    }
    return optim_fail(PyExc_ValueError, slot, "",
                      "is float16 and its group has "
                      "stochastic_rounding, which is for bfloat16: use bfloat16, or "
                      "master_weights=True");
}

/* What does not go with compact state. */
static int
check_compact(const ct_optim_group *group, const optim_slot *slot, ct_dtype dtype)
{
    const bool corrected = group->master_weight_bits == 24.0;
    const char *reason =
        dtype == CT_F64 ? "is float64, and compact state is computed in float32: give "
                          "it to another optimizer"
        : group->master_weights || group->fp32_state
            ? "has master_weights or fp32_state in its group, and its state is "
              "compact: "
              "master_weight_bits=24 keeps what bfloat16 cannot hold"
        : corrected && dtype == CT_F16
            ? "is float16, and master_weight_bits=24 is for bfloat16: use bfloat16, or "
              "master_weight_bits=None"
        : is_corrected(group, dtype) && group->stochastic
            ? "has stochastic_rounding and master_weight_bits=24 in its group, whose "
              "correction is of the nearest bfloat16: choose one"
            : NULL;
    return reason == NULL ? 0 : optim_fail(PyExc_ValueError, slot, "", "%s", reason);
}

int
optim_plan_state(OptimEngine *self, PyObject *wrapper, optim_slot *slot,
                 ct_optim_param *param, const ctpy_view *view)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[slot->group];
    const bool half = is_half(view->span.dtype);
    const bool master = half && group->master_weights;
    const value_list list = kept_values(self, slot->group, param);
    uint64_t count = 0;
    slot->step = NULL;
    if (check_rounding(group, slot, view->span.dtype) < 0 ||
        (is_compact(&list) && check_compact(group, slot, view->span.dtype) < 0)) {
        return -1;
    }
    int lacks = list.kept == 0 ? 0 : lacks_state(self->state, slot, &list);
    if (lacks < 0 ||
        ((lacks || master) &&
         make_missing(self, wrapper, slot, lacks, master,
                      half && (master || group->fp32_state)) < 0) ||
        (master && use_master(self, slot, view, param) < 0)) {
        return -1;
    }
    if (list.kept == 0) {
        return 0;
    }
    if (read_values(self->state, slot, &list) < 0 ||
        (list.counts && read_step(self, slot, &count) < 0) ||
        view_values(self, slot, view, &list, param) < 0) {
        return -1;
    }
    /* A kind without a count of its own asks only whether this is the first time. */
    param->step = list.counts ? count : !slot->fresh;
    return 0;
}
