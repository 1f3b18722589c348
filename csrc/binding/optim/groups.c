/* Parameter groups, dicts as in torch: options to the core's hyperparameters,
 * parameters to slots, and gradients to spans. The dicts are read at every update, so
 * schedulers and users may write to them at any time.
 *
 * The gradients are those of any optimizer's parameters, torch's or another package's.
 * A list of owners keeps each gradient alive while a pass without the GIL works on its
 * memory. */
#include "binding/optim/engine.h"

#include "core/base/alloc.h"

#include <math.h>
#include <string.h>

/* ---- is it ours? ----------------------------------------------------------------- */

/* 1 when op.name is a dict with entries; a missing attribute is none. */
static int
has_entries(PyObject *op, PyObject *name)
{
    PyObject *hooks;
    int found = ctpy_lookup(op, name, &hooks);
    if (found == 1) {
        found = PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) > 0;
        Py_DECREF(hooks);
    }
    return found;
}

/* 1 when the instance has a `step` of its own that is not a scheduler's wrapper. A
 * scheduler's wrapper only counts calls. */
static int
step_replaced(ctpy_state *state, PyObject *op)
{
    PyObject *own, *wrapped;
    PyObject *dict = PyObject_GenericGetDict(op, NULL);
    if (dict == NULL) {
        return -1;
    }
    own = PyDict_GetItemWithError(dict, state->str_step);
    Py_XINCREF(own);
    Py_DECREF(dict);
    if (own == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int found = ctpy_lookup(own, state->str__wrapped_by_lr_sched, &wrapped);
    if (found == 1) {
        Py_DECREF(wrapped);
    }
    Py_DECREF(own);
    return found < 0 ? -1 : !found;
}

/* 1 when driving the engine does all that op.step() would. */
static int
can_drive(ctpy_state *state, PyObject *op)
{
    PyObject *native;
    int found = ctpy_lookup(op, state->str__native_step, &native);
    if (found < 1) {
        return found;
    }
    int answer = PyObject_IsTrue(native);
    Py_DECREF(native);
    int extra = answer < 1 ? 0 : step_replaced(state, op);
    extra = extra != 0 ? extra : has_entries(op, state->str__optimizer_step_pre_hooks);
    extra = extra != 0 ? extra : has_entries(op, state->str__optimizer_step_post_hooks);
    return answer < 0 || extra < 0 ? -1 : answer && !extra;
}

int
ctpy_optimizer_engine(ctpy_state *state, PyObject *op, PyObject **engine)
{
    PyObject *found;
    int ours = ctpy_lookup(op, state->str__engine, &found);
    if (ours < 1) {
        return ours;
    }
    ours = Py_IS_TYPE(found, state->OptimEngine) ? can_drive(state, op) : 0;
    if (ours == 1) {
        *engine = Py_NewRef(found);
    }
    Py_DECREF(found);
    return ours;
}

/* ---- gradients of a foreign optimizer -------------------------------------------- */

/* Calls visit(state, param, place, arg) for every parameter of every group. */
typedef int
visit_fn(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg);

static int
visit_group(ctpy_state *state, PyObject *group, Py_ssize_t g, visit_fn *visit,
            void *arg)
{
    int result = 0;
    PyObject *found = PyObject_GetItem(group, state->str_params);
    PyObject *params = found == NULL
                           ? NULL
                           : PySequence_Fast(found, "the 'params' of an optimizer's "
                                                    "group are not a sequence");
    Py_XDECREF(found);
    if (params == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(params); i++) {
        const ctpy_place place = {".grad", g, i};
        /* Owned during the visit, which runs the user's code. */
        PyObject *param = Py_NewRef(PySequence_Fast_GET_ITEM(params, i));
        result = visit(state, param, &place, arg);
        Py_DECREF(param);
    }
    Py_DECREF(params);
    return result;
}

/* optimizer.param_groups as a new list or tuple that nobody else changes. */
static PyObject *
get_groups(ctpy_state *state, PyObject *optimizer)
{
    PyObject *found = PyObject_GetAttr(optimizer, state->str_param_groups);
    /* A tuple, as visits run code that may change the list. */
    PyObject *groups = found == NULL ? NULL : PySequence_Tuple(found);
    Py_XDECREF(found);
    return groups;
}

static int
visit_groups(ctpy_state *state, PyObject *groups, visit_fn *visit, void *arg)
{
    int result = 0;
    for (Py_ssize_t g = 0; result == 0 && g < PySequence_Fast_GET_SIZE(groups); g++) {
        PyObject *group = Py_NewRef(PySequence_Fast_GET_ITEM(groups, g));
        result = visit_group(state, group, g, visit, arg);
        Py_DECREF(group);
    }
    return result;
}

/* Chooses where the gradients are measured by the first one: -1 with an exception, or
 * 0, where no kernels work there, too. */
static int
choose_target(ctpy_grads *grads, PyObject *grad, const ctpy_place *place,
              const ctpy_view *view)
{
    ct_grads *list = grads->list;
    if (ctpy_target_of(grads->state, grad, place, view, &grads->target) < 0) {
        grads->elsewhere = true;
        return ctpy_forgive() ? 0 : -1;
    }
    if (list->device != grads->target.device || list->ordinal != view->ordinal) {
        ct_grads_fini(list);
        ct_grads_init(list, grads->target.device);
        list->ordinal = view->ordinal;
    }
    return 0;
}

static int
add_span(ctpy_grads *grads, PyObject *grad, const ctpy_place *place)
{
    ctpy_view view;
    ct_error err;
    if (ctpy_view_anywhere(grads->state, grad, place, &view) < 0 ||
        (grads->target.device == NULL &&
         choose_target(grads, grad, place, &view) < 0)) {
        return -1;
    }
    grads->elsewhere |= !ctpy_target_has(&grads->target, &view);
    if (grads->elsewhere) {
        return 0;
    }
    if (!ct_dtype_is_float(view.span.dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "param_groups[%zd]['params'][%zd].grad has dtype %s; expected a "
                     "floating point dtype",
                     place->group, place->index, ct_dtype_name(view.span.dtype));
        return -1;
    }
    if (ct_grads_reserve(grads->list, grads->list->n + 1, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    ct_grads_add(grads->list, &view.span, (uint32_t)place->group);
    return 0;
}

/* Adds the parameter's gradient, if there is one, to the ctpy_grads. */
static int
add_grad(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg)
{
    ctpy_grads *grads = arg;
    PyObject *grad = grads->elsewhere ? Py_NewRef(Py_None)
                                      : PyObject_GetAttr(param, state->str_grad);
    int result = grad == NULL ? -1 : 0;
    if (result == 0 && !Py_IsNone(grad)) {
        result =
            PyList_Append(grads->owners, grad) < 0 ? -1 : add_span(grads, grad, place);
    }
    Py_XDECREF(grad);
    return result;
}

/* group["max_grad_norm"] as max_norm of ct_grad_group: 0 for None or a missing key, Inf
 * for 0. g is for the message of the ValueError. */
static int
read_max_norm(const ctpy_state *state, PyObject *group, Py_ssize_t g, double *max_norm)
{
    PyObject *found = PyDict_Check(group)
                          ? PyDict_GetItemWithError(group, state->str_max_grad_norm)
                          : NULL;
    *max_norm = 0.0;
    if (found == NULL || Py_IsNone(found)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(found);
    const double value = PyFloat_AsDouble(found);
    const bool bad = !(value >= 0.0);
    if (bad && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zd]['max_grad_norm'] is %R; expected None or a "
                     "number >= 0",
                     g, found);
    }
    Py_DECREF(found);
    *max_norm = value == 0.0 ? (double)INFINITY : value;
    return bad ? -1 : 0;
}

static int
read_groups(ctpy_state *state, PyObject *groups, ct_grads *list)
{
    ct_error err;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(groups);
    if (ct_grads_set_groups(list, (size_t)n, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    for (Py_ssize_t g = 0; g < n; g++) {
        PyObject *group = PySequence_Fast_GET_ITEM(groups, g);
        list->groups[g].coef = 1.0;
        if (read_max_norm(state, group, g, &list->groups[g].max_norm) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
free_list(ct_grads *list)
{
    if (list != NULL) {
        ct_grads_fini(list);
        ct_free(list);
    }
}

void
ctpy_grads_free_spare(ctpy_state *state)
{
    free_list(state->spare_grads);
    state->spare_grads = NULL;
}

/* The list that the last update has left, with its memory, or a new one. */
static ct_grads *
take_list(ctpy_state *state)
{
    ct_grads *list = state->spare_grads;
    state->spare_grads = NULL;
    if (list == NULL) {
        list = ct_calloc(1, sizeof *list);
        if (list == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        ct_grads_init(list, &ct_device_cpu);
    }
    list->n = 0;
    return list;
}

void
ctpy_grads_close(ctpy_grads *grads)
{
    if (grads->list != NULL && grads->state->spare_grads == NULL) {
        grads->state->spare_grads = grads->list;
        grads->list = NULL;
    }
    free_list(grads->list);
    grads->list = NULL;
    Py_CLEAR(grads->owners);
}

int
ctpy_grads_open(ctpy_state *state, PyObject *optimizer, ctpy_grads *grads)
{
    PyObject *groups = get_groups(state, optimizer);
    *grads = (ctpy_grads){.state = state};
    bool failed = groups == NULL || (grads->list = take_list(state)) == NULL ||
                  (grads->owners = PyList_New(0)) == NULL ||
                  visit_groups(state, groups, add_grad, grads) < 0 ||
                  read_groups(state, groups, grads->list) < 0;
    Py_XDECREF(groups);
    if (failed) {
        ctpy_grads_close(grads);
        return -1;
    }
    grads->list->n = grads->elsewhere ? 0 : grads->list->n;
    return 0;
}

int
ctpy_grads_sum(ctpy_grads *grads, const ct_clip *clip)
{
    ct_error err, unused;
    int ordinal = grads->list->ordinal;
    ct_status status = ct_device_switch(grads->list->device, &ordinal, &err);
    if (status == CT_OK) {
        /* The owners keep the memory; a gradient replaced meanwhile is measured as it
         * was. */
        Py_BEGIN_ALLOW_THREADS
        status = ct_clip_measure(clip, grads->list, grads->target.stream, &err);
        Py_END_ALLOW_THREADS(void)
        ct_device_switch(grads->list->device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_grads_measure(ctpy_grads *grads, const ct_clip *clip, double loss_scale,
                   double *norm)
{
    if (ctpy_grads_sum(grads, clip) < 0) {
        return -1;
    }
    *norm = ct_clip_decide(clip, grads->list, loss_scale);
    return 0;
}

int
ctpy_grads_clip(ctpy_grads *grads, const ct_clip *clip, double loss_scale)
{
    ct_error err, unused;
    int ordinal = grads->list->ordinal;
    ct_status status = ct_device_switch(grads->list->device, &ordinal, &err);
    if (status == CT_OK) {
        Py_BEGIN_ALLOW_THREADS
        status =
            ct_clip_apply(clip, grads->list, grads->target.stream, loss_scale, &err);
        Py_END_ALLOW_THREADS(void)
        ct_device_switch(grads->list->device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
drop_grad(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg)
{
    (void)place;
    (void)arg;
    return PyObject_SetAttr(param, state->str_grad, Py_None);
}

int
ctpy_grads_drop(ctpy_state *state, PyObject *optimizer)
{
    PyObject *groups = get_groups(state, optimizer);
    int result = groups == NULL ? -1 : visit_groups(state, groups, drop_grad, NULL);
    Py_XDECREF(groups);
    return result;
}

/* ---- options --------------------------------------------------------------------- */

/* group[key], owned; NULL with a ValueError that names the group. */
static PyObject *
group_get(PyObject *group, PyObject *key, size_t g)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (value == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu] has no %R: add it, or make the group with "
                     "add_param_group(), which fills in the defaults",
                     g, key);
    }
    return Py_XNewRef(value);
}

static int
to_double(PyObject *value, PyObject *key, size_t g, double *out)
{
    *out = PyFloat_AsDouble(value);
    /* -1 is a valid number, too. */
    if (*out != -1.0 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Format(PyExc_TypeError,
                     "param_groups[%zu][%R] is %R, a %.200s; expected a number", g, key,
                     value, Py_TYPE(value)->tp_name);
    }
    return -1;
}

static int
read_double(PyObject *group, PyObject *key, size_t g, double *out)
{
    PyObject *value = group_get(group, key, g);
    int result = value == NULL ? -1 : to_double(value, key, g, out);
    Py_XDECREF(value);
    return result;
}

/* The truth of group[key], or `missing`. -1 with an exception. */
static int
read_flag(PyObject *group, PyObject *key, int missing)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (value == NULL) {
        return PyErr_Occurred() ? -1 : missing;
    }
    Py_INCREF(value);
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* n numbers, 2 or 3. */
static int
read_tuple(PyObject *group, PyObject *key, size_t g, double *out, Py_ssize_t n)
{
    PyObject *value = group_get(group, key, g);
    PyObject *tuple = value == NULL ? NULL : PySequence_Tuple(value);
    int result = -1;
    if (tuple != NULL && PyTuple_GET_SIZE(tuple) != n) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu][%R] is %R; expected %s numbers", g, key, tuple,
                     n == 2 ? "two" : "three");
    }
    else if (tuple != NULL) {
        result = 0;
        for (Py_ssize_t i = 0; i < n && result == 0; i++) {
            result = to_double(PyTuple_GET_ITEM(tuple, i), key, g, &out[i]);
        }
    }
    Py_XDECREF(tuple);
    Py_XDECREF(value);
    return result;
}

static int
read_optional(PyObject *group, PyObject *key, size_t g, double *out)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    /* NaN stands for None in the core. */
    *out = Py_NAN;
    if (value == NULL || Py_IsNone(value)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return read_double(group, key, g, out);
}

static int
read_count(PyObject *group, PyObject *key, size_t g, uint64_t *out)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    *out = 0;
    if (value == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(value);
    PyObject *number = PyNumber_Index(value);
    *out = number == NULL ? (uint64_t)-1 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    if (*out == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu][%R] is %R; expected a whole number from 0 to "
                     "2**64 - 1",
                     g, key, value);
        Py_DECREF(value);
        return -1;
    }
    Py_DECREF(value);
    return 0;
}

static int
read_choice(PyObject *group, PyObject *key, size_t g, int *out)
{
    const char *const *choices = ct_muon_adjust_names;
    PyObject *value = group_get(group, key, g);
    int result = value == NULL ? -1 : 0;
    *out = 0;
    if (value != NULL && !Py_IsNone(value)) {
        /* The index in the list is the core's constant. */
        while (choices[*out] != NULL &&
               !(PyUnicode_Check(value) &&
                 PyUnicode_CompareWithASCIIString(value, choices[*out]) == 0)) {
            ++*out;
        }
        if (choices[*out] == NULL) {
            PyErr_Format(PyExc_ValueError,
                         "param_groups[%zu][%R] is %R; expected None, '%s' or another "
                         "name that the optimizer's documentation lists",
                         g, key, value, choices[0]);
            result = -1;
        }
    }
    Py_XDECREF(value);
    return result;
}

/* An option of torch's alone, which a state_dict may bring. */
static int
reject(PyObject *group, PyObject *key, size_t g)
{
    int set = read_flag(group, key, 0);
    if (set > 0) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu][%R] is True, which this optimizer does not "
                     "have: set it to False, or use torch.optim",
                     g, key);
    }
    return set == 0 ? 0 : -1;
}

static int
read_field(const ctpy_state *state, PyObject *group, size_t g, PyObject *key,
           const optim_field *field, ct_optim_group *to)
{
    void *member = (char *)to + field->member;
    int flag;
    switch (field->type) {
    case CT_NUMBER:
    case CT_LIVE_NUMBER:
        return read_double(group, key, g, member);
    case CT_PAIR:
        return read_tuple(group, key, g, member, 2);
    case CT_TRIPLE:
        return read_tuple(group, key, g, member, 3);
    case CT_OPTIONAL:
    case CT_LIVE_OPTIONAL:
        return read_optional(group, key, g, member);
    case CT_CHOICE:
        return read_choice(group, key, g, member);
    case CT_COUNT:
    case CT_LIVE_COUNT:
        return read_count(group, key, g, member);
    case CT_FLAG:
    case CT_FLAG_ON:
        flag = read_flag(group, key, field->type == CT_FLAG_ON);
        *(bool *)member = flag > 0;
        return flag < 0 ? -1 : 0;
    case CT_LIMIT:
        return read_max_norm(state, group, (Py_ssize_t)g, member);
    case CT_NEVER:
        return reject(group, key, g);
    }
    Py_UNREACHABLE();
}

static int
read_fields(const ctpy_state *state, PyObject *group, size_t g, const optim_spec *spec,
            ct_optim_group *to)
{
    int result = 0;
    for (size_t i = 0; i < spec->n_fields && result == 0; i++) {
        PyObject *key = optim_key_borrow(state, spec, i);
        result = read_field(state, group, g, key, &spec->fields[i], to);
    }
    return result;
}

/* The kind of the group, else of the engine. */
static int
read_kind(OptimEngine *self, PyObject *group, size_t g, ct_optim_kind *kind)
{
    PyObject *value = PyDict_GetItemWithError(group, self->state->str_kind);
    *kind = self->kind;
    if (value == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    const char *name = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : "";
    *kind = name == NULL ? CT_OPTIM_KIND_COUNT : ct_optim_kind_from_name(name);
    if (name != NULL && *kind == CT_OPTIM_KIND_COUNT) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu]['kind'] is %R; expected the name of an "
                     "optimizer, such as 'adamw' or 'sgd'",
                     g, value);
    }
    return *kind == CT_OPTIM_KIND_COUNT ? -1 : 0;
}

#define FIELD(key, of, its_type) {#key, offsetof(ct_optim_group, of), CT_##its_type}

#define PAIRED(config, first, second)                                                  \
    _Static_assert(offsetof(config, second) ==                                         \
                       offsetof(config, first) + sizeof(double),                       \
                   "numbers of one option are read side by side")
PAIRED(ct_adafactor_config, eps, eps2);
PAIRED(ct_adamax_config, beta1, beta2);
PAIRED(ct_adamw_config, beta1, beta2);
PAIRED(ct_ademamix_config, beta1, beta2);
PAIRED(ct_ademamix_config, beta2, beta3);
PAIRED(ct_lamb_config, beta1, beta2);
PAIRED(ct_lion_config, beta1, beta2);
PAIRED(ct_nadam_config, beta1, beta2);
PAIRED(ct_schedule_free_config, beta1, beta2);
_Static_assert(sizeof(ct_muon_adjust) == sizeof(int), "a choice is read as an int");

/* The options that every kind has. */
static const optim_field common_fields[] = {
    FIELD(maximize, maximize, FLAG),
    FIELD(max_grad_norm, max_norm, LIMIT),
    FIELD(master_weights, master_weights, FLAG),
    FIELD(fp32_state, fp32_state, FLAG),
    FIELD(stochastic_rounding, stochastic, FLAG),
    FIELD(rounding_seed, rounding.seed, COUNT),
    FIELD(rounding_step, rounding.step, LIVE_COUNT),
    FIELD(capturable, capturable, FLAG),
    /* Of torch's optimizers alone; a state_dict may bring the option. */
    FIELD(differentiable, maximize, NEVER),
};

#define OPTION(key, of, type, ...) FIELD(key, of, type),
#define VALUE(key, shape, array, n)                                                    \
    {#key, " state '" #key "'", array, CT_STATE_##shape, n},
#define KIND(id, name, options, state, traits)                                         \
    static const optim_field name##_fields[] = {CT_##options##_OPTIONS(OPTION)};       \
    static const optim_value name##_values[] = {CT_##state##_STATE(VALUE)};
CT_OPTIM_KINDS(KIND)
#undef KIND

const optim_spec optim_specs[CT_OPTIM_KIND_COUNT + 1] = {
#define KIND(id, name, options, state, is)                                             \
    {                                                                                  \
        .traits = (is),                                                                \
        .fields = name##_fields,                                                       \
        .n_fields = sizeof name##_fields / sizeof *name##_fields,                      \
        .values = name##_values,                                                       \
        .n_values = sizeof name##_values / sizeof *name##_values,                      \
    },
    CT_OPTIM_KINDS(KIND)
#undef KIND
        {.fields = common_fields,
                                              .n_fields = sizeof common_fields / sizeof *common_fields},
};
static const optim_spec *const common = &optim_specs[CT_OPTIM_KIND_COUNT];

static PyObject *
interned_keys(const optim_spec *spec)
{
    const size_t n = spec->n_fields + spec->n_values;
    PyObject *keys = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; keys != NULL && i < n; i++) {
        PyObject *key = PyUnicode_InternFromString(
            i < spec->n_fields ? spec->fields[i].key
                               : spec->values[i - spec->n_fields].key);
        if (key == NULL) {
            Py_CLEAR(keys);
            break;
        }
        PyTuple_SET_ITEM(keys, (Py_ssize_t)i, key);
    }
    return keys;
}

int
ctpy_optim_intern(ctpy_state *state)
{
    const Py_ssize_t n = CT_OPTIM_KIND_COUNT + 1;
    state->optim_keys = PyTuple_New(n);
    for (Py_ssize_t i = 0; state->optim_keys != NULL && i < n; i++) {
        PyObject *keys = interned_keys(&optim_specs[i]);
        if (keys == NULL) {
            Py_CLEAR(state->optim_keys);
            break;
        }
        PyTuple_SET_ITEM(state->optim_keys, i, keys);
    }
    return state->optim_keys == NULL ? -1 : 0;
}

static int
read_group(OptimEngine *self, PyObject *group, size_t g)
{
    ct_optim_group read;
    memset(&read, 0, sizeof read);
    if (!PyDict_Check(group)) {
        PyErr_Format(PyExc_TypeError, "param_groups[%zu] is a %.200s; expected a dict",
                     g, Py_TYPE(group)->tp_name);
        return -1;
    }
    if (read_kind(self, group, g, &read.kind) < 0) {
        return -1;
    }
    const optim_spec *spec = &optim_specs[read.kind];
    if (read_fields(self->state, group, g, spec, &read) < 0 ||
        read_fields(self->state, group, g, common, &read) < 0) {
        return -1;
    }
    /* Before any state is made, and not in the update alone. */
    ct_error err;
    if (ct_optim_check_group(&read, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    /* The kind's own rule uses max_grad_norm; the engine must not clip as well. */
    if ((spec->traits & CT_TRAIT_CLIPS) != 0) {
        read.max_norm = 0.0;
    }
    /* Only a complete group replaces the old one. */
    ct_optim_groups_borrow(self->core)[g] = read;
    return 0;
}

int
optim_read_groups(OptimEngine *self, PyObject *groups)
{
    size_t n = (size_t)PyList_GET_SIZE(groups);
    for (size_t g = 0; g < n; g++) {
        /* Reading an option may run the user's code. */
        if ((size_t)PyList_GET_SIZE(groups) != n) {
            PyErr_SetString(PyExc_RuntimeError,
                            "param_groups changed while being read");
            return -1;
        }
        PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, (Py_ssize_t)g));
        int failed = read_group(self, group, g);
        Py_DECREF(group);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- what an update changes in a group ------------------------------------------- */

static int
write_field(PyObject *group, PyObject *key, const optim_field *field,
            const ct_optim_group *from)
{
    const void *member = (const char *)from + field->member;
    PyObject *value = field->type == CT_LIVE_COUNT
                          ? PyLong_FromUnsignedLongLong(*(const uint64_t *)member)
                          : PyFloat_FromDouble(*(const double *)member);
    int result = value == NULL ? -1 : PyDict_SetItem(group, key, value);
    Py_XDECREF(value);
    return result;
}

static int
write_fields(const ctpy_state *state, PyObject *group, const optim_spec *spec,
             const ct_optim_group *from)
{
    int result = 0;
    for (size_t i = 0; i < spec->n_fields && result == 0; i++) {
        if (spec->fields[i].type >= CT_LIVE_NUMBER) {
            PyObject *key = optim_key_borrow(state, spec, i);
            result = write_field(group, key, &spec->fields[i], from);
        }
    }
    return result;
}

static int
write_group(OptimEngine *self, PyObject *group, size_t g)
{
    const ct_optim_group *from = &ct_optim_groups_borrow(self->core)[g];
    const optim_spec *spec = &optim_specs[from->kind];
    if (!PyDict_Check(group) || write_fields(self->state, group, spec, from) < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return from->stochastic ? write_fields(self->state, group, common, from) : 0;
}

int
optim_write_groups(OptimEngine *self, PyObject *groups)
{
    int result = 0;
    for (size_t g = 0;
         result == 0 && PyList_Check(groups) && g < (size_t)PyList_GET_SIZE(groups) &&
         g < ct_optim_n_groups(self->core);
         g++) {
        PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, (Py_ssize_t)g));
        result = write_group(self, group, g);
        Py_DECREF(group);
    }
    return result;
}

/* ---- slots: one for each parameter of the live param_groups ---------------------- */

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
reject_duplicates(OptimEngine *self)
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

int
optim_plan_slots(OptimEngine *self, PyObject *groups)
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
    return reject_duplicates(self);
}

/* ---- the options of a step --------------------------------------------------------
 */

int
ctpy_parse_nonfinite(PyObject *arg, const char *name, ct_nonfinite *policy)
{
    static const char *const words[] = {
        [CT_NONFINITE_SKIP] = "skip",
        [CT_NONFINITE_STOP] = "stop",
        [CT_NONFINITE_KEEP] = "keep",
    };
    for (size_t i = 0; PyUnicode_Check(arg) && i < sizeof words / sizeof *words; i++) {
        if (PyUnicode_CompareWithASCIIString(arg, words[i]) == 0) {
            *policy = (ct_nonfinite)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s is %R; expected 'skip', 'stop' or 'keep'", name,
                 arg);
    return -1;
}

static int
parse_positive(PyObject *arg, const char *name, double *value)
{
    *value = PyFloat_AsDouble(arg);
    if (*value == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (!(*value > 0.0)) {
        PyErr_Format(PyExc_ValueError, "%s is %R; expected a number > 0", name, arg);
        return -1;
    }
    return 0;
}

int
ctpy_parse_limit(PyObject *arg, const char *name, double *value)
{
    return Py_IsNone(arg) ? 0 : parse_positive(arg, name, value);
}

static int
parse_flag(PyObject *arg, bool *value)
{
    const int truth = PyObject_IsTrue(arg);
    *value = truth > 0;
    return truth < 0 ? -1 : 0;
}

int
optim_parse_options(PyObject *const *args, ct_step_config *config, double *loss_scale)
{
    *config = (ct_step_config){.zero_grads = false};
    return ctpy_parse_limit(args[0], "max_norm", &config->clip.max_norm) < 0 ||
                   parse_positive(args[1], "loss_scale", loss_scale) < 0 ||
                   ctpy_parse_nonfinite(args[2], "nonfinite", &config->nonfinite) < 0 ||
                   parse_flag(args[3], &config->zero_grads) < 0 ||
                   parse_positive(args[4], "norm_type", &config->clip.norm_type) < 0 ||
                   ctpy_parse_limit(args[5], "clip_value", &config->clip.value) < 0 ||
                   parse_flag(args[6], &config->clip.by_group) < 0
               ? -1
               : 0;
}
