/* The state of each parameter: the dict state[param] in torch's own layout, so that
 * state_dict() of either side loads into the other. */
#include "binding/optim/state.h"

#include "core/base/alloc.h"

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

static optim_value_list
kept_values(OptimEngine *self, uint32_t g, const ct_optim_param *param)
{
    const ct_optim_group *group = &ct_optim_groups_borrow(self->core)[g];
    const unsigned states = ct_optim_arrays(group, param);
    optim_value_list list = {.spec = &optim_specs[group->kind]};
    for (size_t i = 0; i < list.spec->n_values; i++) {
        const int array = list.spec->values[i].array;
        const optim_shape shape = list.spec->values[i].shape;
        if (shape == OPTIM_SCALES || shape == OPTIM_MAP) {
            continue; /* where the state is codes */
        }
        if (array < 0 || (states >> array & 1) != 0) {
            list.kept |= 1u << i;
        }
    }
    list.counts = list.spec->n_values > 0 && list.spec->values[0].array < 0;
    return list;
}

/* Has state to be made? torch.optim.AdamW starts from an empty entry, torch.optim.SGD
 * from one without a buffer, or with None for it, as its old state_dicts have. */
static int
lacks_state(const ctpy_state *state, const optim_slot *slot,
            const optim_value_list *list)
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

int
optim_read_value(const ctpy_state *state, optim_slot *slot,
                 const optim_value_list *list, size_t i)
{
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
    return 0;
}

static int
read_values(const ctpy_state *state, optim_slot *slot, const optim_value_list *list)
{
    int result = 0;
    for (size_t i = 0; result == 0 && i < list->spec->n_values; i++) {
        result = optim_keeps(list, i) ? optim_read_value(state, slot, list, i) : 0;
    }
    return result;
}

/* The master copy is what is updated, and the parameter gets it rounded. */
static int
use_master(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
           ct_optim_param *to)
{
    ctpy_view view;
    if (optim_view_like(self, slot, param, slot->master, " state 'master_param'", true,
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
    const bool half = optim_is_half(view->span.dtype);
    const bool master = half && group->master_weights;
    const optim_value_list list = kept_values(self, slot->group, param);
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
        (list.counts && optim_read_step(self, slot, &count) < 0) ||
        optim_view_values(self, slot, view, &list, param) < 0) {
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
