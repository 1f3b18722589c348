/* The kinds of optimizers: their hyperparameters, with names and ranges, and the arrays
 * of their state.
 *
 * Each list of options or of state is a macro, which the core expands to the ranges
 * that it checks and the binding to the keys of param_groups and of state[param]. A new
 * kind that works element by element is a struct, a list and a line of CT_OPTIM_KINDS
 * here, and the constants of a step in core/optim/kinds.c. */
#ifndef CORE_OPTIM_KINDS_H
#define CORE_OPTIM_KINDS_H

#include "core/base/status.h"
#include "core/device/update.h"

#include <math.h>

CT_BEGIN_DECLS

/* Ranges [low, below) of an option's numbers; an infinite `below` allows Inf. */
#define CT_ANY -INFINITY, INFINITY
#define CT_FROM_0 0.0, INFINITY
#define CT_ABOVE_0 0x1p-1074, INFINITY
#define CT_UP_TO_0 -INFINITY, 0x1p-1074
#define CT_BELOW_1 0.0, 1.0
#define CT_UP_TO_1 0.0, 0x1.0000000000001p0

/* An entry O(key, member of ct_optim_group, type, range) of a list of options; the
 * types are those of ct_option_type. */
typedef enum ct_option_type {
    CT_NUMBER,   /* a double; required */
    CT_PAIR,     /* two consecutive doubles; required */
    CT_TRIPLE,   /* three of them */
    CT_OPTIONAL, /* a double; NaN where the key is missing or None */
    CT_CHOICE,   /* an int: the place in ct_muon_adjust_names, 0 for None; required */
    CT_FLAG,     /* a bool; false where the key is missing */
    CT_FLAG_ON,  /* a bool; true where the key is missing */
    CT_COUNT,    /* an integer from 0 to 2^64 - 1; 0 where the key is missing */
    CT_LIMIT,    /* a max_norm as ct_grad_group has it; 0 where the key is missing */
    CT_NEVER,    /* an option of torch's that is missing here: false or missing */
    /* The same, written back to the group after an update. */
    CT_LIVE_NUMBER,
    CT_LIVE_OPTIONAL,
    CT_LIVE_COUNT
} ct_option_type;

/* An entry S(key, shape, array, n) of a list of state: state[array] and the n - 1
 * arrays after it; an array of -1 belongs to no rule. */
typedef enum ct_state_shape {
    CT_STATE_LIKE,      /* as the parameter */
    CT_STATE_ROWS,      /* an element for each row of the last two dimensions */
    CT_STATE_COLS,      /* an element for each column of each matrix */
    CT_STATE_ONE,       /* one element; the first with array -1 counts updates */
    CT_STATE_PRODUCT,   /* one float32 or float64: the parameter's product */
    CT_STATE_QUANTIZED, /* as the parameter, of a float dtype or quantized to 8 bits */
    CT_STATE_SCALES,    /* of quantized state: a float32 for each block */
    CT_STATE_MAP,       /* of quantized state: the 256 numbers behind the bytes */
    CT_STATE_COMPACT,   /* as the parameter, int8 for array 0 and uint8 for array 1 */
    CT_STATE_GROUPS,    /* of compact state: a float16 scale for each group */
    CT_STATE_CORRECTION /* as the parameter, int8: of bfloat16 with 24-bit masters */
} ct_state_shape;

/* ---- Adam and its variants ------------------------------------------------------- */

/* AdamW, Adam, fairseq's Adam and RAdam. */
typedef struct ct_adamw_config {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    bool decoupled; /* shrink the parameter, as AdamW; else add the weight decay to the
                     * gradient, as Adam */
    bool amsgrad;   /* divide by the largest second moment so far */
} ct_adamw_config;

/* NOLINTBEGIN(bugprone-macro-parentheses): config is the name of a member */
#define CT_ADAM_NUMBERS(O, config)                                                     \
    O(lr, config.lr, NUMBER, CT_FROM_0)                                                \
    O(betas, config.beta1, PAIR, CT_BELOW_1)                                           \
    O(eps, config.eps, NUMBER, CT_FROM_0)                                              \
    O(weight_decay, config.weight_decay, NUMBER, CT_FROM_0)
/* NOLINTEND(bugprone-macro-parentheses) */
#define CT_ADAMW_OPTIONS(O)                                                            \
    CT_ADAM_NUMBERS(O, adamw)                                                          \
    O(amsgrad, adamw.amsgrad, FLAG, CT_ANY)                                            \
    O(decoupled_weight_decay, adamw.decoupled, FLAG_ON, CT_ANY)
#define CT_ADAM_OPTIONS(O)                                                             \
    CT_ADAM_NUMBERS(O, adamw)                                                          \
    O(amsgrad, adamw.amsgrad, FLAG, CT_ANY)                                            \
    O(decoupled_weight_decay, adamw.decoupled, FLAG, CT_ANY)
#define CT_FAIRSEQ_ADAM_OPTIONS(O)                                                     \
    CT_ADAM_NUMBERS(O, adamw)                                                          \
    O(amsgrad, adamw.amsgrad, FLAG, CT_ANY)
#define CT_RADAM_OPTIONS(O)                                                            \
    CT_ADAM_NUMBERS(O, adamw)                                                          \
    O(decoupled_weight_decay, adamw.decoupled, FLAG, CT_ANY)
#define CT_ADAMW_8BIT_OPTIONS(O)                                                       \
    CT_ADAM_NUMBERS(O, adamw)                                                          \
    O(amsgrad, adamw.amsgrad, NEVER, CT_ANY)                                           \
    O(decoupled_weight_decay, adamw.decoupled, FLAG_ON, CT_ANY)
#define CT_ADAM_STATE(S)                                                               \
    S(step, ONE, -1, 0)                                                                \
    S(exp_avg, LIKE, 0, 1) S(exp_avg_sq, LIKE, 1, 1) S(max_exp_avg_sq, LIKE, 2, 1)

typedef struct ct_nadam_config {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    double momentum_decay; /* how fast the momentum grows from beta1 / 2 to beta1 */
    bool decoupled;        /* as in ct_adamw_config */
} ct_nadam_config;

#define CT_NADAM_OPTIONS(O)                                                            \
    CT_ADAM_NUMBERS(O, nadam)                                                          \
    O(momentum_decay, nadam.momentum_decay, NUMBER, CT_FROM_0)                         \
    O(decoupled_weight_decay, nadam.decoupled, FLAG, CT_ANY)
#define CT_NADAM_STATE(S)                                                              \
    S(step, ONE, -1, 0)                                                                \
    S(mu_product, PRODUCT, -1, 0) S(exp_avg, LIKE, 0, 1) S(exp_avg_sq, LIKE, 1, 1)

typedef struct ct_adamax_config {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    bool bias_correction; /* fairseq's alone: torch always corrects */
} ct_adamax_config;

#define CT_ADAMAX_OPTIONS(O) CT_ADAM_NUMBERS(O, adamax)
#define CT_FAIRSEQ_ADAMAX_OPTIONS(O)                                                   \
    CT_ADAM_NUMBERS(O, adamax)                                                         \
    O(bias_correction, adamax.bias_correction, FLAG_ON, CT_ANY)
#define CT_ADAMAX_STATE(S)                                                             \
    S(step, ONE, -1, 0) S(exp_avg, LIKE, 0, 1) S(exp_inf, LIKE, 1, 1)

typedef struct ct_ademamix_config {
    double lr;
    double beta1, beta2, beta3; /* of the fast average, second moment, slow average */
    double alpha;               /* the weight of the slow average */
    double t_alpha; /* updates over which alpha grows from 0; NaN: it does not */
    double t_beta3; /* updates over which beta3 grows from beta1; NaN: it does not */
    double eps;
    double weight_decay; /* decoupled */
} ct_ademamix_config;

#define CT_ADEMAMIX_OPTIONS(O)                                                         \
    O(lr, ademamix.lr, NUMBER, CT_FROM_0)                                              \
    O(betas, ademamix.beta1, TRIPLE, CT_BELOW_1)                                       \
    O(alpha, ademamix.alpha, NUMBER, CT_FROM_0)                                        \
    O(t_alpha, ademamix.t_alpha, OPTIONAL, CT_FROM_0)                                  \
    O(t_beta3, ademamix.t_beta3, OPTIONAL, CT_FROM_0)                                  \
    O(eps, ademamix.eps, NUMBER, CT_FROM_0)                                            \
    O(weight_decay, ademamix.weight_decay, NUMBER, CT_FROM_0)
#define CT_ADEMAMIX_STATE(S)                                                           \
    S(step, ONE, -1, 0)                                                                \
    S(exp_avg_fast, LIKE, 0, 1) S(exp_avg_slow, LIKE, 1, 1) S(exp_avg_sq, LIKE, 2, 1)

/* ---- SGD, NAG, Lion -------------------------------------------------------------- */

typedef struct ct_sgd_config {
    double lr;
    double momentum;     /* 0 needs no state */
    double dampening;    /* of the gradient in the momentum buffer */
    double weight_decay; /* added to the gradient */
    bool nesterov;       /* needs momentum > 0 and dampening 0 */
} ct_sgd_config;

#define CT_SGD_OPTIONS(O)                                                              \
    O(lr, sgd.lr, NUMBER, CT_FROM_0)                                                   \
    O(momentum, sgd.momentum, NUMBER, CT_FROM_0)                                       \
    O(dampening, sgd.dampening, NUMBER, CT_ANY)                                        \
    O(weight_decay, sgd.weight_decay, NUMBER, CT_FROM_0)                               \
    O(nesterov, sgd.nesterov, FLAG, CT_ANY)
#define CT_SGD_STATE(S) S(momentum_buffer, LIKE, 0, 1)

/* Nesterov's accelerated gradient in fairseq's form. */
typedef struct ct_nag_config {
    double lr;
    double lr_old; /* of the last update; NaN before the first one */
    double momentum;
    double weight_decay; /* decoupled */
} ct_nag_config;

#define CT_NAG_OPTIONS(O)                                                              \
    O(lr, nag.lr, NUMBER, CT_FROM_0)                                                   \
    O(momentum, nag.momentum, NUMBER, CT_FROM_0)                                       \
    O(weight_decay, nag.weight_decay, NUMBER, CT_FROM_0)                               \
    O(lr_old, nag.lr_old, LIVE_OPTIONAL, CT_ANY)

typedef struct ct_lion_config {
    double lr;
    double beta1, beta2; /* of the direction, of the moment */
    double weight_decay; /* decoupled */
} ct_lion_config;

#define CT_LION_OPTIONS(O)                                                             \
    O(lr, lion.lr, NUMBER, CT_FROM_0)                                                  \
    O(betas, lion.beta1, PAIR, CT_BELOW_1)                                             \
    O(weight_decay, lion.weight_decay, NUMBER, CT_FROM_0)
#define CT_LION_STATE(S) S(exp_avg, LIKE, 0, 1)

/* ---- Adagrad, Adadelta, RMSprop -------------------------------------------------- */

typedef struct ct_adagrad_config {
    double lr;
    double lr_decay; /* the learning rate is lr / (1 + (step - 1) * lr_decay) */
    double eps;
    double weight_decay; /* added to the gradient */
} ct_adagrad_config;

#define CT_ADAGRAD_OPTIONS(O)                                                          \
    O(lr, adagrad.lr, NUMBER, CT_FROM_0)                                               \
    O(lr_decay, adagrad.lr_decay, NUMBER, CT_FROM_0)                                   \
    O(eps, adagrad.eps, NUMBER, CT_FROM_0)                                             \
    O(weight_decay, adagrad.weight_decay, NUMBER, CT_FROM_0)
#define CT_ADAGRAD_STATE(S) S(step, ONE, -1, 0) S(sum, LIKE, 0, 1)

typedef struct ct_adadelta_config {
    double lr;
    double rho; /* of both averages; torch allows 1 */
    double eps;
    double weight_decay; /* added to the gradient */
} ct_adadelta_config;

#define CT_ADADELTA_OPTIONS(O)                                                         \
    O(lr, adadelta.lr, NUMBER, CT_FROM_0)                                              \
    O(rho, adadelta.rho, NUMBER, CT_UP_TO_1)                                           \
    O(eps, adadelta.eps, NUMBER, CT_FROM_0)                                            \
    O(weight_decay, adadelta.weight_decay, NUMBER, CT_FROM_0)
#define CT_ADADELTA_STATE(S)                                                           \
    S(step, ONE, -1, 0) S(square_avg, LIKE, 0, 1) S(acc_delta, LIKE, 1, 1)

typedef struct ct_rmsprop_config {
    double lr;
    double alpha; /* of the averages, usually below 1 */
    double eps;
    double weight_decay; /* added to the gradient */
    double momentum;     /* 0 needs no buffer */
    bool centered;       /* divide by the deviation, not by the root mean square */
} ct_rmsprop_config;

#define CT_RMSPROP_OPTIONS(O)                                                          \
    O(lr, rmsprop.lr, NUMBER, CT_FROM_0)                                               \
    O(alpha, rmsprop.alpha, NUMBER, CT_FROM_0)                                         \
    O(eps, rmsprop.eps, NUMBER, CT_FROM_0)                                             \
    O(weight_decay, rmsprop.weight_decay, NUMBER, CT_FROM_0)                           \
    O(momentum, rmsprop.momentum, NUMBER, CT_FROM_0)                                   \
    O(centered, rmsprop.centered, FLAG, CT_ANY)
#define CT_RMSPROP_STATE(S)                                                            \
    S(step, ONE, -1, 0)                                                                \
    S(square_avg, LIKE, 0, 1) S(momentum_buffer, LIKE, 1, 1) S(grad_avg, LIKE, 2, 1)

/* ---- schedule-free --------------------------------------------------------------- */

/* AdamW, RAdam and SGD; SGD takes beta1 for its momentum and has no beta2 and eps. */
typedef struct ct_schedule_free_config {
    double lr;
    double beta1, beta2; /* of the interpolation, of the second moment */
    double eps;
    double weight_decay; /* of y, added to the normalised gradient */
    double r;            /* update k weighs k^r in the average ... */
    double
        weight_lr_power; /* ... times the largest learning rate so far to this power */
    double warmup_steps; /* updates over which the learning rate grows linearly */
    bool silent_sgd_phase; /* of RAdam: no movement before the rectification begins */
    bool train_mode;       /* the parameters hold y: an update needs it */
    /* Written by updates; all 0 before the first. */
    uint64_t k;          /* number of updates */
    double weight_sum;   /* of the weights in the average */
    double lr_max;       /* the largest learning rate */
    double scheduled_lr; /* the last learning rate, warm-up included */
} ct_schedule_free_config;

#define CT_SCHEDULE_FREE_OPTIONS(O)                                                    \
    O(lr, schedule_free.lr, NUMBER, CT_FROM_0)                                         \
    O(weight_decay, schedule_free.weight_decay, NUMBER, CT_FROM_0)                     \
    O(r, schedule_free.r, NUMBER, CT_FROM_0)                                           \
    O(weight_lr_power, schedule_free.weight_lr_power, NUMBER, CT_FROM_0)               \
    O(train_mode, schedule_free.train_mode, FLAG, CT_ANY)                              \
    O(k, schedule_free.k, LIVE_COUNT, CT_ANY)                                          \
    O(weight_sum, schedule_free.weight_sum, LIVE_NUMBER, CT_FROM_0)                    \
    O(lr_max, schedule_free.lr_max, LIVE_NUMBER, CT_ANY)                               \
    O(scheduled_lr, schedule_free.scheduled_lr, LIVE_NUMBER, CT_ANY)
#define CT_SCHEDULE_FREE_ADAM_OPTIONS(O)                                               \
    CT_SCHEDULE_FREE_OPTIONS(O)                                                        \
    O(betas, schedule_free.beta1, PAIR, CT_BELOW_1)                                    \
    O(eps, schedule_free.eps, NUMBER, CT_FROM_0)
#define CT_SCHEDULE_FREE_ADAMW_OPTIONS(O)                                              \
    CT_SCHEDULE_FREE_ADAM_OPTIONS(O)                                                   \
    O(warmup_steps, schedule_free.warmup_steps, NUMBER, CT_FROM_0)
#define CT_SCHEDULE_FREE_RADAM_OPTIONS(O)                                              \
    CT_SCHEDULE_FREE_ADAM_OPTIONS(O)                                                   \
    O(silent_sgd_phase, schedule_free.silent_sgd_phase, FLAG, CT_ANY)
#define CT_SCHEDULE_FREE_SGD_OPTIONS(O)                                                \
    CT_SCHEDULE_FREE_OPTIONS(O)                                                        \
    O(warmup_steps, schedule_free.warmup_steps, NUMBER, CT_FROM_0)                     \
    O(momentum, schedule_free.beta1, NUMBER, CT_BELOW_1)
#define CT_SCHEDULE_FREE_ADAMW_STATE(S) S(z, LIKE, 0, 1) S(exp_avg_sq, LIKE, 1, 1)
#define CT_SCHEDULE_FREE_SGD_STATE(S) S(z, LIKE, 0, 1)

/* ---- rules that look at a whole parameter ---------------------------------------- */

/* A parameter's state arrays: ROW and COL with two dimensions or more, else SQ. */
enum {
    CT_ADAFACTOR_SQ,
    CT_ADAFACTOR_AVG,
    CT_ADAFACTOR_ROW,
    CT_ADAFACTOR_COL,
    CT_ADAFACTOR_RMS
};

typedef struct ct_adafactor_config {
    double lr;             /* not used with relative_step */
    double eps;            /* added to the squared gradient */
    double eps2;           /* the least root mean square of a parameter */
    double clip_threshold; /* the root mean square that an update may have */
    double decay_rate;     /* the second moment decays by 1 - step^decay_rate */
    double beta1;          /* NaN: there is no first moment */
    double weight_decay;
    bool scale_parameter; /* the learning rate, by the parameter's root mean square */
    bool relative_step;   /* the learning rate is 1 / sqrt(step), at most 0.01 ... */
    bool warmup_init;     /* ... or at most 1e-6 * step */
} ct_adafactor_config;

#define CT_ADAFACTOR_OPTIONS(O)                                                        \
    O(lr, adafactor.lr, OPTIONAL, CT_FROM_0)                                           \
    O(eps, adafactor.eps, PAIR, CT_FROM_0)                                             \
    O(clip_threshold, adafactor.clip_threshold, NUMBER, CT_ABOVE_0)                    \
    O(decay_rate, adafactor.decay_rate, NUMBER, CT_UP_TO_0)                            \
    O(beta1, adafactor.beta1, OPTIONAL, CT_BELOW_1)                                    \
    O(weight_decay, adafactor.weight_decay, NUMBER, CT_FROM_0)                         \
    O(scale_parameter, adafactor.scale_parameter, FLAG, CT_ANY)                        \
    O(relative_step, adafactor.relative_step, FLAG, CT_ANY)                            \
    O(warmup_init, adafactor.warmup_init, FLAG, CT_ANY)
#define CT_ADAFACTOR_STATE(S)                                                          \
    S(step, ONE, -1, 0)                                                                \
    S(exp_avg, LIKE, CT_ADAFACTOR_AVG, 1)                                              \
    S(exp_avg_sq_row, ROWS, CT_ADAFACTOR_ROW, 1)                                       \
    S(exp_avg_sq_col, COLS, CT_ADAFACTOR_COL, 1)                                       \
    S(exp_avg_sq, LIKE, CT_ADAFACTOR_SQ, 1) S(RMS, ONE, CT_ADAFACTOR_RMS, 1)

typedef struct ct_lamb_config {
    double lr;
    double beta1, beta2;
    double eps;
    double weight_decay;
    double max_grad_norm; /* of all gradients of the kind together; 0: not clipped */
    bool bias_correction;
    bool grad_averaging; /* the average gets 1 - beta1 of the gradient, not all */
    bool decoupled;      /* the decay is a part of the direction, not of the gradient */
    bool trust_always;   /* NVLAMB: the norms count without weight decay too */
} ct_lamb_config;

#define CT_LAMB_OPTIONS(O)                                                             \
    CT_ADAM_NUMBERS(O, lamb)                                                           \
    O(max_grad_norm, lamb.max_grad_norm, NUMBER, CT_FROM_0)                            \
    O(bias_correction, lamb.bias_correction, FLAG, CT_ANY)                             \
    O(grad_averaging, lamb.grad_averaging, FLAG, CT_ANY)                               \
    O(adam_w_mode, lamb.decoupled, FLAG, CT_ANY)                                       \
    O(use_nvlamb, lamb.trust_always, FLAG, CT_ANY)

typedef struct ct_lars_config {
    double lr;           /* > 0 with clip */
    double momentum;     /* 0 needs no state */
    double dampening;    /* of the gradient in the momentum buffer */
    double weight_decay; /* added to the gradient */
    double trust;        /* 0: plain SGD */
    double eps;          /* added to the norms in the denominator */
    bool nesterov;       /* needs momentum > 0 and dampening 0 */
    bool clip;           /* lr is an upper bound, as in apex's LARC, not a factor */
} ct_lars_config;

#define CT_LARS_OPTIONS(O)                                                             \
    O(lr, lars.lr, NUMBER, CT_FROM_0)                                                  \
    O(momentum, lars.momentum, NUMBER, CT_FROM_0)                                      \
    O(dampening, lars.dampening, NUMBER, CT_ANY)                                       \
    O(weight_decay, lars.weight_decay, NUMBER, CT_FROM_0)                              \
    O(trust_coefficient, lars.trust, NUMBER, CT_FROM_0)                                \
    O(eps, lars.eps, NUMBER, CT_FROM_0)                                                \
    O(nesterov, lars.nesterov, FLAG, CT_ANY)                                           \
    O(clip, lars.clip, FLAG, CT_ANY)

/* How the learning rate depends on the shape. */
typedef enum ct_muon_adjust {
    CT_MUON_ORIGINAL,        /* sqrt(max(1, rows / cols)) */
    CT_MUON_MATCH_RMS_ADAMW, /* 0.2 * sqrt(max(rows, cols)) */
} ct_muon_adjust;

extern const char *const ct_muon_adjust_names[]; /* ends with NULL */

typedef struct ct_muon_config {
    double lr;
    double weight_decay; /* decoupled, of the learning rate before its adjustment */
    double momentum;
    double coefficients[3]; /* of the quintic, finite */
    double eps;             /* the least norm to divide by */
    double steps;           /* of Newton-Schulz, an integer */
    bool nesterov;
    ct_muon_adjust adjust;
} ct_muon_config;

#define CT_MUON_OPTIONS(O)                                                             \
    O(lr, muon.lr, NUMBER, CT_FROM_0)                                                  \
    O(weight_decay, muon.weight_decay, NUMBER, CT_FROM_0)                              \
    O(momentum, muon.momentum, NUMBER, CT_UP_TO_1)                                     \
    O(nesterov, muon.nesterov, FLAG, CT_ANY)                                           \
    O(ns_coefficients, muon.coefficients, TRIPLE, CT_ANY)                              \
    O(eps, muon.eps, NUMBER, CT_ABOVE_0)                                               \
    O(ns_steps, muon.steps, NUMBER, 0.0, 100.0)                                        \
    O(adjust_lr_fn, muon.adjust, CHOICE, CT_ANY)

/* ---- 8-bit state, in the layout of bitsandbytes ---------------------------------- */

#define CT_8BIT(S, number, array, n)                                                   \
    S(state##number, QUANTIZED, array, n)                                              \
    S(absmax##number, SCALES, array, n) S(qmap##number, MAP, array, n)
#define CT_ONE_8BIT_STATE(S) S(step, ONE, -1, 0) CT_8BIT(S, 1, 0, 1)
#define CT_TWO_8BIT_STATE(S) CT_ONE_8BIT_STATE(S) CT_8BIT(S, 2, 1, 1)
#define CT_ADEMAMIX_8BIT_STATE(S)                                                      \
    S(step, ONE, -1, 0) CT_8BIT(S, 1, 0, 2) CT_8BIT(S, 2, 2, 1)

/* ---- compact state --------------------------------------------------------------- */

/* NOLINTBEGIN(bugprone-macro-parentheses): config is the name of a member */
#define CT_MASTER_BITS(O)                                                              \
    O(master_weight_bits, master_weight_bits, OPTIONAL, 24.0, 25.0)
/* NOLINTEND(bugprone-macro-parentheses) */
#define CT_ADAMW_COMPACT_OPTIONS(O) CT_ADAMW_8BIT_OPTIONS(O) CT_MASTER_BITS(O)
#define CT_LION_COMPACT_OPTIONS(O) CT_LION_OPTIONS(O) CT_MASTER_BITS(O)
#define CT_COMPACT_ARRAY(S, key, array)                                                \
    S(key, COMPACT, array, 1) S(key##_scale, GROUPS, array, 1)
#define CT_LION_COMPACT_STATE(S)                                                       \
    S(step, ONE, -1, 0) CT_COMPACT_ARRAY(S, exp_avg, 0) S(error_bits, CORRECTION, -1, 0)
#define CT_ADAMW_COMPACT_STATE(S)                                                      \
    CT_LION_COMPACT_STATE(S) CT_COMPACT_ARRAY(S, exp_avg_sq, 1)

/* ---- all kinds ------------------------------------------------------------------- */

/* KIND(id, name, options, state, traits): traits are a sum of ct_optim_trait. */
typedef enum ct_optim_trait {
    CT_TRAIT_SHAPED = 1, /* rows and columns matter: C order is needed */
    CT_TRAIT_CLIPS = 2   /* max_grad_norm is its own option, not the group's limit */
} ct_optim_trait;

#define CT_OPTIM_KINDS(KIND)                                                           \
    KIND(ADAMW, adamw, ADAMW, ADAM, 0)                                                 \
    KIND(SGD, sgd, SGD, SGD, 0)                                                        \
    KIND(ADADELTA, adadelta, ADADELTA, ADADELTA, 0)                                    \
    KIND(ADAGRAD, adagrad, ADAGRAD, ADAGRAD, 0)                                        \
    KIND(ADAM, adam, ADAM, ADAM, 0)                                                    \
    KIND(ADAMAX, adamax, ADAMAX, ADAMAX, 0)                                            \
    KIND(ADEMAMIX, ademamix, ADEMAMIX, ADEMAMIX, 0)                                    \
    KIND(FAIRSEQ_ADAM, fairseq_adam, FAIRSEQ_ADAM, ADAM, 0)                            \
    KIND(FAIRSEQ_ADAMAX, fairseq_adamax, FAIRSEQ_ADAMAX, ADAMAX, 0)                    \
    KIND(LION, lion, LION, LION, 0)                                                    \
    KIND(NADAM, nadam, NADAM, NADAM, 0)                                                \
    KIND(NAG, nag, NAG, SGD, 0)                                                        \
    KIND(RADAM, radam, RADAM, ADAM, 0)                                                 \
    KIND(RMSPROP, rmsprop, RMSPROP, RMSPROP, 0)                                        \
    KIND(SCHEDULE_FREE_ADAMW, schedule_free_adamw, SCHEDULE_FREE_ADAMW,                \
         SCHEDULE_FREE_ADAMW, 0)                                                       \
    KIND(SCHEDULE_FREE_RADAM, schedule_free_radam, SCHEDULE_FREE_RADAM,                \
         SCHEDULE_FREE_ADAMW, 0)                                                       \
    KIND(SCHEDULE_FREE_SGD, schedule_free_sgd, SCHEDULE_FREE_SGD, SCHEDULE_FREE_SGD,   \
         0)                                                                            \
    KIND(ADAFACTOR, adafactor, ADAFACTOR, ADAFACTOR, CT_TRAIT_SHAPED)                  \
    KIND(LAMB, lamb, LAMB, ADAM, CT_TRAIT_CLIPS)                                       \
    KIND(LARS, lars, LARS, SGD, 0)                                                     \
    KIND(MUON, muon, MUON, SGD, CT_TRAIT_SHAPED)                                       \
    KIND(ADAMW_8BIT, adamw_8bit, ADAMW_8BIT, TWO_8BIT, 0)                              \
    KIND(ADEMAMIX_8BIT, ademamix_8bit, ADEMAMIX, ADEMAMIX_8BIT, 0)                     \
    KIND(LION_8BIT, lion_8bit, LION, ONE_8BIT, 0)                                      \
    KIND(ADAMW_COMPACT, adamw_compact, ADAMW_COMPACT, ADAMW_COMPACT, 0)                \
    KIND(LION_COMPACT, lion_compact, LION_COMPACT, LION_COMPACT, 0)

typedef enum ct_optim_kind {
#define KIND(id, name, options, state, traits) CT_OPTIM_##id,
    CT_OPTIM_KINDS(KIND)
#undef KIND
    CT_OPTIM_KIND_COUNT
} ct_optim_kind;

typedef struct ct_optim_group {
    ct_optim_kind kind;
    union {
        ct_adadelta_config adadelta;
        ct_adagrad_config adagrad;
        ct_adamax_config adamax; /* and of fairseq_adamax */
        ct_adamw_config adamw;   /* and of adam, fairseq_adam, radam and adamw_... */
        ct_ademamix_config ademamix; /* and of ademamix_8bit */
        ct_lion_config lion;         /* and of lion_... */
        ct_nadam_config nadam;
        ct_nag_config nag;
        ct_rmsprop_config rmsprop;
        ct_schedule_free_config schedule_free; /* of all three */
        ct_adafactor_config adafactor;
        ct_lamb_config lamb;
        ct_lars_config lars;
        ct_muon_config muon;
        ct_sgd_config sgd;
    };
    double max_norm; /* as in ct_grad_group */
    bool maximize;   /* step up the gradient */
    bool capturable; /* updates are for ct_capture; set for all groups or for none */
    bool stochastic; /* round BF16 stochastically, with this key: */
    ct_rounding rounding;
    /* Of bf16 and fp16 parameters, for the caller that fills in ct_optim_param: an fp32
     * copy is updated; the state is fp32. */
    bool master_weights, fp32_state;
    double master_weight_bits; /* of compact state: 24, or NaN for no corrections */
} ct_optim_group;

struct ct_optim_param; /* core/optim/optim.h */

/* The functions in which kinds differ, for core/optim/optim.c. */
typedef struct ct_optim_ops {
    ct_rule (*rule)(const ct_optim_group *group);
    /* The parameter's state arrays that the rule works on, in the rule's order; bit k
     * stands for state[k]. */
    unsigned (*states)(const ct_optim_group *group);
    /* Parameters of a group with the same key have the same constants. */
    uint64_t (*key)(const struct ct_optim_param *param);
    void (*coef)(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                 double grad_scale);
    /* The rest may be NULL. The constants of one parameter alone, and their change by
     * an update. */
    void (*complete)(ct_rule_coef *coef, const ct_optim_group *group,
                     const struct ct_optim_param *param);
    void (*count)(const ct_optim_group *group, const struct ct_optim_param *param);
    void (*advance)(ct_optim_group *group); /* after an update */
    /* The arrays of a parameter, where these depend on the shape; NULL: states. */
    unsigned (*arrays)(const ct_optim_group *group, const struct ct_optim_param *param);
    /* CT_EINVAL names the fault of parameter i, or of options beyond their ranges. */
    ct_status (*check)(const struct ct_optim_param *param, size_t i, ct_error *err);
    ct_status (*check_options)(const ct_optim_group *group, ct_error *err);
} ct_optim_ops;

extern const ct_optim_ops ct_optim_kinds[CT_OPTIM_KIND_COUNT];

const char *ct_optim_kind_name(ct_optim_kind kind); /* "adamw", "sgd", ... */

/* The kind of that name, or CT_OPTIM_KIND_COUNT. */
ct_optim_kind ct_optim_kind_from_name(const char *name);

/* CT_EINVAL names an option that is out of its range. */
CT_NODISCARD ct_status ct_optim_check_group(const ct_optim_group *group, ct_error *err);

/* The factor of a matrix's learning rate. */
double ct_muon_lr_factor(ct_muon_adjust adjust, size_t rows, size_t cols);

CT_END_DECLS

#endif
