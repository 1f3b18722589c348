/* Parameter groups, dicts as in torch, to the core's hyperparameters. The dicts are
 * read at every update, so schedulers and users may write to them at any time. */
#include "binding/optim/groups.h"

#include "binding/optim/engine.h"

#include <string.h>

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
read_field(const ctpy_state *state, PyObject *group, size_t g, const optim_field *field,
           ct_optim_group *to)
{
    PyObject *key = optim_name_borrow(state, field->name);
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
        return ctpy_group_max_norm(state, group, (Py_ssize_t)g, member);
    case CT_NEVER:
        return reject(group, key, g);
    }
    Py_UNREACHABLE();
}

static int
read_fields(const ctpy_state *state, PyObject *group, size_t g,
            const optim_field *fields, size_t n, ct_optim_group *to)
{
    int result = 0;
    for (size_t i = 0; i < n && result == 0; i++) {
        result = read_field(state, group, g, &fields[i], to);
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

#define FIELD(key, of, its_type)                                                       \
    {offsetof(ctpy_state, str_##key), offsetof(ct_optim_group, of), CT_##its_type}

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
    /* Of torch's optimizers alone; a state_dict may bring these. */
    FIELD(capturable, maximize, NEVER),
    FIELD(differentiable, maximize, NEVER),
};
static const size_t n_common_fields = sizeof common_fields / sizeof *common_fields;

#define OPTION(key, of, type, ...) FIELD(key, of, type),
#define VALUE(key, shape, array, n)                                                    \
    {offsetof(ctpy_state, str_##key), " state '" #key "'", array, CT_STATE_##shape, n},
#define KIND(id, name, options, state, traits)                                         \
    static const optim_field name##_fields[] = {CT_##options##_OPTIONS(OPTION)};       \
    static const optim_value name##_values[] = {CT_##state##_STATE(VALUE)};
CT_OPTIM_KINDS(KIND)
#undef KIND

const optim_spec optim_specs[CT_OPTIM_KIND_COUNT] = {
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
};

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
    if (read_fields(self->state, group, g, spec->fields, spec->n_fields, &read) < 0 ||
        read_fields(self->state, group, g, common_fields, n_common_fields, &read) < 0) {
        return -1;
    }
    /* Before any state is made, and not in the update alone. */
    ct_error err;
    if (ct_optim_check_group(&read, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if ((spec->traits & CT_TRAIT_CLIPS) != 0) {
        read.max_norm = 0.0;
    }
    ct_optim_groups_borrow(self->core)[g] = read;
    return 0;
}

int
optim_read_groups(OptimEngine *self, PyObject *groups)
{
    size_t n = (size_t)PyList_GET_SIZE(groups);
    for (size_t g = 0; g < n; g++) {
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
write_field(const ctpy_state *state, PyObject *group, const optim_field *field,
            const ct_optim_group *from)
{
    const void *member = (const char *)from + field->member;
    PyObject *value = field->type == CT_LIVE_COUNT
                          ? PyLong_FromUnsignedLongLong(*(const uint64_t *)member)
                          : PyFloat_FromDouble(*(const double *)member);
    int result =
        value == NULL
            ? -1
            : PyDict_SetItem(group, optim_name_borrow(state, field->name), value);
    Py_XDECREF(value);
    return result;
}

static int
write_fields(const ctpy_state *state, PyObject *group, const optim_field *fields,
             size_t n, const ct_optim_group *from)
{
    int result = 0;
    for (size_t i = 0; i < n && result == 0; i++) {
        if (fields[i].type >= CT_LIVE_NUMBER) {
            result = write_field(state, group, &fields[i], from);
        }
    }
    return result;
}

static int
write_group(OptimEngine *self, PyObject *group, size_t g)
{
    const ct_optim_group *from = &ct_optim_groups_borrow(self->core)[g];
    const optim_spec *spec = &optim_specs[from->kind];
    if (!PyDict_Check(group) ||
        write_fields(self->state, group, spec->fields, spec->n_fields, from) < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return from->stochastic
               ? write_fields(self->state, group, common_fields, n_common_fields, from)
               : 0;
}

int
optim_write_groups(OptimEngine *self, PyObject *wrapper)
{
    PyObject *groups = PyObject_GetAttr(wrapper, self->state->str_param_groups);
    int result = groups == NULL ? -1 : 0;
    for (size_t g = 0;
         result == 0 && PyList_Check(groups) && g < (size_t)PyList_GET_SIZE(groups) &&
         g < ct_optim_n_groups(self->core);
         g++) {
        PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, (Py_ssize_t)g));
        result = write_group(self, group, g);
        Py_DECREF(group);
    }
    Py_XDECREF(groups);
    return result;
}
