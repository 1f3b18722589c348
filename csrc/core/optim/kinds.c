/* The table of optimizers: which rule and which state arrays the options of a group ask
 * for, the ranges of the options, and the constants of a step.
 *
 * A constant is worked out in double, once for each group and number of updates, in the
 * order of operations of the original, so that the update of an element is the same on
 * every device. grad_scale is the factor of every gradient (clip coefficient / loss
 * scale). */
#include "core/optim/kinds.h"

#include "core/optim/optim.h"

#include <stdio.h>
#include <string.h>

/* Constants that no parameter's own count enters. */
static uint64_t
key_of_none(const ct_optim_param *param)
{
    (void)param;
    return 0;
}

/* Constants that depend on the number of the update. */
static uint64_t
key_of_step(const ct_optim_param *param)
{
    return param->step + 1;
}

/* Constants that differ at a parameter's first update alone. */
static uint64_t
key_of_first(const ct_optim_param *param)
{
    return param->step == 0;
}

/* The functions of a kind that has one rule with all of its state arrays. */
#define ONE_RULE(kind, states_of)                                                      \
    static ct_rule kind##_rule(const ct_optim_group *group)                            \
    {                                                                                  \
        (void)group;                                                                   \
        return CT_RULE_##kind;                                                         \
    }                                                                                  \
    static unsigned kind##_states(const ct_optim_group *group)                         \
    {                                                                                  \
        (void)group;                                                                   \
        return states_of;                                                              \
    }

/* 1 - keep^step: the sum of the weights of a moving average that started from 0. */
static double
bias(double keep, uint64_t step)
{
    return 1.0 - pow(keep, (double)step);
}

static ct_status
check_nesterov(bool nesterov, double momentum, double dampening, ct_error *err)
{
    return !nesterov || (momentum > 0.0 && dampening == 0.0)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "nesterov needs momentum > 0 and dampening 0, got momentum=%g "
                         "and dampening=%g",
                         momentum, dampening);
}

/* ---- AdamW, Adam, fairseq's Adam, RAdam ------------------------------------------ */

/* Weight decay in the gradient changes the moments and needs a formula of its own;
 * decoupled decay is a factor of the parameter, 1 without decay. */
static ct_rule
adam_rule(const ct_optim_group *group)
{
    const bool decays_grad =
        !group->adamw.decoupled && group->adamw.weight_decay != 0.0;
    if (group->adamw.amsgrad) {
        return decays_grad ? CT_RULE_adam_amsgrad : CT_RULE_adamw_amsgrad;
    }
    return decays_grad ? CT_RULE_adam : CT_RULE_adamw;
}

static ct_rule
fairseq_adam_rule(const ct_optim_group *group)
{
    return group->adamw.amsgrad ? CT_RULE_adamw_amsgrad : CT_RULE_adamw;
}

/* Bit k stands for state[k]: two moments, and with amsgrad the largest second
 * moment. */
static unsigned
adam_states(const ct_optim_group *group)
{
    return group->adamw.amsgrad ? 7 : 3;
}

static void
adam_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
          double grad_scale)
{
    const ct_adamw_config *c = &group->adamw;
    coef->adamw = (ct_adamw_coef){
        .grad_scale = grad_scale,
        .decay = c->decoupled ? 1.0 - c->lr * c->weight_decay : 1.0,
        .weight_decay = c->decoupled ? 0.0 : c->weight_decay,
        .lerp = ct_average_weight(c->beta1),
        .from_grad = ct_average_from_new(c->beta1),
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
        .step_size = c->lr / bias(c->beta1, step),
        .inv_bias2 = 1.0 / sqrt(bias(c->beta2, step)),
        .eps = c->eps,
    };
}

/* Decoupled weight decay always, and eps added to the root of the second moment before
 * its bias is corrected. Source: fairseq, optim/adam.py. */
static void
fairseq_adam_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
                  double grad_scale)
{
    ct_optim_group decoupled = *group;
    decoupled.adamw.decoupled = true;
    adam_coef(coef, &decoupled, step, grad_scale);
    coef->adamw.step_size *= sqrt(bias(group->adamw.beta2, step));
    coef->adamw.inv_bias2 = 1.0;
}

/* The factor by which RAdam takes back the variance of its adaptive learning rate, or 0
 * where the averages are not longer than `tractable`, too short to adapt by.
 *
 * Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020,
 * algorithm 2. */
static double
rectification(double beta2, uint64_t step, double tractable)
{
    const double most = 2.0 / (1.0 - beta2) - 1.0; /* length of the average */
    const double length =
        most - 2.0 * (double)step * pow(beta2, (double)step) / bias(beta2, step);
    return length > tractable ? sqrt((length - 4.0) * (length - 2.0) * most /
                                     ((most - 4.0) * (most - 2.0) * length))
                              : 0.0;
}

/* In the form of torch.optim.RAdam. */
static void
radam_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
           double grad_scale)
{
    adam_coef(coef, group, step, grad_scale);
    const double rectified = rectification(group->adamw.beta2, step, 5.0);
    if (rectified != 0.0) {
        coef->adamw.step_size *= rectified * sqrt(bias(group->adamw.beta2, step));
        coef->adamw.inv_bias2 = 1.0;
    }
    else { /* the denominator becomes 1: momentum alone */
        coef->adamw.inv_bias2 = 0.0;
        coef->adamw.eps = 1.0;
    }
}

/* ---- Adamax, AdEMAMix ------------------------------------------------------------ */

ONE_RULE(adamax, 3)

/* torch adds the weight decay to the gradient and eps to its magnitude. */
static void
adamax_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
            double grad_scale)
{
    const ct_adamax_config *c = &group->adamax;
    coef->adamax = (ct_adamax_coef){
        .grad_scale = grad_scale,
        .decay = 1.0,
        .weight_decay = c->weight_decay,
        .lerp = ct_average_weight(c->beta1),
        .from_grad = ct_average_from_new(c->beta1),
        .beta2 = c->beta2,
        .step_size = c->lr / bias(c->beta1, step),
        .grad_eps = c->eps,
    };
}

/* fairseq decouples the weight decay and adds eps to the norm. */
static void
fairseq_adamax_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
                    double grad_scale)
{
    const ct_adamax_config *c = &group->adamax;
    adamax_coef(coef, group, step, grad_scale);
    coef->adamax.decay = 1.0 - c->lr * c->weight_decay;
    coef->adamax.weight_decay = 0.0;
    coef->adamax.grad_eps = 0.0;
    coef->adamax.norm_eps = c->eps;
    if (!c->bias_correction) {
        coef->adamax.step_size = c->lr;
    }
}

ONE_RULE(ademamix, 7)

/* The part of a warm-up over `updates` that is done; 1 without a warm-up. */
static double
done(double updates, uint64_t step)
{
    return (double)step < updates ? (double)step / updates : 1.0;
}

/* beta3 so that the half-life of the slow average, log(1/2) / log(beta), grows linearly
 * from that of beta1. */
static double
slow_beta(const ct_ademamix_config *config, uint64_t step)
{
    const double part = done(config->t_beta3, step);
    if (part == 1.0) {
        return config->beta3;
    }
    const double first = 1.0 / log(config->beta1), last = 1.0 / log(config->beta3);
    return exp(1.0 / ((1.0 - part) * first + part * last));
}

static void
ademamix_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
              double grad_scale)
{
    const ct_ademamix_config *c = &group->ademamix;
    const double beta3 = slow_beta(c, step);
    coef->ademamix = (ct_ademamix_coef){
        .grad_scale = grad_scale,
        .decay = 1.0 - c->lr * c->weight_decay,
        .lr = c->lr,
        .fast = ct_average_weight(c->beta1),
        .fast_from_grad = ct_average_from_new(c->beta1),
        .slow = ct_average_weight(beta3),
        .slow_from_grad = ct_average_from_new(beta3),
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
        .inv_bias1 = 1.0 / bias(c->beta1, step),
        .inv_bias2 = 1.0 / sqrt(bias(c->beta2, step)),
        .alpha = c->alpha * done(c->t_alpha, step),
        .eps = c->eps,
    };
}

/* ---- NAdam ----------------------------------------------------------------------- */

ONE_RULE(nadam, 3)

/* The schedule of momenta with torch's base of 0.96. */
static double
nadam_momentum(const ct_nadam_config *config, uint64_t step)
{
    const double part = pow(0.96, (double)step * config->momentum_decay);
    return config->beta1 * (1.0 - 0.5 * part);
}

/* But for grad_step and moment_step, of each parameter alone. */
static void
nadam_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
           double grad_scale)
{
    const ct_nadam_config *c = &group->nadam;
    coef->nadam = (ct_nadam_coef){
        .grad_scale = grad_scale,
        .decay = c->decoupled ? 1.0 - c->lr * c->weight_decay : 1.0,
        .weight_decay = c->decoupled ? 0.0 : c->weight_decay,
        .lerp = ct_average_weight(c->beta1),
        .from_grad = ct_average_from_new(c->beta1),
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
        .inv_bias2 = 1.0 / sqrt(bias(c->beta2, step)),
        .eps = c->eps,
    };
}

static double
nadam_product(const ct_optim_param *param)
{
    return param->product_dtype == CT_F64 ? *(const double *)param->product
                                          : (double)*(const float *)param->product;
}

/* After the update under way, rounded to the dtype of the product. */
static double
nadam_next_product(const ct_optim_group *group, const ct_optim_param *param)
{
    const double momentum = nadam_momentum(&group->nadam, param->step + 1);
    const double product = nadam_product(param);
    return param->product_dtype == CT_F64 ? product * momentum
                                          : (double)((float)product * (float)momentum);
}

/* The product of all momenta corrects the bias, and is a parameter's own: parameters
 * may have begun at different updates. */
static void
nadam_complete(ct_rule_coef *coef, const ct_optim_group *group,
               const ct_optim_param *param)
{
    const ct_nadam_config *c = &group->nadam;
    const double product = nadam_next_product(group, param);
    const double now = nadam_momentum(c, param->step + 1);
    const double next = nadam_momentum(c, param->step + 2);
    coef->nadam.grad_step = c->lr * (1.0 - now) / (1.0 - product);
    coef->nadam.moment_step = c->lr * next / (1.0 - product * next);
}

/* Only after the update, so that a failed update leaves the product alone. */
static void
nadam_count(const ct_optim_group *group, const ct_optim_param *param)
{
    const double product = nadam_next_product(group, param);
    if (param->product_dtype == CT_F64) {
        *(double *)param->product = product;
    }
    else {
        *(float *)param->product = (float)product;
    }
}

static ct_status
nadam_check(const ct_optim_param *param, size_t i, ct_error *err)
{
    /* NaN stands for a missing product and fails the comparison. */
    const double product = param->product == NULL ? NAN : nadam_product(param);
    return product >= 0.0 && product <= 1.0
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu: the product of its momenta must be in [0, 1], "
                         "got %g",
                         i, product);
}

/* ---- SGD, NAG, Lion -------------------------------------------------------------- */

/* Without momentum there is no state, and the state's memory is never touched. */
static ct_rule
sgd_rule(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? CT_RULE_sgd_momentum : CT_RULE_sgd;
}

static unsigned
sgd_states(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? 1 : 0;
}

/* The momentum buffer starts as the gradient itself, undampened, as torch.optim.SGD's.
 */
static void
sgd_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t first,
         double grad_scale)
{
    const ct_sgd_config *c = &group->sgd;
    coef->sgd = (ct_sgd_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .momentum = c->momentum,
        .one_minus_dampening = 1.0 - c->dampening,
        .weight_decay = c->weight_decay,
        .nesterov = c->nesterov,
        .first = first != 0,
    };
}

static ct_status
sgd_check(const ct_optim_group *group, ct_error *err)
{
    const ct_sgd_config *c = &group->sgd;
    return check_nesterov(c->nesterov, c->momentum, c->dampening, err);
}

ONE_RULE(nag, 1)

/* The change of the momentum, a sum of updates, with the learning rate. A last learning
 * rate of 0 leaves nothing to rescale; fairseq then multiplies by the learning rate. */
static double
correction(const ct_nag_config *config)
{
    const double old = isnan(config->lr_old) ? config->lr : config->lr_old;
    return old > 0.0 ? config->lr / old : config->lr;
}

static void
nag_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
         double grad_scale)
{
    const ct_nag_config *c = &group->nag;
    const double carry = c->momentum * correction(c);
    (void)key;
    coef->nag = (ct_nag_coef){
        .grad_scale = grad_scale,
        .decay = 1.0 - c->lr * c->weight_decay,
        .carry = carry,
        .ahead = c->momentum * carry,
        .grad_step = (1.0 + c->momentum) * c->lr,
        .lr = c->lr,
    };
}

static void
nag_advance(ct_optim_group *group)
{
    group->nag.lr_old = group->nag.lr;
}

ONE_RULE(lion, 1)

static void
lion_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
          double grad_scale)
{
    const ct_lion_config *c = &group->lion;
    (void)key;
    coef->lion = (ct_lion_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .decay = 1.0 - c->lr * c->weight_decay,
        .beta1 = c->beta1,
        .one_minus_beta1 = 1.0 - c->beta1,
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
    };
}

/* ---- Adagrad, Adadelta, RMSprop -------------------------------------------------- */

ONE_RULE(adagrad, 1)

static void
adagrad_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
             double grad_scale)
{
    const ct_adagrad_config *c = &group->adagrad;
    coef->adagrad = (ct_adagrad_coef){
        .grad_scale = grad_scale,
        .weight_decay = c->weight_decay,
        .step_size = c->lr / (1.0 + (double)(step - 1) * c->lr_decay),
        .eps = c->eps,
    };
}

ONE_RULE(adadelta, 3)

static void
adadelta_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
              double grad_scale)
{
    const ct_adadelta_config *c = &group->adadelta;
    (void)key;
    coef->adadelta = (ct_adadelta_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .weight_decay = c->weight_decay,
        .rho = c->rho,
        .one_minus_rho = 1.0 - c->rho,
        .eps = c->eps,
    };
}

static ct_rule
rmsprop_rule(const ct_optim_group *group)
{
    if (group->rmsprop.momentum != 0.0) {
        return group->rmsprop.centered ? CT_RULE_rmsprop_centered_momentum
                                       : CT_RULE_rmsprop_momentum;
    }
    return group->rmsprop.centered ? CT_RULE_rmsprop_centered : CT_RULE_rmsprop;
}

/* The average of squares, the momentum buffer, the average of gradients. */
static unsigned
rmsprop_states(const ct_optim_group *group)
{
    return 1u | (group->rmsprop.momentum != 0.0 ? 2u : 0u) |
           (group->rmsprop.centered ? 4u : 0u);
}

static void
rmsprop_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
             double grad_scale)
{
    const ct_rmsprop_config *c = &group->rmsprop;
    (void)key;
    coef->rmsprop = (ct_rmsprop_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .weight_decay = c->weight_decay,
        .alpha = c->alpha,
        .one_minus_alpha = 1.0 - c->alpha,
        .lerp = ct_average_weight(c->alpha),
        .from_grad = ct_average_from_new(c->alpha),
        .momentum = c->momentum,
        .eps = c->eps,
    };
}

/* ---- schedule-free --------------------------------------------------------------- */

ONE_RULE(schedule_free_adamw, 3)
ONE_RULE(schedule_free_sgd, 1)

static ct_status
schedule_free_check(const ct_optim_group *group, ct_error *err)
{
    return group->schedule_free.train_mode
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "train_mode is false, so the parameters hold their average: "
                         "call the optimizer's train() before its step()");
}

/* The weight of the last update's iterate in the average. */
static double
last_weight(const ct_schedule_free_config *config)
{
    return pow((double)config->k, config->r) *
           pow(config->lr_max, config->weight_lr_power);
}

/* The config after the next update, whose learning rate is `factor` times lr. */
static ct_schedule_free_config
following(const ct_schedule_free_config *config, double factor)
{
    ct_schedule_free_config next = *config;
    next.k = config->k + 1;
    next.scheduled_lr = config->lr * factor;
    next.lr_max = fmax(next.scheduled_lr, config->lr_max);
    next.weight_sum += last_weight(&next);
    return next;
}

static double
warmup(const ct_schedule_free_config *config)
{
    const double updates = (double)config->k;
    return updates < config->warmup_steps ? (updates + 1.0) / config->warmup_steps
                                          : 1.0;
}

static double
free_rectification(const ct_schedule_free_config *config)
{
    return rectification(config->beta2, config->k + 1, 4.0);
}

static double
rectified(const ct_schedule_free_config *config)
{
    const double factor = free_rectification(config);
    return factor != 0.0 ? factor : config->silent_sgd_phase ? 0.0 : 1.0;
}

static ct_schedule_free_coef
schedule_free_coef_of(const ct_schedule_free_config *next, double grad_scale)
{
    const double ckp1 =
        next->weight_sum == 0.0 ? 0.0 : last_weight(next) / next->weight_sum;
    return (ct_schedule_free_coef){
        .grad_scale = grad_scale,
        .lr = next->scheduled_lr,
        .weight_decay = next->weight_decay,
        .lerp = ct_average_weight(1.0 - ckp1),
        .from_z = ct_average_from_new(1.0 - ckp1),
        .grad_step = next->scheduled_lr * (next->beta1 * (1.0 - ckp1) - 1.0),
        .beta2 = next->beta2,
        .one_minus_beta2 = 1.0 - next->beta2,
        .inv_bias2 = 1.0 / sqrt(bias(next->beta2, next->k)),
        .eps = next->eps,
    };
}

/* Of SGD, which uses neither beta2 nor eps, and of AdamW. */
static void
schedule_free_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                   double grad_scale)
{
    const ct_schedule_free_config *c = &group->schedule_free;
    const ct_schedule_free_config next = following(c, warmup(c));
    (void)key;
    coef->schedule_free_adamw = schedule_free_coef_of(&next, grad_scale);
}

static void
schedule_free_advance(ct_optim_group *group)
{
    group->schedule_free =
        following(&group->schedule_free, warmup(&group->schedule_free));
}

/* RAdam's learning rate is rectified and has no warm-up. */
static void
schedule_free_radam_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                         double grad_scale)
{
    const ct_schedule_free_config *c = &group->schedule_free;
    const ct_schedule_free_config next = following(c, rectified(c));
    (void)key;
    coef->schedule_free_adamw = schedule_free_coef_of(&next, grad_scale);
    if (free_rectification(c) == 0.0) { /* the denominator becomes 1: SGD */
        coef->schedule_free_adamw.inv_bias2 = 0.0;
        coef->schedule_free_adamw.eps = 1.0;
    }
}

static void
schedule_free_radam_advance(ct_optim_group *group)
{
    group->schedule_free =
        following(&group->schedule_free, rectified(&group->schedule_free));
}

/* ---- Adafactor ------------------------------------------------------------------- */

static bool
has_average(const ct_optim_group *group)
{
    return !isnan(group->adafactor.beta1);
}

static ct_rule
adafactor_rule(const ct_optim_group *group)
{
    return has_average(group) ? CT_RULE_adafactor_momentum : CT_RULE_adafactor;
}

static unsigned
adafactor_states(const ct_optim_group *group)
{
    return 1u << CT_ADAFACTOR_SQ | (has_average(group) ? 1u << CT_ADAFACTOR_AVG : 0u);
}

static bool
is_factored(const ct_optim_param *param)
{
    return param->ndim >= 2;
}

static unsigned
adafactor_arrays(const ct_optim_group *group, const ct_optim_param *param)
{
    const unsigned square = is_factored(param)
                                ? 1u << CT_ADAFACTOR_ROW | 1u << CT_ADAFACTOR_COL
                                : 1u << CT_ADAFACTOR_SQ;
    return square | 1u << CT_ADAFACTOR_RMS |
           (adafactor_states(group) & 1u << CT_ADAFACTOR_AVG);
}

static uint64_t
key_of_factored(const ct_optim_param *param)
{
    return 2 * (param->step + 1) + is_factored(param);
}

static double
relative_lr(const ct_adafactor_config *c, double step)
{
    const double most = c->warmup_init ? 1e-6 * step : 1e-2;
    const double falling = 1.0 / sqrt(step);
    return most < falling ? most : falling;
}

static void
adafactor_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
               double grad_scale)
{
    const ct_adafactor_config *c = &group->adafactor;
    const uint64_t updates = key / 2;
    const double step = (double)updates;
    const double beta2 = 1.0 - pow(step, c->decay_rate);
    coef->adafactor = (ct_adafactor_coef){
        .grad_scale = grad_scale,
        .beta2 = beta2,
        .one_minus_beta2 = 1.0 - beta2,
        .beta1 = c->beta1,
        .one_minus_beta1 = 1.0 - c->beta1,
        .eps = c->eps,
        .rms_low = c->eps2,
        .clip = c->clip_threshold,
        .lr = c->relative_step ? relative_lr(c, step) : c->lr,
        .weight_decay = c->weight_decay,
        .scaled = c->scale_parameter,
        .factored = key % 2 != 0,
    };
}

static ct_status
adafactor_check(const ct_optim_group *group, ct_error *err)
{
    const ct_adafactor_config *c = &group->adafactor;
    if (c->warmup_init && !c->relative_step) {
        return ct_fail(err, CT_EINVAL, "warmup_init needs relative_step");
    }
    return c->relative_step || !isnan(c->lr)
               ? CT_OK
               : ct_fail(err, CT_EINVAL, "lr must be >= 0, got %g", c->lr);
}

/* ---- LAMB, LARS ------------------------------------------------------------------ */

ONE_RULE(lamb, 3)

static void
lamb_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t step,
          double grad_scale)
{
    const ct_lamb_config *c = &group->lamb;
    coef->lamb = (ct_lamb_coef){
        .grad_scale = grad_scale,
        .l2 = c->decoupled ? 0.0 : c->weight_decay,
        .beta1 = c->beta1,
        .share = c->grad_averaging ? 1.0 - c->beta1 : 1.0,
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
        .inv_bias1 = c->bias_correction ? 1.0 / bias(c->beta1, step) : 1.0,
        .inv_bias2 = c->bias_correction ? 1.0 / sqrt(bias(c->beta2, step)) : 1.0,
        .eps = c->eps,
        .weight_decay = c->decoupled ? c->weight_decay : 0.0,
        .lr = c->lr,
        .max_grad_norm = c->max_grad_norm,
        .trusted = c->trust_always || c->weight_decay != 0.0,
    };
}

static ct_rule
lars_rule(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? CT_RULE_lars_momentum : CT_RULE_lars;
}

static unsigned
lars_states(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? 1 : 0;
}

static void
lars_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t first,
          double grad_scale)
{
    const ct_lars_config *c = &group->lars;
    coef->lars = (ct_lars_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .momentum = c->momentum,
        .one_minus_dampening = 1.0 - c->dampening,
        .weight_decay = c->weight_decay,
        .trust = c->trust,
        .eps = c->eps,
        .clip = c->clip,
        .nesterov = c->nesterov,
        .first = first != 0,
    };
}

static ct_status
lars_check(const ct_optim_group *group, ct_error *err)
{
    const ct_lars_config *c = &group->lars;
    if (c->clip && c->lr == 0.0) {
        return ct_fail(err, CT_EINVAL, "lr, which clip divides by, must be > 0, got %g",
                       c->lr);
    }
    return check_nesterov(c->nesterov, c->momentum, c->dampening, err);
}

/* ---- Muon ------------------------------------------------------------------------ */

const char *const ct_muon_adjust_names[] = {
    [CT_MUON_ORIGINAL] = "original",
    [CT_MUON_MATCH_RMS_ADAMW] = "match_rms_adamw",
    NULL,
};

ONE_RULE(muon, 1)

static void
muon_coef(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
          double grad_scale)
{
    const ct_muon_config *c = &group->muon;
    (void)key;
    coef->muon = (ct_muon_coef){
        .grad_scale = grad_scale,
        .momentum = c->momentum,
        .one_minus_momentum = 1.0 - c->momentum,
        .eps = c->eps,
        .nesterov = c->nesterov,
        .from_grad = c->momentum < 0.5,
        .lr = c->lr,
        .weight_decay = c->weight_decay,
        .a = c->coefficients[0],
        .b = c->coefficients[1],
        .c = c->coefficients[2],
        .n_steps = (int)c->steps,
        .adjust = (int)c->adjust,
    };
}

static ct_status
muon_check(const ct_optim_group *group, ct_error *err)
{
    const ct_muon_config *c = &group->muon;
    for (int i = 0; i < 3; i++) {
        if (!isfinite(c->coefficients[i])) {
            return ct_fail(err, CT_EINVAL, "ns_coefficients[%d] must be finite, got %g",
                           i, c->coefficients[i]);
        }
    }
    return floor(c->steps) == c->steps
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "ns_steps must be a whole number in [0, 100), got %g",
                         c->steps);
}

static ct_status
muon_check_param(const ct_optim_param *param, size_t i, ct_error *err)
{
    return param->ndim == 2
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu has %zu dimensions, and Muon is for "
                         "matrices: give it to another optimizer",
                         i, param->ndim);
}

double
ct_muon_lr_factor(ct_muon_adjust adjust, size_t rows, size_t cols)
{
    const double m = (double)rows, n = (double)cols;
    if (adjust == CT_MUON_MATCH_RMS_ADAMW) {
        return 0.2 * sqrt(m > n ? m : n);
    }
    return m > n ? sqrt(m / n) : 1.0;
}

/* ---- the table ------------------------------------------------------------------- */

#define OPS(of_rule, of_states, of_key, of_coef, ...)                                  \
    {.rule = of_rule##_rule,                                                           \
     .states = of_states##_states,                                                     \
     .key = key_of_##of_key,                                                           \
     .coef = of_coef##_coef,                                                           \
     __VA_ARGS__}
const ct_optim_ops ct_optim_kinds[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADADELTA] = OPS(adadelta, adadelta, none, adadelta, ),
    [CT_OPTIM_ADAGRAD] = OPS(adagrad, adagrad, step, adagrad, ),
    [CT_OPTIM_ADAM] = OPS(adam, adam, step, adam, ),
    [CT_OPTIM_ADAMAX] = OPS(adamax, adamax, step, adamax, ),
    [CT_OPTIM_ADAMW] = OPS(adam, adam, step, adam, ),
    [CT_OPTIM_ADAMW_8BIT] = OPS(adam, adam, step, adam, ),
    [CT_OPTIM_ADAMW_COMPACT] = OPS(adam, adam, step, adam, ),
    [CT_OPTIM_ADEMAMIX] = OPS(ademamix, ademamix, step, ademamix, ),
    [CT_OPTIM_ADEMAMIX_8BIT] = OPS(ademamix, ademamix, step, ademamix, ),
    [CT_OPTIM_FAIRSEQ_ADAM] = OPS(fairseq_adam, adam, step, fairseq_adam, ),
    [CT_OPTIM_FAIRSEQ_ADAMAX] = OPS(adamax, adamax, step, fairseq_adamax, ),
    [CT_OPTIM_LION] = OPS(lion, lion, none, lion, ),
    [CT_OPTIM_LION_8BIT] = OPS(lion, lion, none, lion, ),
    [CT_OPTIM_LION_COMPACT] = OPS(lion, lion, none, lion, ),
    [CT_OPTIM_RADAM] = OPS(adam, adam, step, radam, ),
    [CT_OPTIM_RMSPROP] = OPS(rmsprop, rmsprop, none, rmsprop, ),
    [CT_OPTIM_NADAM] = OPS(nadam, nadam, step, nadam, .complete = nadam_complete,
                           .count = nadam_count, .check = nadam_check),
    [CT_OPTIM_NAG] = OPS(nag, nag, none, nag, .advance = nag_advance),
    [CT_OPTIM_SGD] = OPS(sgd, sgd, first, sgd, .check_options = sgd_check),
    [CT_OPTIM_SCHEDULE_FREE_ADAMW] =
        OPS(schedule_free_adamw, schedule_free_adamw, none, schedule_free,
            .advance = schedule_free_advance, .check_options = schedule_free_check),
    [CT_OPTIM_SCHEDULE_FREE_RADAM] = OPS(
        schedule_free_adamw, schedule_free_adamw, none, schedule_free_radam,
        .advance = schedule_free_radam_advance, .check_options = schedule_free_check),
    [CT_OPTIM_SCHEDULE_FREE_SGD] =
        OPS(schedule_free_sgd, schedule_free_sgd, none, schedule_free,
            .advance = schedule_free_advance, .check_options = schedule_free_check),
    [CT_OPTIM_ADAFACTOR] =
        OPS(adafactor, adafactor, factored, adafactor, .arrays = adafactor_arrays,
            .check_options = adafactor_check),
    [CT_OPTIM_LAMB] = OPS(lamb, lamb, step, lamb, ),
    [CT_OPTIM_LARS] = OPS(lars, lars, first, lars, .check_options = lars_check),
    [CT_OPTIM_MUON] = OPS(muon, muon, none, muon, .check = muon_check_param,
                          .check_options = muon_check),
};

static const char *const names[CT_OPTIM_KIND_COUNT] = {
#define KIND(id, name, options, state, traits) #name,
    CT_OPTIM_KINDS(KIND)
#undef KIND
};

const char *
ct_optim_kind_name(ct_optim_kind kind)
{
    return names[kind];
}

ct_optim_kind
ct_optim_kind_from_name(const char *name)
{
    int kind = 0;
    while (kind < CT_OPTIM_KIND_COUNT && strcmp(names[kind], name) != 0) {
        kind++;
    }
    return (ct_optim_kind)kind;
}

/* ---- ranges of options ----------------------------------------------------------- */

typedef struct option_range {
    const char *key;
    size_t member; /* the offset in ct_optim_group of the first number */
    ct_option_type type;
    double low, below;
} option_range;

#define OPTION(key, of, type, ...)                                                     \
    {#key, offsetof(ct_optim_group, of), CT_##type, __VA_ARGS__},
#define KIND(id, name, options, state, traits)                                         \
    static const option_range name##_options[] = {CT_##options##_OPTIONS(OPTION)};
CT_OPTIM_KINDS(KIND)
#undef KIND

static const struct {
    const option_range *options;
    size_t n;
} tables[CT_OPTIM_KIND_COUNT] = {
#define KIND(id, name, options, state, traits)                                         \
    {name##_options, sizeof name##_options / sizeof *name##_options},
    CT_OPTIM_KINDS(KIND)
#undef KIND
};

static size_t
count_of_numbers(ct_option_type type)
{
    switch (type) {
    case CT_NUMBER:
    case CT_OPTIONAL:
    case CT_LIVE_NUMBER:
        return 1;
    case CT_PAIR:
        return 2;
    case CT_TRIPLE:
        return 3;
    default:
        return 0;
    }
}

static ct_status
reject(const option_range *option, size_t i, double value, ct_error *err)
{
    char name[40], range[60];
    const double up_to[] = {CT_UP_TO_1};
    const bool closed = option->below == up_to[1];
    (void)snprintf(name, sizeof name, "%s", option->key);
    if (count_of_numbers(option->type) > 1) {
        (void)snprintf(name, sizeof name, "%s[%zu]", option->key, i);
    }
    if (isinf(option->low)) {
        (void)snprintf(range, sizeof range, "%s",
                       isinf(option->below) ? "a number" : "<= 0");
    }
    else if (isinf(option->below)) {
        (void)snprintf(range, sizeof range, "%s 0", option->low > 0.0 ? ">" : ">=");
    }
    else {
        (void)snprintf(range, sizeof range, "in [%g, %g%c", option->low, option->below,
                       closed ? ']' : ')');
    }
    return ct_fail(err, CT_EINVAL, "%s must be %s, got %g", name, range, value);
}

/* Written so that NaN fails, but for the absence of an optional number. */
static bool
is_within(const option_range *option, double value)
{
    return (option->type == CT_OPTIONAL && isnan(value)) ||
           (value >= option->low && (isinf(option->below) || value < option->below));
}

ct_status
ct_optim_check_group(const ct_optim_group *group, ct_error *err)
{
    const option_range *options = tables[group->kind].options;
    for (size_t k = 0; k < tables[group->kind].n; k++) {
        const double *numbers = (const void *)((const char *)group + options[k].member);
        for (size_t i = 0; i < count_of_numbers(options[k].type); i++) {
            if (!is_within(&options[k], numbers[i])) {
                return reject(&options[k], i, numbers[i], err);
            }
        }
    }
    const ct_optim_ops *ops = &ct_optim_kinds[group->kind];
    return ops->check_options == NULL ? CT_OK : ops->check_options(group, err);
}
