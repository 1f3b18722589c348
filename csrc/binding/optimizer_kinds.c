#include "binding/optimizer_kinds.h"

#define FIELD(key, member, type)                                                       \
    {offsetof(ctpy_state, str_##key), offsetof(ct_optim_group, member), type}
#define REFUSED(key, type) {offsetof(ctpy_state, str_##key), 0, type}
#define COUNT {offsetof(ctpy_state, str_step), " state 'step'", -1}
#define ARRAY(key, array) {offsetof(ctpy_state, str_##key), " state '" #key "'", array}
#define SPEC(kind)                                                                     \
    {                                                                                  \
        .fields = kind##_fields,                                                       \
        .n_fields = sizeof kind##_fields / sizeof *kind##_fields,                      \
        .values = kind##_values,                                                       \
        .n_values = sizeof kind##_values / sizeof *kind##_values,                      \
    }

const optim_field optim_common_fields[] = {
    FIELD(maximize, maximize, OPTIM_FLAG),
    FIELD(master_weights, master_weights, OPTIM_FLAG),
    FIELD(fp32_state, fp32_state, OPTIM_FLAG),
    FIELD(stochastic_rounding, stochastic, OPTIM_FLAG),
    FIELD(rounding_seed, rounding.seed, OPTIM_COUNT),
    FIELD(rounding_step, rounding.step, OPTIM_COUNT),
    /* What torch's optimizers have and ours do not; it may come with a state_dict. */
    REFUSED(capturable, OPTIM_NEVER),
    REFUSED(differentiable, OPTIM_NEVER),
};
const size_t optim_n_common_fields =
    sizeof optim_common_fields / sizeof *optim_common_fields;

static const optim_field adamw_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    REFUSED(decoupled_weight_decay, OPTIM_ALWAYS),
    REFUSED(amsgrad, OPTIM_NEVER),
};
static const optim_value adamw_values[] = {
    COUNT,
    ARRAY(exp_avg, 0),
    ARRAY(exp_avg_sq, 1),
};
_Static_assert(offsetof(ct_adamw_config, beta2) ==
                   offsetof(ct_adamw_config, beta1) + sizeof(double),
               "betas are read as a pair");

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

const optim_spec optim_specs[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADAMW] = SPEC(adamw),
    [CT_OPTIM_SGD] = SPEC(sgd),
};
