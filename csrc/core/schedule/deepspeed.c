/* DeepSpeed's schedules: a group's learning rate, or momentum, at batch `step`, counted
 * from -1, before the first batch.
 *
 * Source: DeepSpeed, runtime/lr_schedules.py; LRRangeTest and OneCycle after Smith, "A
 * disciplined approach to neural network hyper-parameters: Part 1", arXiv 1803.09820.
 * Operations are in the original's order. */
#include "core/schedule/family.h"

#include <math.h>

enum option {
    RANGE_MIN,
    RANGE_SIZE,
    RANGE_RATE,
    RANGE_STAIRS,
    CYCLE_MIN,
    CYCLE_MAX,
    DECAY_LR,
    FIRST_SIZE,
    SECOND_SIZE,
    FIRST_STAIRS,
    SECOND_STAIRS,
    DECAY_SIZE,
    MIN_MOM,
    MAX_MOM,
    DECAY_MOM,
    WARMUP_MIN,
    WARMUP_MAX,
    WARMUP_STEPS,
    WARMUP_TYPE,
    TOTAL_STEPS,
    MIN_RATIO,
    COS_RATIO,
    BASE, /* WarmupCosineLR: the group's own learning rate */
    N_OPTIONS,
    /* derived */
    SIZE = N_OPTIONS, /* batches of a cycle */
    WARM              /* WARMUP_STEPS, at least 2; the divisor is its logarithm */
};

enum shape {
    SHAPE_LOG,
    SHAPE_LINEAR
};
static const char *const shapes[] = {"log", "linear", NULL};

static const ct_schedule_option options[N_OPTIONS] = {
    [RANGE_MIN] = CT_REAL("lr_range_test_min_lr", 0.0, 1e-3),
    [RANGE_SIZE] = CT_COUNT("lr_range_test_step_size", 1.0, 2000.0),
    [RANGE_RATE] = CT_REAL("lr_range_test_step_rate", 0.0, 1.0),
    [RANGE_STAIRS] = CT_FLAG("lr_range_test_staircase", 0.0),
    [CYCLE_MIN] = CT_REAL("cycle_min_lr", 0.0, CT_NONE),
    [CYCLE_MAX] = CT_REAL("cycle_max_lr", 0.0, CT_NONE),
    [DECAY_LR] = CT_REAL("decay_lr_rate", 0.0, 0.0),
    [FIRST_SIZE] = CT_COUNT("cycle_first_step_size", 1.0, 2000.0),
    [SECOND_SIZE] = CT_COUNT("cycle_second_step_size", 0.0, CT_NONE),
    [FIRST_STAIRS] = CT_COUNT("cycle_first_stair_count", 0.0, 0.0),
    [SECOND_STAIRS] = CT_COUNT("cycle_second_stair_count", 0.0, CT_NONE),
    [DECAY_SIZE] = CT_COUNT("decay_step_size", 0.0, 0.0),
    [MIN_MOM] = CT_REAL("cycle_min_mom", 0.0, 0.8),
    [MAX_MOM] = CT_REAL("cycle_max_mom", 0.0, 0.9),
    [DECAY_MOM] = CT_REAL("decay_mom_rate", -(double)INFINITY, 0.0),
    [WARMUP_MIN] = CT_REAL("warmup_min_lr", 0.0, 0.0),
    [WARMUP_MAX] = CT_REAL("warmup_max_lr", 0.0, 0.001),
    [WARMUP_STEPS] = CT_COUNT("warmup_num_steps", 0.0, 1000.0),
    [WARMUP_TYPE] = CT_WORD("warmup_type", shapes, SHAPE_LOG),
    [TOTAL_STEPS] = CT_COUNT("total_num_steps", 0.0, CT_NONE),
    [MIN_RATIO] = CT_REAL("warmup_min_ratio", 0.0, 0.0),
    [COS_RATIO] = CT_REAL("cos_min_ratio", 0.0, 1e-4),
    [BASE] = CT_REAL("lr", 0.0, CT_NONE),
};

/* ---- LRRangeTest ----------------------------------------------------------------- */

static double
range_test(const double *o, double step)
{
    double intervals = (step + 1.0) / o[RANGE_SIZE];
    if (o[RANGE_STAIRS] != 0.0) {
        intervals = floor(intervals);
    }
    return o[RANGE_MIN] * (1.0 + o[RANGE_RATE] * intervals);
}

/* ---- OneCycle -------------------------------------------------------------------- */

static ct_status
prepare_cycle(double *o, ct_error *err)
{
    (void)err;
    if (isnan(o[SECOND_SIZE])) {
        o[SECOND_SIZE] = o[FIRST_SIZE];
    }
    if (isnan(o[SECOND_STAIRS])) {
        o[SECOND_STAIRS] = o[FIRST_STAIRS];
    }
    o[SIZE] = o[FIRST_SIZE] + o[SECOND_SIZE];
    return CT_OK;
}

/* cycle_scale in stairs: whole batches are counted, so that rounding takes none away.
 */
static double
cycle_stair(const double *o, double batch, double stairs)
{
    const double inside = fmod(batch, o[SIZE]);
    const double stair = inside <= o[FIRST_SIZE]
                             ? inside * stairs / o[FIRST_SIZE]
                             : (o[SIZE] - inside) * stairs / o[SECOND_SIZE];
    return floor(stair) / stairs;
}

/* From 0 to 1 over the first half of the cycle and back over the second. */
static double
cycle_scale(const double *o, double batch)
{
    const double ratio = o[FIRST_SIZE] / o[SIZE];
    const double x = 1.0 + batch / o[SIZE] - floor(1.0 + batch / o[SIZE]);
    const double stairs = x <= ratio ? o[FIRST_STAIRS] : o[SECOND_STAIRS];
    if (stairs > 0.0) {
        return cycle_stair(o, batch, stairs);
    }
    return x <= ratio ? x / ratio : (x - 1.0) / (ratio - 1.0);
}

/* 1 + rate for each decay_step_size of batches past the cycle; 1 without a decay. */
static double
decay_factor(const double *o, double rate, double step)
{
    if (o[DECAY_SIZE] == 0.0 || rate == 0.0) {
        return 1.0;
    }
    return 1.0 + rate * ((step - o[SIZE] + 1.0) / o[DECAY_SIZE]);
}

static double
one_cycle(const double *o, double step)
{
    if (step < o[SIZE]) {
        return o[CYCLE_MIN] +
               (o[CYCLE_MAX] - o[CYCLE_MIN]) * cycle_scale(o, step + 1.0);
    }
    return o[CYCLE_MIN] / decay_factor(o, o[DECAY_LR], step);
}

static double
one_cycle_momentum(const double *o, double step)
{
    if (step < o[SIZE]) {
        return o[MAX_MOM] - (o[MAX_MOM] - o[MIN_MOM]) * cycle_scale(o, step + 1.0);
    }
    return o[MAX_MOM] * decay_factor(o, o[DECAY_MOM], step);
}

/* ---- WarmupLR, WarmupDecayLR, WarmupCosineLR ------------------------------------- */

static ct_status
prepare_warmup(double *o, ct_error *err)
{
    (void)err;
    o[WARM] = o[WARMUP_STEPS] > 2.0 ? o[WARMUP_STEPS] : 2.0;
    return CT_OK;
}

static double
warmup_ratio(const double *o, double step)
{
    return o[WARMUP_TYPE] == SHAPE_LOG ? 1.0 / log(o[WARM]) * log(step + 1.0)
                                       : step / o[WARM];
}

static double
between(const double *o, double ratio)
{
    return o[WARMUP_MIN] + (o[WARMUP_MAX] - o[WARMUP_MIN]) * ratio;
}

static double
warmup_lr(const double *o, double step)
{
    if (step < 0.0) {
        return o[WARMUP_MIN];
    }
    return between(o, step < o[WARM] ? warmup_ratio(o, step) : 1.0);
}

static double
warmup_decay(const double *o, double step)
{
    if (step < o[WARM]) {
        return warmup_lr(o, step);
    }
    const double length = o[TOTAL_STEPS] - o[WARM];
    const double left = (o[TOTAL_STEPS] - step) / (length > 1.0 ? length : 1.0);
    return between(o, ct_at_least_zero(left));
}

static double
warmup_cosine(const double *o, double step)
{
    if (step < 0.0) {
        return 0.0;
    }
    if (step < o[WARM]) {
        const double rise = warmup_ratio(o, step) * (1.0 - o[MIN_RATIO]);
        return o[BASE] * (o[MIN_RATIO] + rise);
    }
    const double length = o[TOTAL_STEPS] - o[WARM];
    double at = (step - o[WARM] + 1.0) / (length > 1.0 ? length : 1.0);
    at = at < 1.0 ? at : 1.0;
    const double wave = (1.0 + cos(CT_PI * at)) / 2.0;
    return o[BASE] * ct_at_least_zero(o[COS_RATIO] + (1.0 - o[COS_RATIO]) * wave);
}

enum {
    RANGE = CT_BIT(RANGE_MIN) | CT_BIT(RANGE_SIZE) | CT_BIT(RANGE_RATE) |
            CT_BIT(RANGE_STAIRS),
    CYCLE = CT_BIT(FIRST_SIZE) | CT_BIT(SECOND_SIZE) | CT_BIT(FIRST_STAIRS) |
            CT_BIT(SECOND_STAIRS) | CT_BIT(DECAY_SIZE),
    CYCLE_ENDS = CT_BIT(CYCLE_MIN) | CT_BIT(CYCLE_MAX),
    MOMENTA = CT_BIT(MIN_MOM) | CT_BIT(MAX_MOM) | CT_BIT(DECAY_MOM),
    RISE = CT_BIT(WARMUP_STEPS) | CT_BIT(WARMUP_TYPE),
    WARMUP = RISE | CT_BIT(WARMUP_MIN) | CT_BIT(WARMUP_MAX),
    COSINE = RISE | CT_BIT(TOTAL_STEPS) | CT_BIT(MIN_RATIO) | CT_BIT(COS_RATIO) |
             CT_BIT(BASE)
};

static const ct_schedule_kind kinds[] = {
    CT_KIND("LRRangeTest", RANGE, 0, NULL, range_test),
    CT_KIND("OneCycle", CYCLE | CYCLE_ENDS | CT_BIT(DECAY_LR), CYCLE_ENDS,
            prepare_cycle, one_cycle),
    CT_KIND("OneCycle.momentum", CYCLE | MOMENTA, 0, prepare_cycle, one_cycle_momentum),
    CT_KIND("WarmupLR", WARMUP, 0, prepare_warmup, warmup_lr),
    CT_KIND("WarmupDecayLR", WARMUP | CT_BIT(TOTAL_STEPS), CT_BIT(TOTAL_STEPS),
            prepare_warmup, warmup_decay),
    CT_KIND("WarmupCosineLR", COSINE, CT_BIT(TOTAL_STEPS) | CT_BIT(BASE),
            prepare_warmup, warmup_cosine),
};

const ct_schedule_family ct_schedule_deepspeed = {
    .prefix = "deepspeed.",
    .options = options,
    .kinds = kinds,
    .n_options = N_OPTIONS,
    .n_kinds = sizeof kinds / sizeof *kinds,
};
