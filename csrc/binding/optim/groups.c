/* A parameter group, a dict as torch has it, to the core's hyperparameters. The dicts
 * are read at every update, so schedulers and users may write to them at any time. */
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

/* n numbers, 2 or 3, one behind the other. */
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
read_choice(PyObject *group, PyObject *key, size_t g, const char *const *choices,
            int *out)
{
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

/* An option of torch's that we lack. It may come with a state_dict. */
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
    case OPTIM_NUMBER:
        return read_double(group, key, g, member);
    case OPTIM_PAIR:
        return read_tuple(group, key, g, member, 2);
    case OPTIM_TRIPLE:
        return read_tuple(group, key, g, member, 3);
    case OPTIM_OPTIONAL:
        return read_optional(group, key, g, member);
    case OPTIM_CHOICE:
        return read_choice(group, key, g, field->choices, member);
    case OPTIM_COUNT:
        return read_count(group, key, g, member);
    case OPTIM_FLAG:
    case OPTIM_FLAG_ON:
        flag = read_flag(group, key, field->type == OPTIM_FLAG_ON);
        *(bool *)member = flag > 0;
        return flag < 0 ? -1 : 0;
    case OPTIM_LIMIT:
        return ctpy_group_max_norm(state, group, (Py_ssize_t)g, member);
    case OPTIM_NEVER:
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

/* The engine's own kind, or the one that a group names. */
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

#define MEMBER(key, of)                                                                \
    .name = offsetof(ctpy_state, str_##key), .member = offsetof(ct_optim_group, of)
#define FIELD(key, of, its_type) {MEMBER(key, of), .type = (its_type)}
#define LIVE(key, of, its_type) {MEMBER(key, of), .type = (its_type), .live = true}
#define CHOICE(key, of, names)                                                         \
    {MEMBER(key, of), .type = OPTIM_CHOICE, .choices = (names)}
#define REJECTED(key, its_type)                                                        \
    {.name = offsetof(ctpy_state, str_##key), .type = (its_type)}
#define COUNT {offsetof(ctpy_state, str_step), " state 'step'", -1, OPTIM_ONE, 0}
#define SHAPED(key, array, shape)                                                      \
    {offsetof(ctpy_state, str_##key), " state '" #key "'", array, shape, 1}
/* n_arrays from `array` on that may be of 8 bits, and what belongs to them. */
#define CODED(state, absmax, qmap, array, n_arrays)                                    \
    STACKED(state, array, OPTIM_CODED, n_arrays),                                      \
        STACKED(absmax, array, OPTIM_SCALES, n_arrays),                                \
        STACKED(qmap, array, OPTIM_MAP, n_arrays)
#define STACKED(key, array, shape, n_arrays)                                           \
    {offsetof(ctpy_state, str_##key), " state '" #key "'", array, shape, n_arrays}
#define ARRAY(key, array) SHAPED(key, array, OPTIM_LIKE)
#define SPEC(kind, state) SPEC_OF(kind, state, false, false)
#define SPEC_OF(kind, state, is_shaped, does_clip)                                     \
    {                                                                                  \
        .shaped = (is_shaped),                                                         \
        .clips = (does_clip),                                                          \
        .fields = kind##_fields,                                                       \
        .n_fields = sizeof kind##_fields / sizeof *kind##_fields,                      \
        .values = state##_values,                                                      \
        .n_values = sizeof state##_values / sizeof *state##_values,                    \
    }

const optim_field optim_common_fields[] = {
    FIELD(maximize, maximize, OPTIM_FLAG),
    FIELD(max_grad_norm, max_norm, OPTIM_LIMIT),
    FIELD(master_weights, master_weights, OPTIM_FLAG),
    FIELD(fp32_state, fp32_state, OPTIM_FLAG),
    FIELD(stochastic_rounding, stochastic, OPTIM_FLAG),
    FIELD(rounding_seed, rounding.seed, OPTIM_COUNT),
    LIVE(rounding_step, rounding.step, OPTIM_COUNT),
    /* What torch's optimizers have and ours do not; it may come with a state_dict. */
    REJECTED(capturable, OPTIM_NEVER),
    REJECTED(differentiable, OPTIM_NEVER),
};
const size_t optim_n_common_fields =
    sizeof optim_common_fields / sizeof *optim_common_fields;

static const optim_field adamw_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    FIELD(amsgrad, adamw.amsgrad, OPTIM_FLAG),
    FIELD(decoupled_weight_decay, adamw.decoupled, OPTIM_FLAG_ON),
};
static const optim_value adam_values[] = {
    COUNT,
    ARRAY(exp_avg, 0),
    ARRAY(exp_avg_sq, 1),
    ARRAY(max_exp_avg_sq, 2),
};

static const optim_field adam_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    FIELD(amsgrad, adamw.amsgrad, OPTIM_FLAG),
    FIELD(decoupled_weight_decay, adamw.decoupled, OPTIM_FLAG),
};

static const optim_field fairseq_adam_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    FIELD(amsgrad, adamw.amsgrad, OPTIM_FLAG),
};

static const optim_field radam_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    FIELD(decoupled_weight_decay, adamw.decoupled, OPTIM_FLAG),
};

static const optim_field nadam_fields[] = {
    FIELD(lr, nadam.lr, OPTIM_NUMBER),
    FIELD(betas, nadam.beta1, OPTIM_PAIR),
    FIELD(eps, nadam.eps, OPTIM_NUMBER),
    FIELD(weight_decay, nadam.weight_decay, OPTIM_NUMBER),
    FIELD(momentum_decay, nadam.momentum_decay, OPTIM_NUMBER),
    FIELD(decoupled_weight_decay, nadam.decoupled, OPTIM_FLAG),
};
static const optim_value nadam_values[] = {
    COUNT,
    {offsetof(ctpy_state, str_mu_product), " state 'mu_product'", -1, OPTIM_PRODUCT, 0},
    ARRAY(exp_avg, 0),
    ARRAY(exp_avg_sq, 1),
};

static const optim_field adamax_fields[] = {
    FIELD(lr, adamax.lr, OPTIM_NUMBER),
    FIELD(betas, adamax.beta1, OPTIM_PAIR),
    FIELD(eps, adamax.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamax.weight_decay, OPTIM_NUMBER),
};
static const optim_value adamax_values[] = {
    COUNT,
    ARRAY(exp_avg, 0),
    ARRAY(exp_inf, 1),
};

static const optim_field fairseq_adamax_fields[] = {
    FIELD(lr, adamax.lr, OPTIM_NUMBER),
    FIELD(betas, adamax.beta1, OPTIM_PAIR),
    FIELD(eps, adamax.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamax.weight_decay, OPTIM_NUMBER),
    FIELD(bias_correction, adamax.bias_correction, OPTIM_FLAG_ON),
};

static const optim_field ademamix_fields[] = {
    FIELD(lr, ademamix.lr, OPTIM_NUMBER),
    FIELD(betas, ademamix.beta1, OPTIM_TRIPLE),
    FIELD(alpha, ademamix.alpha, OPTIM_NUMBER),
    FIELD(t_alpha, ademamix.t_alpha, OPTIM_OPTIONAL),
    FIELD(t_beta3, ademamix.t_beta3, OPTIM_OPTIONAL),
    FIELD(eps, ademamix.eps, OPTIM_NUMBER),
    FIELD(weight_decay, ademamix.weight_decay, OPTIM_NUMBER),
};
static const optim_value ademamix_values[] = {
    COUNT,
    ARRAY(exp_avg_fast, 0),
    ARRAY(exp_avg_slow, 1),
    ARRAY(exp_avg_sq, 2),
};
_Static_assert(offsetof(ct_ademamix_config, beta3) ==
                   offsetof(ct_ademamix_config, beta1) + 2 * sizeof(double),
               "betas are read as a triple");

static const optim_field sgd_fields[] = {
    FIELD(lr, sgd.lr, OPTIM_NUMBER),
    FIELD(momentum, sgd.momentum, OPTIM_NUMBER),
    FIELD(dampening, sgd.dampening, OPTIM_NUMBER),
    FIELD(weight_decay, sgd.weight_decay, OPTIM_NUMBER),
    FIELD(nesterov, sgd.nesterov, OPTIM_FLAG),
};
static const optim_value sgd_values[] = {
    ARRAY(momentum_buffer, 0),
};

static const optim_field nag_fields[] = {
    FIELD(lr, nag.lr, OPTIM_NUMBER),
    FIELD(momentum, nag.momentum, OPTIM_NUMBER),
    FIELD(weight_decay, nag.weight_decay, OPTIM_NUMBER),
    LIVE(lr_old, nag.lr_old, OPTIM_OPTIONAL),
};
static const optim_value nag_values[] = {
    ARRAY(momentum_buffer, 0),
};

static const optim_field adagrad_fields[] = {
    FIELD(lr, adagrad.lr, OPTIM_NUMBER),
    FIELD(lr_decay, adagrad.lr_decay, OPTIM_NUMBER),
    FIELD(eps, adagrad.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adagrad.weight_decay, OPTIM_NUMBER),
};
static const optim_value adagrad_values[] = {
    COUNT,
    ARRAY(sum, 0),
};

static const optim_field adadelta_fields[] = {
    FIELD(lr, adadelta.lr, OPTIM_NUMBER),
    FIELD(rho, adadelta.rho, OPTIM_NUMBER),
    FIELD(eps, adadelta.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adadelta.weight_decay, OPTIM_NUMBER),
};
static const optim_value adadelta_values[] = {
    COUNT,
    ARRAY(square_avg, 0),
    ARRAY(acc_delta, 1),
};

static const optim_field rmsprop_fields[] = {
    FIELD(lr, rmsprop.lr, OPTIM_NUMBER),
    FIELD(alpha, rmsprop.alpha, OPTIM_NUMBER),
    FIELD(eps, rmsprop.eps, OPTIM_NUMBER),
    FIELD(weight_decay, rmsprop.weight_decay, OPTIM_NUMBER),
    FIELD(momentum, rmsprop.momentum, OPTIM_NUMBER),
    FIELD(centered, rmsprop.centered, OPTIM_FLAG),
};
static const optim_value rmsprop_values[] = {
    COUNT,
    ARRAY(square_avg, 0),
    ARRAY(momentum_buffer, 1),
    ARRAY(grad_avg, 2),
};

static const optim_field lion_fields[] = {
    FIELD(lr, lion.lr, OPTIM_NUMBER),
    FIELD(betas, lion.beta1, OPTIM_PAIR),
    FIELD(weight_decay, lion.weight_decay, OPTIM_NUMBER),
};
static const optim_value lion_values[] = {
    ARRAY(exp_avg, 0),
};

/* What every form has. */
#define SCHEDULE_FREE_FIELDS                                                           \
    FIELD(lr, schedule_free.lr, OPTIM_NUMBER),                                         \
        FIELD(weight_decay, schedule_free.weight_decay, OPTIM_NUMBER),                 \
        FIELD(r, schedule_free.r, OPTIM_NUMBER),                                       \
        FIELD(weight_lr_power, schedule_free.weight_lr_power, OPTIM_NUMBER),           \
        FIELD(train_mode, schedule_free.train_mode, OPTIM_FLAG),                       \
        LIVE(k, schedule_free.k, OPTIM_COUNT),                                         \
        LIVE(weight_sum, schedule_free.weight_sum, OPTIM_NUMBER),                      \
        LIVE(lr_max, schedule_free.lr_max, OPTIM_NUMBER),                              \
        LIVE(scheduled_lr, schedule_free.scheduled_lr, OPTIM_NUMBER)

static const optim_field schedule_free_adamw_fields[] = {
    SCHEDULE_FREE_FIELDS,
    FIELD(warmup_steps, schedule_free.warmup_steps, OPTIM_NUMBER),
    FIELD(betas, schedule_free.beta1, OPTIM_PAIR),
    FIELD(eps, schedule_free.eps, OPTIM_NUMBER),
};
static const optim_field schedule_free_radam_fields[] = {
    SCHEDULE_FREE_FIELDS,
    FIELD(silent_sgd_phase, schedule_free.silent_sgd_phase, OPTIM_FLAG),
    FIELD(betas, schedule_free.beta1, OPTIM_PAIR),
    FIELD(eps, schedule_free.eps, OPTIM_NUMBER),
};
static const optim_value schedule_free_adamw_values[] = {
    ARRAY(z, 0),
    ARRAY(exp_avg_sq, 1),
};

static const optim_field schedule_free_sgd_fields[] = {
    SCHEDULE_FREE_FIELDS,
    FIELD(warmup_steps, schedule_free.warmup_steps, OPTIM_NUMBER),
    FIELD(momentum, schedule_free.beta1, OPTIM_NUMBER),
};
static const optim_value schedule_free_sgd_values[] = {
    ARRAY(z, 0),
};

static const optim_field adamw_8bit_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    REJECTED(amsgrad, OPTIM_NEVER),
    FIELD(decoupled_weight_decay, adamw.decoupled, OPTIM_FLAG_ON),
};
static const optim_value two_8bit_values[] = {
    COUNT,
    CODED(state1, absmax1, qmap1, 0, 1),
    CODED(state2, absmax2, qmap2, 1, 1),
};
static const optim_value one_8bit_values[] = {
    COUNT,
    CODED(state1, absmax1, qmap1, 0, 1),
};
static const optim_value ademamix_8bit_values[] = {
    COUNT,
    CODED(state1, absmax1, qmap1, 0, 2),
    CODED(state2, absmax2, qmap2, 2, 1),
};

static const optim_field adafactor_fields[] = {
    FIELD(lr, adafactor.lr, OPTIM_OPTIONAL),
    FIELD(eps, adafactor.eps, OPTIM_PAIR),
    FIELD(clip_threshold, adafactor.clip_threshold, OPTIM_NUMBER),
    FIELD(decay_rate, adafactor.decay_rate, OPTIM_NUMBER),
    FIELD(beta1, adafactor.beta1, OPTIM_OPTIONAL),
    FIELD(weight_decay, adafactor.weight_decay, OPTIM_NUMBER),
    FIELD(scale_parameter, adafactor.scale_parameter, OPTIM_FLAG),
    FIELD(relative_step, adafactor.relative_step, OPTIM_FLAG),
    FIELD(warmup_init, adafactor.warmup_init, OPTIM_FLAG),
};
static const optim_value adafactor_values[] = {
    COUNT,
    ARRAY(exp_avg, CT_ADAFACTOR_AVG),
    SHAPED(exp_avg_sq_row, CT_ADAFACTOR_ROW, OPTIM_ROWS),
    SHAPED(exp_avg_sq_col, CT_ADAFACTOR_COL, OPTIM_COLS),
    ARRAY(exp_avg_sq, CT_ADAFACTOR_SQ),
    SHAPED(RMS, CT_ADAFACTOR_RMS, OPTIM_ONE),
};
_Static_assert(offsetof(ct_adafactor_config, eps2) ==
                   offsetof(ct_adafactor_config, eps) + sizeof(double),
               "eps is read as a pair");

static const optim_field lamb_fields[] = {
    FIELD(lr, lamb.lr, OPTIM_NUMBER),
    FIELD(betas, lamb.beta1, OPTIM_PAIR),
    FIELD(eps, lamb.eps, OPTIM_NUMBER),
    FIELD(weight_decay, lamb.weight_decay, OPTIM_NUMBER),
    FIELD(max_grad_norm, lamb.max_grad_norm, OPTIM_NUMBER),
    FIELD(bias_correction, lamb.bias_correction, OPTIM_FLAG),
    FIELD(grad_averaging, lamb.grad_averaging, OPTIM_FLAG),
    FIELD(adam_w_mode, lamb.decoupled, OPTIM_FLAG),
    FIELD(use_nvlamb, lamb.trust_always, OPTIM_FLAG),
};
static const optim_value lamb_values[] = {
    COUNT,
    ARRAY(exp_avg, 0),
    ARRAY(exp_avg_sq, 1),
};

static const optim_field lars_fields[] = {
    FIELD(lr, lars.lr, OPTIM_NUMBER),
    FIELD(momentum, lars.momentum, OPTIM_NUMBER),
    FIELD(dampening, lars.dampening, OPTIM_NUMBER),
    FIELD(weight_decay, lars.weight_decay, OPTIM_NUMBER),
    FIELD(trust_coefficient, lars.trust, OPTIM_NUMBER),
    FIELD(eps, lars.eps, OPTIM_NUMBER),
    FIELD(nesterov, lars.nesterov, OPTIM_FLAG),
    FIELD(clip, lars.clip, OPTIM_FLAG),
};
static const optim_value lars_values[] = {
    ARRAY(momentum_buffer, 0),
};

static const char *const muon_adjusts[CT_MUON_ADJUST_COUNT + 1] = {
    [CT_MUON_ORIGINAL] = "original",
    [CT_MUON_MATCH_RMS_ADAMW] = "match_rms_adamw",
};
static const optim_field muon_fields[] = {
    FIELD(lr, muon.lr, OPTIM_NUMBER),
    FIELD(weight_decay, muon.weight_decay, OPTIM_NUMBER),
    FIELD(momentum, muon.momentum, OPTIM_NUMBER),
    FIELD(nesterov, muon.nesterov, OPTIM_FLAG),
    FIELD(ns_coefficients, muon.coefficients, OPTIM_TRIPLE),
    FIELD(eps, muon.eps, OPTIM_NUMBER),
    FIELD(ns_steps, muon.steps, OPTIM_NUMBER),
    CHOICE(adjust_lr_fn, muon.adjust, muon_adjusts),
};
static const optim_value muon_values[] = {
    ARRAY(momentum_buffer, 0),
};
_Static_assert(sizeof(ct_muon_adjust) == sizeof(int), "a choice is read as an int");

const optim_spec optim_specs[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADAMW_8BIT] = SPEC(adamw_8bit, two_8bit),
    [CT_OPTIM_ADEMAMIX_8BIT] = SPEC(ademamix, ademamix_8bit),
    [CT_OPTIM_LION_8BIT] = SPEC(lion, one_8bit),
    [CT_OPTIM_ADADELTA] = SPEC(adadelta, adadelta),
    [CT_OPTIM_ADAGRAD] = SPEC(adagrad, adagrad),
    [CT_OPTIM_ADAM] = SPEC(adam, adam),
    [CT_OPTIM_ADAMAX] = SPEC(adamax, adamax),
    [CT_OPTIM_ADAMW] = SPEC(adamw, adam),
    [CT_OPTIM_ADEMAMIX] = SPEC(ademamix, ademamix),
    [CT_OPTIM_FAIRSEQ_ADAM] = SPEC(fairseq_adam, adam),
    [CT_OPTIM_FAIRSEQ_ADAMAX] = SPEC(fairseq_adamax, adamax),
    [CT_OPTIM_LION] = SPEC(lion, lion),
    [CT_OPTIM_NADAM] = SPEC(nadam, nadam),
    [CT_OPTIM_NAG] = SPEC(nag, nag),
    [CT_OPTIM_RADAM] = SPEC(radam, adam),
    [CT_OPTIM_RMSPROP] = SPEC(rmsprop, rmsprop),
    [CT_OPTIM_SCHEDULE_FREE_ADAMW] = SPEC(schedule_free_adamw, schedule_free_adamw),
    [CT_OPTIM_SCHEDULE_FREE_RADAM] = SPEC(schedule_free_radam, schedule_free_adamw),
    [CT_OPTIM_SCHEDULE_FREE_SGD] = SPEC(schedule_free_sgd, schedule_free_sgd),
    [CT_OPTIM_SGD] = SPEC(sgd, sgd),
    [CT_OPTIM_ADAFACTOR] = SPEC_OF(adafactor, adafactor, true, false),
    [CT_OPTIM_LAMB] = SPEC_OF(lamb, lamb, false, true),
    [CT_OPTIM_LARS] = SPEC(lars, lars),
    [CT_OPTIM_MUON] = SPEC_OF(muon, muon, true, false),
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
        read_fields(self->state, group, g, optim_common_fields, optim_n_common_fields,
                    &read) < 0) {
        return -1;
    }
    /* Here and not in the update alone, by when state has been made. */
    ct_error err;
    if (ct_optim_check_group(&read, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (spec->clips) {
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

/* ---- what an update changes in a group --------------------------------------------
 */

static int
write_field(const ctpy_state *state, PyObject *group, const optim_field *field,
            const ct_optim_group *from)
{
    const void *member = (const char *)from + field->member;
    PyObject *value = field->type == OPTIM_COUNT
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
        if (fields[i].live) {
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
    return from->stochastic ? write_fields(self->state, group, optim_common_fields,
                                           optim_n_common_fields, from)
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

/* ---- Adam and its kin -------------------------------------------------------------
 */

#define PAIRED(config)                                                                 \
    _Static_assert(offsetof(config, beta2) ==                                          \
                       offsetof(config, beta1) + sizeof(double),                       \
                   "betas are read as a pair")
PAIRED(ct_adamax_config);
PAIRED(ct_adamw_config);
PAIRED(ct_lamb_config);
PAIRED(ct_lion_config);
PAIRED(ct_nadam_config);
PAIRED(ct_schedule_free_config);
