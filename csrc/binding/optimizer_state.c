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

/* state[param].update(face._new_state(param)), as slot->state. */
static int
make_state(OptimEngine *self, PyObject *face, optim_slot *slot)
{
    PyObject *made = ctpy_call_hook(face, self->state->str__new_state, &slot->param, 1);
    if (made != NULL && !PyDict_Check(made)) {
        PyErr_Format(PyExc_TypeError, "_new_state() returned a %.200s; expected a dict",
                     Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    PyObject *state = made == NULL ? NULL : face_state(self, face);
    PyObject *entry = NULL;
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
        slot->fresh = true;
        self->n_known = 0;
        result = 0;
    }
    Py_XDECREF(entry);
    Py_XDECREF(state);
    Py_XDECREF(made);
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

static int
view_arrays(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
            const value_list *list, ct_optim_param *to)
{
    to->state_dtype = param->span.dtype;
    for (size_t i = list->counts ? 1 : 0; i < list->spec->n_values; i++) {
        const optim_value *value = &list->spec->values[i];
        const ctpy_place place = {value->place, slot->group, slot->index};
        ctpy_view view;
        if (!keeps(list, i)) {
            continue;
        }
        if (ctpy_view_of(self->state, slot->values[i], &place, &view) < 0 ||
            optim_check_like(slot, param, &view, value->place) < 0) {
            return -1;
        }
        to->state[value->array] = view.span.data;
    }
    return 0;
}

int
optim_plan_state(OptimEngine *self, PyObject *face, optim_slot *slot,
                 ct_optim_param *param, const ctpy_view *view)
{
    const value_list list = kept_values(self, slot->group);
    uint64_t count = 0;
    slot->step = NULL;
    if (list.kept == 0) {
        return 0;
    }
    int lacks = lacks_state(self->state, slot, &list);
    if (lacks < 0 || (lacks && make_state(self, face, slot) < 0) ||
        read_values(self->state, slot, &list) < 0 ||
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
