#include "core/optim/schedule_free.h"

#include "core/optim/adam.h"
#include "core/optim/hyper.h"

static ct_status
config_check(const ct_schedule_free_config *config, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",              config->lr,              0.0, INFINITY},
        {"beta1",           config->beta1,           0.0, 1.0     },
        {"beta2",           config->beta2,           0.0, 1.0     },
        {"eps",             config->eps,             0.0, INFINITY},
        {"weight_decay",    config->weight_decay,    0.0, INFINITY},
        {"r",               config->r,               0.0, INFINITY},
        {"weight_lr_power", config->weight_lr_power, 0.0, INFINITY},
        {"warmup_steps",    config->warmup_steps,    0.0, INFINITY},
        {"weight_sum",      config->weight_sum,      0.0, INFINITY},
    };
    if (!config->train_mode) {
        return ct_fail(err, CT_EINVAL,
                       "train_mode is false, so the parameters hold their average: "
                       "call the optimizer's train() before its step()");
    }
    return ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
}

/* The weight in the average of what the last update made. */
static double
last_weight(const ct_schedule_free_config *config)
{
    return pow((double)config->k, config->r) *
           pow(config->lr_max, config->weight_lr_power);
}

/* What the next update leaves in the config, its rate being `factor` times lr. */
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

static ct_schedule_free_coef
coef_of(const ct_schedule_free_config *next, double grad_scale)
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
        .inv_bias2 = 1.0 / sqrt(ct_hyper_bias(next->beta2, next->k)),
        .eps = next->eps,
    };
}

/* ---- AdamW and SGD: a warm-up ------------------------------------------------------
 */

static double
warmup(const ct_schedule_free_config *config)
{
    const double done = (double)config->k;
    return done < config->warmup_steps ? (done + 1.0) / config->warmup_steps : 1.0;
}

ct_status
ct_schedule_free_coef_init(ct_schedule_free_coef *coef,
                           const ct_schedule_free_config *config, double grad_scale,
                           ct_error *err)
{
    ct_status status = config_check(config, err);
    if (status == CT_OK) {
        const ct_schedule_free_config next = following(config, warmup(config));
        *coef = coef_of(&next, grad_scale);
    }
    return status;
}

void
ct_schedule_free_advance(ct_schedule_free_config *config)
{
    *config = following(config, warmup(config));
}

/* ---- RAdam: a rectified rate -------------------------------------------------------
 */

static double
rectification(const ct_schedule_free_config *config)
{
    return ct_radam_rectification(config->beta2, config->k + 1, 4.0);
}

static double
rectified(const ct_schedule_free_config *config)
{
    const double factor = rectification(config);
    return factor != 0.0 ? factor : config->silent_sgd_phase ? 0.0 : 1.0;
}

ct_status
ct_schedule_free_radam_coef_init(ct_schedule_free_coef *coef,
                                 const ct_schedule_free_config *config,
                                 double grad_scale, ct_error *err)
{
    ct_status status = config_check(config, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_schedule_free_config next = following(config, rectified(config));
    *coef = coef_of(&next, grad_scale);
    if (rectification(config) == 0.0) { /* the denominator becomes 1: SGD */
        coef->inv_bias2 = 0.0;
        coef->eps = 1.0;
    }
    return CT_OK;
}

void
ct_schedule_free_radam_advance(ct_schedule_free_config *config)
{
    *config = following(config, rectified(config));
}
