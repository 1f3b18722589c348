#include "binding/optim/groups.h"

#define MEMBER(key, of)                                                                \
    .name = offsetof(ctpy_state, str_##key), .member = offsetof(ct_optim_group, of)
#define FIELD(key, of, its_type) {MEMBER(key, of), .type = (its_type)}
#define LIVE(key, of, its_type) {MEMBER(key, of), .type = (its_type), .live = true}
#define CHOICE(key, of, names)                                                         \
    {MEMBER(key, of), .type = OPTIM_CHOICE, .choices = (names)}
#define REFUSED(key, its_type)                                                         \
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
    REFUSED(capturable, OPTIM_NEVER),
    REFUSED(differentiable, OPTIM_NEVER),
};
const size_t optim_n_common_fields =
    sizeof optim_common_fields / sizeof *optim_common_fields;

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

/* ---- SGD and NAG ------------------------------------------------------------------
 */

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

/* ---- Adagrad, Adadelta, RMSprop, Lion ---------------------------------------------
 */

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

/* ---- schedule-free ----------------------------------------------------------------
 */

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

/* ---- with state of 8 bits ---------------------------------------------------------
 */

static const optim_field adamw_8bit_fields[] = {
    FIELD(lr, adamw.lr, OPTIM_NUMBER),
    FIELD(betas, adamw.beta1, OPTIM_PAIR),
    FIELD(eps, adamw.eps, OPTIM_NUMBER),
    FIELD(weight_decay, adamw.weight_decay, OPTIM_NUMBER),
    REFUSED(amsgrad, OPTIM_NEVER),
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

/* ---- those that look at a whole parameter ----------------------------------------
 */

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
