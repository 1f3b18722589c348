#include "core/ct_schedule.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const double PI = 3.141592653589793;

static const char *const names[CT_SCHEDULE_KIND_COUNT] = {
    [CT_SCHEDULE_CONSTANT] = "constant",
    [CT_SCHEDULE_CONSTANT_WITH_WARMUP] = "constant_with_warmup",
    [CT_SCHEDULE_LINEAR] = "linear",
    [CT_SCHEDULE_COSINE] = "cosine",
};

const char *
ct_schedule_name(ct_schedule_kind kind)
{
    return names[kind];
}

ct_schedule_kind
ct_schedule_from_name(const char *name)
{
    int kind = 0;
    while (kind < CT_SCHEDULE_KIND_COUNT && strcmp(names[kind], name) != 0) {
        kind++;
    }
    return (ct_schedule_kind)kind;
}

ct_status
ct_schedule_check(const ct_schedule *schedule, ct_error *err)
{
    if ((unsigned)schedule->kind >= CT_SCHEDULE_KIND_COUNT) {
        return ct_fail(err, CT_EINVAL, "kind must be below %d, got %d",
                       CT_SCHEDULE_KIND_COUNT, (int)schedule->kind);
    }
    if (schedule->num_warmup_steps < 0) {
        return ct_fail(err, CT_EINVAL, "num_warmup_steps must be >= 0, got %" PRId64,
                       schedule->num_warmup_steps);
    }
    if (schedule->num_training_steps < 0) {
        return ct_fail(err, CT_EINVAL, "num_training_steps must be >= 0, got %" PRId64,
                       schedule->num_training_steps);
    }
    if (!isfinite(schedule->num_cycles)) {
        return ct_fail(err, CT_EINVAL, "num_cycles must be finite, got %g",
                       schedule->num_cycles);
    }
    return CT_OK;
}

/* a / max(1, b), the division that every part of the schedules is made of. */
static double
ratio(int64_t a, int64_t b)
{
    return (double)a / (double)(b > 1 ? b : 1);
}

/* Below 0 becomes 0, as does -0, which is how Python's max(0.0, x) has it. */
static double
at_least_zero(double x)
{
    return x > 0.0 ? x : 0.0;
}

double
ct_schedule_factor(const ct_schedule *s, int64_t step)
{
    if (s->kind == CT_SCHEDULE_CONSTANT) {
        return 1.0;
    }
    if (step < s->num_warmup_steps) {
        return ratio(step, s->num_warmup_steps);
    }
    if (s->kind == CT_SCHEDULE_CONSTANT_WITH_WARMUP) {
        return 1.0;
    }
    const int64_t decay_steps = s->num_training_steps - s->num_warmup_steps;
    if (s->kind == CT_SCHEDULE_LINEAR) {
        return at_least_zero(ratio(s->num_training_steps - step, decay_steps));
    }
    const double progress = ratio(step - s->num_warmup_steps, decay_steps);
    return at_least_zero(0.5 * (1.0 + cos(PI * s->num_cycles * 2.0 * progress)));
}
