/* transformers' schedules: the factor of the base learning rate after `step` updates.
 *
 * Source: transformers 5.17, optimization.py; the polynomial one goes back to BERT's
 * code, inverse_sqrt to big_vision's, warmup_stable_decay to Hu et al., "MiniCPM",
 * 2024. Operations are in the original's order, so that results are the same bits. */
#include "core/schedule/family.h"

#include <math.h>

enum option {
    WARMUP,   /* updates over which the factor rises to 1 */
    TRAINING, /* updates of the whole run */
    CYCLES,
    POWER,
    LR_END,
    LR_INIT, /* the optimizer's default learning rate, the divisor of learning rates */
    TIMESCALE,
    MIN_LR,
    MIN_LR_RATE,
    WARMUP_LR_RATE,
    STABLE,
    DECAY,
    WARMUP_TYPE,
    DECAY_TYPE,
    MIN_LR_RATIO,
    N_OPTIONS,
    FLOOR = N_OPTIONS /* derived: MIN_LR_RATE, or MIN_LR in units of LR_INIT */
};

enum shape {
    SHAPE_LINEAR,
    SHAPE_COSINE,
    SHAPE_SQRT
};
static const char *const shapes[] = {"linear", "cosine", "1-sqrt", NULL};

static const ct_schedule_option options[N_OPTIONS] = {
    [WARMUP] = CT_COUNT("num_warmup_steps", 0.0, CT_NONE),
    [TRAINING] = CT_COUNT("num_training_steps", 0.0, CT_NONE),
    [CYCLES] = CT_REAL("num_cycles", -(double)INFINITY, CT_NONE),
    [POWER] = CT_REAL("power", 0.0, 1.0),
    [LR_END] = CT_REAL("lr_end", 0.0, 1e-7),
    [LR_INIT] = CT_REAL("lr_init", 0.0, CT_NONE),
    [TIMESCALE] = CT_POSITIVE("timescale", CT_NONE),
    [MIN_LR] = CT_REAL("min_lr", 0.0, CT_NONE),
    [MIN_LR_RATE] = CT_REAL("min_lr_rate", 0.0, CT_NONE),
    [WARMUP_LR_RATE] = CT_REAL("warmup_lr_rate", 0.0, CT_NONE),
    [STABLE] = CT_COUNT("num_stable_steps", 0.0, CT_NONE),
    [DECAY] = CT_COUNT("num_decay_steps", 0.0, CT_NONE),
    [WARMUP_TYPE] = CT_WORD("warmup_type", shapes, SHAPE_LINEAR),
    [DECAY_TYPE] = CT_WORD("decay_type", shapes, SHAPE_COSINE),
    [MIN_LR_RATIO] = CT_REAL("min_lr_ratio", 0.0, 0.0),
};

static double
at_least_one(double x)
{
    return x > 1.0 ? x : 1.0;
}

static double
or_else(double x, double otherwise)
{
    return isnan(x) ? otherwise : x;
}

static double
warmup(const double *o, double step)
{
    return step / at_least_one(o[WARMUP]);
}

/* From 0 at the end of the warm-up to 1 at the end of the run, and beyond. */
static double
progress(const double *o, double step)
{
    return (step - o[WARMUP]) / at_least_one(o[TRAINING] - o[WARMUP]);
}

static double wave(double cycles, double at);

static double
rising(enum shape shape, double at)
{
    switch (shape) {
    case SHAPE_COSINE:
        return 0.5 * (1.0 - cos(CT_PI * at));
    case SHAPE_SQRT:
        return 1.0 - sqrt(1.0 - at);
    case SHAPE_LINEAR:
        break;
    }
    return at;
}

static double
falling(enum shape shape, double cycles, double at)
{
    switch (shape) {
    case SHAPE_COSINE:
        return wave(cycles, at);
    case SHAPE_SQRT:
        return 1.0 - sqrt(at);
    case SHAPE_LINEAR:
        break;
    }
    return 1.0 - at;
}

static double
wave(double cycles, double at)
{
    return 0.5 * (1.0 + cos(CT_PI * cycles * 2.0 * at));
}

static double
above_floor(double factor, double least)
{
    return factor * (1.0 - least) + least;
}

/* ---- kinds ----------------------------------------------------------------------- */

static double
constant(const double *o, double step)
{
    (void)o;
    (void)step;
    return 1.0;
}

static double
constant_with_warmup(const double *o, double step)
{
    return step < o[WARMUP] ? warmup(o, step) : 1.0;
}

static double
linear(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    return ct_at_least_zero((o[TRAINING] - step) /
                            at_least_one(o[TRAINING] - o[WARMUP]));
}

static double
cosine(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    return ct_at_least_zero(wave(or_else(o[CYCLES], 0.5), progress(o, step)));
}

static double
cosine_with_restarts(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double at = progress(o, step);
    if (at >= 1.0) {
        return 0.0;
    }
    double phase = fmod(or_else(o[CYCLES], 1.0) * at, 1.0);
    phase = phase < 0.0 ? phase + 1.0 : phase; /* Python's %, for negative cycles */
    return ct_at_least_zero(0.5 * (1.0 + cos(CT_PI * phase)));
}

static ct_status
prepare_polynomial(double *o, ct_error *err)
{
    if (!(o[LR_INIT] > o[LR_END])) {
        return ct_fail(err, CT_EINVAL,
                       "lr_end must be below the optimizer's learning rate, %g, got %g",
                       o[LR_INIT], o[LR_END]);
    }
    return CT_OK;
}

/* If the warm-up fills the run the original divides by zero; here the decay is then
 * over as soon as it begins. */
static double
polynomial(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double decay_steps = o[TRAINING] - o[WARMUP];
    if (step > o[TRAINING] || decay_steps == 0.0) {
        return o[LR_END] / o[LR_INIT];
    }
    const double range = o[LR_INIT] - o[LR_END];
    const double remaining = 1.0 - (step - o[WARMUP]) / decay_steps;
    return (range * pow(remaining, o[POWER]) + o[LR_END]) / o[LR_INIT];
}

static double
inverse_sqrt(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double scale = or_else(o[TIMESCALE], o[WARMUP] > 0.0 ? o[WARMUP] : 10000.0);
    const double shift = scale - o[WARMUP];
    return 1.0 / sqrt((step + shift) / scale);
}

static ct_status
prepare_floor(double *o, ct_error *err)
{
    if (isnan(o[MIN_LR]) == isnan(o[MIN_LR_RATE])) {
        return ct_fail(err, CT_EINVAL,
                       "exactly one of min_lr and min_lr_rate is "
                       "needed; %s",
                       isnan(o[MIN_LR]) ? "neither is given" : "both are given");
    }
    if (isnan(o[MIN_LR_RATE]) && !(o[LR_INIT] > 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "min_lr needs an optimizer whose learning rate is > 0, got %g: "
                       "set "
                       "min_lr_rate instead",
                       o[LR_INIT]);
    }
    o[FLOOR] = or_else(o[MIN_LR_RATE], o[MIN_LR] / o[LR_INIT]);
    return CT_OK;
}

static double
cosine_with_min_lr(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    double factor = wave(or_else(o[CYCLES], 0.5), progress(o, step));
    return ct_at_least_zero(above_floor(factor, o[FLOOR]));
}

/* This warm-up begins above 0: a step ahead of the other schedules throughout. */
static double
cosine_warmup_with_min_lr(const double *o, double step)
{
    const double start = o[WARMUP_LR_RATE];
    if (step < o[WARMUP]) {
        return isnan(start)
                   ? (step + 1.0) / at_least_one(o[WARMUP])
                   : start + (1.0 - start) * step / at_least_one(o[WARMUP] - 1.0);
    }
    const double at = (step - o[WARMUP] + 1.0) / at_least_one(o[TRAINING] - o[WARMUP]);
    double factor = wave(or_else(o[CYCLES], 0.5), at);
    return ct_at_least_zero(above_floor(factor, o[FLOOR]));
}

static ct_status
prepare_warmup_stable_decay(double *o, ct_error *err)
{
    if (isnan(o[TRAINING]) && isnan(o[STABLE])) {
        return ct_fail(err, CT_EINVAL,
                       "schedule 'warmup_stable_decay' needs "
                       "num_training_steps or num_stable_steps; neither is given");
    }
    return CT_OK;
}

static double
warmup_stable_decay(const double *o, double step)
{
    const double least = o[MIN_LR_RATIO];
    const double stable = or_else(o[STABLE], o[TRAINING] - o[WARMUP] - o[DECAY]);
    if (step < o[WARMUP]) {
        double up = rising((enum shape)o[WARMUP_TYPE], warmup(o, step));
        return ct_at_least_zero(above_floor(up, least));
    }
    if (step < o[WARMUP] + stable) {
        return 1.0;
    }
    if (step < o[WARMUP] + stable + o[DECAY]) {
        double at = (step - o[WARMUP] - stable) / at_least_one(o[DECAY]);
        double down = falling((enum shape)o[DECAY_TYPE], or_else(o[CYCLES], 0.5), at);
        return ct_at_least_zero(above_floor(down, least));
    }
    return least;
}

enum {
    RUN = CT_BIT(WARMUP) | CT_BIT(TRAINING),
    WAVES = RUN | CT_BIT(CYCLES),
    ENDS = RUN | CT_BIT(POWER) | CT_BIT(LR_END) | CT_BIT(LR_INIT),
    FLOORS = WAVES | CT_BIT(MIN_LR) | CT_BIT(MIN_LR_RATE) | CT_BIT(LR_INIT),
    STAGES = WAVES | CT_BIT(STABLE) | CT_BIT(DECAY) | CT_BIT(WARMUP_TYPE) |
             CT_BIT(DECAY_TYPE) | CT_BIT(MIN_LR_RATIO)
};

static const ct_schedule_kind kinds[] = {
    CT_KIND("constant", 0, 0, NULL, constant),
    CT_KIND("constant_with_warmup", CT_BIT(WARMUP), CT_BIT(WARMUP), NULL,
            constant_with_warmup),
    CT_KIND("linear", RUN, RUN, NULL, linear),
    CT_KIND("cosine", WAVES, RUN, NULL, cosine),
    CT_KIND("cosine_with_restarts", WAVES, RUN, NULL, cosine_with_restarts),
    CT_KIND("polynomial", ENDS, RUN | CT_BIT(LR_INIT), prepare_polynomial, polynomial),
    CT_KIND("inverse_sqrt", CT_BIT(WARMUP) | CT_BIT(TIMESCALE), CT_BIT(WARMUP), NULL,
            inverse_sqrt),
    CT_KIND("cosine_with_min_lr", FLOORS, RUN, prepare_floor, cosine_with_min_lr),
    CT_KIND("cosine_warmup_with_min_lr", FLOORS | CT_BIT(WARMUP_LR_RATE), RUN,
            prepare_floor, cosine_warmup_with_min_lr),
    CT_KIND("warmup_stable_decay", STAGES, CT_BIT(WARMUP) | CT_BIT(DECAY),
            prepare_warmup_stable_decay, warmup_stable_decay),
};

const ct_schedule_family ct_schedule_transformers = {
    .prefix = "",
    .options = options,
    .kinds = kinds,
    .n_options = N_OPTIONS,
    .n_kinds = sizeof kinds / sizeof *kinds,
};
