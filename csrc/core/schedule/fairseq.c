/* fairseq's schedules: the learning rate after `step` updates, from the config's names.
 *
 * Source: fairseq 0.12, fairseq/optim/lr_scheduler; cosine after Loshchilov and Hutter,
 * "SGDR", 2017, triangular after Smith, "Cyclical Learning Rates", 2017, tri_stage
 * after Park et al., "SpecAugment", 2019. Operations are in the original's order. A
 * stage without steps (no warm-up, no decay), for which the original divides by zero,
 * is over as soon as it begins. */
#include "core/schedule/family.h"

#include <math.h>

enum option {
    LR,
    WARMUP,
    WARMUP_INIT,
    MIN_LR,
    MAX_LR,
    END_LR,
    POWER,
    TOTAL,
    T_MULT,
    PERIOD,
    SHRINK,
    SHRINK_MIN,
    MAX_UPDATE,
    DECAY,
    DECAY_PERIOD,
    ANNEALS, /* epochs of forced annealing so far */
    WARMUP_STEPS,
    HOLD_STEPS,
    DECAY_STEPS,
    PHASE_0,
    PHASE_1,
    PHASE_2,
    INIT_SCALE,
    FINAL_SCALE,
    N_OPTIONS,
    /* derived */
    START = N_OPTIONS, /* the learning rate that a warm-up begins with */
    SLOPE,             /* increment of each update */
    LEAST,             /* the lesser of MIN_LR and LR */
    LENGTH             /* updates of a cycle, or of half a cycle */
};

static const ct_schedule_option options[N_OPTIONS] = {
    [LR] = CT_REAL("lr", 0.0, CT_NONE),
    [WARMUP] = CT_COUNT("warmup_updates", 0.0, 0.0),
    [WARMUP_INIT] = CT_REAL("warmup_init_lr", 0.0, CT_NONE),
    [MIN_LR] = CT_REAL("min_lr", 0.0, 0.0),
    [MAX_LR] = CT_REAL("max_lr", 0.0, CT_NONE),
    [END_LR] = CT_REAL("end_learning_rate", 0.0, 0.0),
    [POWER] = CT_REAL("power", 0.0, 1.0),
    [TOTAL] = CT_POSITIVE("total_num_update", CT_NONE),
    [T_MULT] = CT_POSITIVE("t_mult", 1.0),
    [PERIOD] = CT_POSITIVE("lr_period_updates", CT_NONE),
    [SHRINK] = CT_REAL("lr_shrink", 0.0, 0.1),
    [SHRINK_MIN] = CT_FLAG("shrink_min", 0.0),
    [MAX_UPDATE] = CT_REAL("max_update", 0.0, CT_NONE),
    [DECAY] = CT_REAL("lr_decay", 0.0, 0.5),
    /* The spelling is fairseq's. */
    [DECAY_PERIOD] = CT_COUNT("lr_deacy_period", 1.0, 25000.0),
    [ANNEALS] = CT_COUNT("anneals", 0.0, 0.0),
    [WARMUP_STEPS] = CT_COUNT("warmup_steps", 0.0, 0.0),
    [HOLD_STEPS] = CT_COUNT("hold_steps", 0.0, 0.0),
    [DECAY_STEPS] = CT_COUNT("decay_steps", 0.0, 0.0),
    [PHASE_0] = CT_REAL("phase_ratio[0]", 0.0, CT_NONE),
    [PHASE_1] = CT_REAL("phase_ratio[1]", 0.0, CT_NONE),
    [PHASE_2] = CT_REAL("phase_ratio[2]", 0.0, CT_NONE),
    [INIT_SCALE] = CT_REAL("init_lr_scale", 0.0, 0.01),
    [FINAL_SCALE] = CT_POSITIVE("final_lr_scale", 0.01),
};

/* ---- warm-up from START by SLOPE ------------------------------------------------- */

static void
derive_warmup(double *o, double otherwise)
{
    o[START] = isnan(o[WARMUP_INIT]) ? otherwise : o[WARMUP_INIT];
    o[SLOPE] = o[WARMUP] > 0.0 ? (o[LR] - o[START]) / o[WARMUP] : 0.0;
}

static double
warmup(const double *o, double step)
{
    return o[START] + step * o[SLOPE];
}

/* ---- fixed, polynomial_decay ----------------------------------------------------- */

/* After the forced annealing of the epochs, counted by the caller: a schedule knows
 * updates alone. */
static double
fixed(const double *o, double step)
{
    const double lr = o[LR] * pow(o[SHRINK], o[ANNEALS]);
    return step < o[WARMUP] ? (step + 1.0) / o[WARMUP] * lr : lr;
}

static double
polynomial_decay(const double *o, double step)
{
    if (o[WARMUP] > 0.0 && step <= o[WARMUP]) {
        return step / o[WARMUP] * o[LR];
    }
    /* Before the division, as TOTAL may equal WARMUP. */
    if (step >= o[TOTAL]) {
        return o[END_LR];
    }
    const double remaining = 1.0 - (step - o[WARMUP]) / (o[TOTAL] - o[WARMUP]);
    return (o[LR] - o[END_LR]) * pow(remaining, o[POWER]) + o[END_LR];
}

/* ---- inverse_sqrt, reduce_lr_on_plateau, step ------------------------------------ */

static ct_status
prepare_from_zero(double *o, ct_error *err)
{
    (void)err;
    derive_warmup(o, o[WARMUP] > 0.0 ? 0.0 : o[LR]);
    return CT_OK;
}

/* Without a warm-up the learning rate falls from the first update on, as after a
 * warm-up of length 1. */
static double
inverse_sqrt(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double peak = o[LR] * pow(o[WARMUP] > 1.0 ? o[WARMUP] : 1.0, 0.5);
    return peak * pow(step > 1.0 ? step : 1.0, -0.5);
}

/* Only the warm-up: past it the metric decides. */
static double
linear_warmup(const double *o, double step)
{
    return warmup(o, step < o[WARMUP] ? step : o[WARMUP]);
}

static ct_status
prepare_step(double *o, ct_error *err)
{
    if (!(o[LR] > o[MIN_LR])) {
        return ct_fail(err, CT_EINVAL, "min_lr must be below lr, %g, got %g", o[LR],
                       o[MIN_LR]);
    }
    if (!(o[DECAY] <= 1.0)) {
        return ct_fail(err, CT_EINVAL, "lr_decay must be <= 1, got %g", o[DECAY]);
    }
    derive_warmup(o, o[MIN_LR]);
    return CT_OK;
}

static double
step_decay(const double *o, double step)
{
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    const double lr =
        o[LR] * pow(o[DECAY], floor((step - o[WARMUP]) / o[DECAY_PERIOD]));
    return o[MIN_LR] > lr ? o[MIN_LR] : lr;
}

/* ---- cosine, triangular ---------------------------------------------------------- */

static ct_status
prepare_cosine(double *o, ct_error *err)
{
    o[LENGTH] = isnan(o[PERIOD]) ? o[MAX_UPDATE] - o[WARMUP] : o[PERIOD];
    if (!(o[LENGTH] > 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "lr_period_updates is needed, or a max_update above "
                       "warmup_updates, %g",
                       o[WARMUP]);
    }
    o[LEAST] = o[LR] < o[MIN_LR] ? o[LR] : o[MIN_LR];
    derive_warmup(o, o[LEAST]);
    return CT_OK;
}

/* Cycles with geometrically falling lengths come to an end; past it the original takes
 * the logarithm of a negative number, and *cycle is Inf here. */
static void
locate(const double *o, double at, double *cycle, double *length, double *inside)
{
    const double period = o[LENGTH], t = o[T_MULT];
    /* The sum of a geometric series divides by 1 - t. */
    if (t == 1.0) {
        *cycle = floor(at / period);
        *length = period;
        *inside = at - period * *cycle;
        return;
    }
    const double left = 1.0 - at / period * (1.0 - t);
    *cycle = left > 0.0 ? floor(log(left) / log(t)) : (double)INFINITY;
    *length = pow(t, *cycle) * period;
    *inside = at - (1.0 - pow(t, *cycle)) / (1.0 - t) * period;
}

static double
cosine(const double *o, double step)
{
    double cycle, length, inside;
    if (step < o[WARMUP]) {
        return warmup(o, step);
    }
    /* Cycles are counted from the end of the warm-up. */
    locate(o, step - o[WARMUP], &cycle, &length, &inside);
    const double shrink = pow(o[SHRINK], cycle);
    const double least = o[LEAST] * shrink, most = o[LR] * shrink;
    if (isinf(cycle)) {
        return least;
    }
    return least + 0.5 * (most - least) * (1.0 + cos(CT_PI * inside / length));
}

static ct_status
prepare_triangular(double *o, ct_error *err)
{
    if (!(o[MAX_LR] > o[LR])) {
        return ct_fail(err, CT_EINVAL, "max_lr must be above lr, %g, got %g", o[LR],
                       o[MAX_LR]);
    }
    /* Half a cycle in whole updates, as the original's integer division. */
    o[LENGTH] = floor((isnan(o[PERIOD]) ? 5000.0 : o[PERIOD]) / 2.0);
    if (!(o[LENGTH] >= 1.0)) {
        return ct_fail(err, CT_EINVAL, "lr_period_updates must be >= 2, got %g",
                       o[PERIOD]);
    }
    return CT_OK;
}

static double
triangular(const double *o, double step)
{
    const double half = o[LENGTH];
    const double cycle = floor(step / (2.0 * half));
    const double shrink = pow(o[SHRINK], cycle);
    const double most = o[MAX_LR] * shrink;
    const double least = o[SHRINK_MIN] != 0.0 ? o[LR] * shrink : o[LR];
    const double x = fabs(step / half - 2.0 * (cycle + 1.0) + 1.0);
    return least + (most - least) * ct_at_least_zero(1.0 - x);
}

/* ---- tri_stage ------------------------------------------------------------------- */

static ct_status
steps_of_phases(double *o, ct_error *err)
{
    const double sum = o[PHASE_0] + o[PHASE_1] + o[PHASE_2];
    /* The sum of three rounded shares is seldom exactly 1. */
    if (!(fabs(sum - 1.0) <= 1e-9)) {
        return ct_fail(err, CT_EINVAL,
                       "phase_ratio must be three shares that add up "
                       "to 1, got %g",
                       sum);
    }
    if (!(o[MAX_UPDATE] > 0.0)) {
        return ct_fail(err, CT_EINVAL, "phase_ratio needs max_update above 0, got %g",
                       o[MAX_UPDATE]);
    }
    o[WARMUP_STEPS] = floor(o[MAX_UPDATE] * o[PHASE_0]);
    o[HOLD_STEPS] = floor(o[MAX_UPDATE] * o[PHASE_1]);
    o[DECAY_STEPS] = floor(o[MAX_UPDATE] * o[PHASE_2]);
    return CT_OK;
}

static ct_status
prepare_tri_stage(double *o, ct_error *err)
{
    const int by_share = !(isnan(o[PHASE_0]) && isnan(o[PHASE_1]) && isnan(o[PHASE_2]));
    ct_status status = by_share ? steps_of_phases(o, err) : CT_OK;
    if (status != CT_OK) {
        return status;
    }
    if (!(o[WARMUP_STEPS] + o[HOLD_STEPS] + o[DECAY_STEPS] > 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "one of warmup_steps, hold_steps, decay_steps "
                       "and phase_ratio is needed; none is above 0");
    }
    o[START] = o[INIT_SCALE] * o[LR];
    o[SLOPE] = o[WARMUP_STEPS] > 0.0 ? (o[LR] - o[START]) / o[WARMUP_STEPS] : 0.0;
    return CT_OK;
}

static double
tri_stage(const double *o, double step)
{
    if (step < o[WARMUP_STEPS]) {
        return o[START] + o[SLOPE] * step;
    }
    const double decaying = step - (o[WARMUP_STEPS] + o[HOLD_STEPS]);
    /* Without decay steps the factor below would be Inf, and times 0 NaN. */
    if (decaying < 0.0 || (decaying == 0.0 && o[DECAY_STEPS] == 0.0)) {
        return o[LR];
    }
    if (decaying > o[DECAY_STEPS]) {
        return o[FINAL_SCALE] * o[LR];
    }
    const double factor = -log(o[FINAL_SCALE]) / o[DECAY_STEPS];
    return o[LR] * exp(-factor * decaying);
}

enum {
    WARMS_UP = CT_BIT(LR) | CT_BIT(WARMUP),
    FROM_INIT = WARMS_UP | CT_BIT(WARMUP_INIT),
    CYCLES = CT_BIT(PERIOD) | CT_BIT(SHRINK),
    STAGES = CT_BIT(LR) | CT_BIT(WARMUP_STEPS) | CT_BIT(HOLD_STEPS) |
             CT_BIT(DECAY_STEPS) | CT_BIT(PHASE_0) | CT_BIT(PHASE_1) | CT_BIT(PHASE_2) |
             CT_BIT(MAX_UPDATE) | CT_BIT(INIT_SCALE) | CT_BIT(FINAL_SCALE)
};

static const ct_schedule_kind kinds[] = {
    CT_KIND("fixed", WARMS_UP | CT_BIT(SHRINK) | CT_BIT(ANNEALS), CT_BIT(LR), NULL,
            fixed),
    CT_KIND("inverse_sqrt", FROM_INIT, CT_BIT(LR), prepare_from_zero, inverse_sqrt),
    CT_KIND("cosine",
            FROM_INIT | CYCLES | CT_BIT(MIN_LR) | CT_BIT(T_MULT) | CT_BIT(MAX_UPDATE),
            CT_BIT(LR), prepare_cosine, cosine),
    CT_KIND("polynomial_decay",
            WARMS_UP | CT_BIT(END_LR) | CT_BIT(POWER) | CT_BIT(TOTAL),
            CT_BIT(LR) | CT_BIT(TOTAL), NULL, polynomial_decay),
    CT_KIND("reduce_lr_on_plateau", FROM_INIT, CT_BIT(LR), prepare_from_zero,
            linear_warmup),
    CT_KIND("tri_stage", STAGES, CT_BIT(LR), prepare_tri_stage, tri_stage),
    CT_KIND("triangular", CT_BIT(LR) | CYCLES | CT_BIT(MAX_LR) | CT_BIT(SHRINK_MIN),
            CT_BIT(LR) | CT_BIT(MAX_LR), prepare_triangular, triangular),
    CT_KIND("step", FROM_INIT | CT_BIT(MIN_LR) | CT_BIT(DECAY) | CT_BIT(DECAY_PERIOD),
            CT_BIT(LR), prepare_step, step_decay),
};

const ct_schedule_family ct_schedule_fairseq = {
    .prefix = "fairseq.",
    .options = options,
    .kinds = kinds,
    .n_options = N_OPTIONS,
    .n_kinds = sizeof kinds / sizeof *kinds,
};
