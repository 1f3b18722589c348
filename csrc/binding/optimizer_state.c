/* The state of each parameter: the dict state[param] in torch's own layout, so that
 * state_dict() of either side loads into the other. */
#include "binding/optimizer.h"

#include "core/ct_alloc.h"

#include <math.h>

/* ---- state[param], found by walking the dict --------------------------------------
 */

/* Has the face's state other keys or values than when slots[].state was set? Walking
 * costs 3 ns an entry; looking one up costs a call of Tensor.__hash__. */
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
face_state(OptimEngine *self, PyObject *face)
{
    PyObject *state = PyObject_GetAttr(face, self->state->str_state);
    if (state != NULL && !PyDict_Check(state)) {
        PyErr_Format(PyExc_TypeError, "state is a %.200s; expected a dict",
                     Py_TYPE(state)->tp_name);
        Py_CLEAR(state);
    }
    return state;
}

int
optim_sync_state(OptimEngine *self, PyObject *face)
{
    PyObject *state = face_state(self, face);
    int result = state == NULL                ? -1
                 : state_changed(self, state) ? find_states(self, state)
                                              : 0;
    if (result < 0) {
        self->n_known = 0;
    }
    Py_XDECREF(state);
    return result;
}

/* ---- making it ---------------------------------------------------------------------
 */

/* Adds the entries of `made` to state[param], and keeps that as slot->state. */
static int
add_state(OptimEngine *self, PyObject *face, optim_slot *slot, PyObject *made)
{
    PyObject *state = face_state(self, face), *entry = NULL;
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

/* face.param_groups[g], owned. */
static PyObject *
face_group(OptimEngine *self, PyObject *face, uint32_t g)
{
    PyObject *groups = PyObject_GetAttr(face, self->state->str_param_groups);
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

/* state[param].update(face._new_state(like, group)): like is the parameter or, where
 * its state is to be of higher precision, an fp32 copy of it. */
static int
make_state(OptimEngine *self, PyObject *face, optim_slot *slot, PyObject *like)
{
    PyObject *args[] = {like, face_group(self, face, slot->group)};
    PyObject *made = args[1] == NULL
                         ? NULL
                         : ctpy_call_hook(face, self->state->str__new_state, args, 2);
    Py_XDECREF(args[1]);
    if (made != NULL && !PyDict_Check(made)) {
        PyErr_Format(PyExc_TypeError, "_new_state() returned a %.200s; expected a dict",
                     Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    int result = made == NULL ? -1 : add_state(self, face, slot, made);
    slot->fresh = result == 0;
    Py_XDECREF(made);
    return result;
}

static int
keep_master(OptimEngine *self, PyObject *face, optim_slot *slot, PyObject *master)
{
    PyObject *made = PyDict_New();
    int result =
        made == NULL ? -1 : PyDict_SetItem(made, self->state->str_master_param, master);
    if (result == 0) {
        result = add_state(self, face, slot, made);
    }
    Py_XDECREF(made);
    return result;
}

/* state[param]["master_param"] as slot->master; NULL where there is none yet. */
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

/* Makes what is missing: the state if `lacks`, the master copy if `master`. */
static int
make_missing(OptimEngine *self, PyObject *face, optim_slot *slot, int lacks,
             bool master, bool wide)
{
    PyObject *copy = NULL;
    int result = 0;
    if (master && find_master(self, slot) < 0) {
        return -1;
    }
    const bool new_master = master && slot->master == NULL;
    if (new_master || (lacks && wide)) {
        copy = slot->master != NULL ? Py_NewRef(slot->master)
                                    : ctpy_call_hook(face, self->state->str__new_master,
                                                     &slot->param, 1);
        result = copy == NULL ? -1 : 0;
    }
    if (result == 0 && lacks) {
        result = make_state(self, face, slot, wide ? copy : slot->param);
    }
    if (result == 0 && new_master) {
        result = keep_master(self, face, slot, copy);
        Py_XSETREF(slot->master, Py_NewRef(copy));
    }
    Py_XDECREF(copy);
    return result;
}

/* ---- reading it --------------------------------------------------------------------
 */

/* What the slot's kind keeps in state[param], and which of it: bit i says values[i]. */
typedef struct value_list {
    const optim_spec *spec;
    unsigned kept;
    bool counts; /* values[0] is the count of steps */
} value_list;

static value_list
kept_values(OptimEngine *self, uint32_t g)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[g];
    const unsigned states = ct_optim_states(group);
    value_list list = {.spec = &optim_specs[group->kind]};
    for (size_t i = 0; i < list.spec->n_values; i++) {
        const int array = list.spec->values[i].array;
        if (array < 0 || (states >> array & 1) != 0) {
            list.kept |= 1u << i;
        }
    }
    list.counts = list.spec->n_values > 0 && list.spec->values[0].array < 0;
    return list;
}

static bool
keeps(const value_list *list, size_t i)
{
    return i < list->spec->n_values && (list->kept >> i & 1) != 0;
}

/* Has state to be made? torch.optim.AdamW starts from an empty entry, torch.optim.SGD
 * from one without a buffer, or with None for it, as its old state_dicts have. */
static int
lacks_state(const ctpy_state *state, const optim_slot *slot, const value_list *list)
{
    if (slot->state == NULL || PyDict_GET_SIZE(slot->state) == 0) {
        return 1;
    }
    if (list->counts) {
        return 0;
    }
    PyObject *name = optim_name_borrow(state, list->spec->values[0].name);
    PyObject *value = PyDict_GetItemWithError(slot->state, name);
    return PyErr_Occurred() ? -1 : value == NULL || Py_IsNone(value);
}

static int
read_values(const ctpy_state *state, optim_slot *slot, const value_list *list)
{
    for (size_t i = 0; i < list->spec->n_values; i++) {
        if (!keeps(list, i)) {
            continue;
        }
        PyObject *name = optim_name_borrow(state, list->spec->values[i].name);
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
        Py_XSETREF(slot->values[i], Py_NewRef(value));
    }
    return 0;
}

/* The count in a 0-dimensional tensor or array of one number. */
static int
read_step(OptimEngine *self, optim_slot *slot, uint64_t *count)
{
    const ctpy_place place = {" state 'step'", slot->group, slot->index};
    ctpy_view view;
    double step = NAN;
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

static bool
is_half(ct_dtype dtype)
{
    return dtype == CT_BF16 || dtype == CT_F16;
}

/* Views one array that belongs to a parameter: of its shape and order, and of its dtype
 * or, beside a 16-bit one, of fp32. */
static int
view_like(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
          PyObject *op, const char *what, bool fp32, ctpy_view *view)
{
    const ctpy_place place = {what, slot->group, slot->index};
    ctpy_view like = *param;
    if (ctpy_view_of(self->state, op, &place, view) < 0) {
        return -1;
    }
    if (fp32 || (is_half(param->span.dtype) && view->span.dtype == CT_F32)) {
        like.span.dtype = CT_F32;
    }
    return optim_check_like(slot, &like, view, what);
}

static int
view_arrays(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
            const value_list *list, ct_optim_param *to)
{
    bool first = true;
    for (size_t i = list->counts ? 1 : 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        ctpy_view view;
        if (!keeps(list, i)) {
            continue;
        }
        if (view_like(self, slot, param, slot->values[i], value->place, false, &view) <
            0) {
            return -1;
        }
        if (!first && view.span.dtype != to->state_dtype) {
            PyErr_Format(PyExc_ValueError,
                         "param_groups[%u]['params'][%zd]%s is %s; expected %s, as the "
                         "rest of its state is",
                         slot->group, slot->index, value->place,
                         ct_dtype_name(view.span.dtype),
                         ct_dtype_name(to->state_dtype));
            return -1;
        }
        to->state_dtype = view.span.dtype;
        to->state[value->array] = view.span.data;
        first = false;
    }
    return 0;
}

/* The master copy is what is updated, and the parameter gets it rounded. */
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
    PyErr_Format(PyExc_ValueError,
                 "param_groups[%u]['params'][%zd] is float16 and its group has "
                 "stochastic_rounding, which is for bfloat16: use bfloat16, or "
                 "master_weights=True",
                 slot->group, slot->index);
    return -1;
}

int
optim_plan_state(OptimEngine *self, PyObject *face, optim_slot *slot,
                 ct_optim_param *param, const ctpy_view *view)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[slot->group];
    const bool half = is_half(view->span.dtype);
    const bool master = half && group->master_weights;
    const value_list list = kept_values(self, slot->group);
    uint64_t count = 0;
    slot->step = NULL;
    if (check_rounding(group, slot, view->span.dtype) < 0) {
        return -1;
    }
    int lacks = list.kept == 0 ? 0 : lacks_state(self->state, slot, &list);
    if (lacks < 0 ||
        ((lacks || master) &&
         make_missing(self, face, slot, lacks, master,
                      half && (master || group->fp32_state)) < 0) ||
        (master && use_master(self, slot, view, param) < 0)) {
        return -1;
    }
    if (list.kept == 0) {
        return 0;
    }
    if (read_values(self->state, slot, &list) < 0 ||
        (list.counts && read_step(self, slot, &count) < 0) ||
        view_arrays(self, slot, view, &list, param) < 0) {
        return -1;
    }
    /* A kind without a count of its own asks only whether this is the first time. */
    param->step = list.counts ? count : !slot->fresh;
    return 0;
}

int
optim_remember_state(OptimEngine *self, PyObject *face)
{
    PyObject *state = self->n_known > 0 ? NULL : face_state(self, face);
    int result = state != NULL      ? remember_state(self, state)
                 : PyErr_Occurred() ? -1
                                    : 0;
    Py_XDECREF(state);
    return result;
}

void
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
            const uint64_t count = params[k].step;
            switch (slot->step_dtype) {
            case CT_F32:
                *(float *)slot->step = (float)count;
                break;
            case CT_F64:
                *(double *)slot->step = (double)count;
                break;
            default:
                *(int64_t *)slot->step = (int64_t)count;
            }
        }
    }
}
