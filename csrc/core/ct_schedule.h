/* Learning-rate schedules: the factor by which a base rate is multiplied. */
#ifndef CT_SCHEDULE_H
#define CT_SCHEDULE_H

#include "core/ct_status.h"

#include <stdint.h>

typedef enum ct_schedule_kind {
    CT_SCHEDULE_CONSTANT,             /* 1, whatever warmup_steps says */
    CT_SCHEDULE_CONSTANT_WITH_WARMUP, /* 0 to 1 over the warm-up, then 1 */
    CT_SCHEDULE_LINEAR,               /* warm-up, then 1 to 0 at num_training_steps */
    CT_SCHEDULE_COSINE,               /* warm-up, then a cosine of num_cycles waves */
    CT_SCHEDULE_KIND_COUNT
} ct_schedule_kind;

typedef struct ct_schedule {
    ct_schedule_kind kind;
    int64_t num_warmup_steps;   /* >= 0 */
    int64_t num_training_steps; /* >= 0; not read by the constant kinds */
    double num_cycles;          /* cosine: 0.5 falls to 0 once */
} ct_schedule;

/* "linear", "cosine", ...: transformers' names. */
const char *ct_schedule_name(ct_schedule_kind kind);
/* The kind called name, or CT_SCHEDULE_KIND_COUNT. */
ct_schedule_kind ct_schedule_from_name(const char *name);

/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_schedule_check(const ct_schedule *schedule, ct_error *err);

/* The factor at `step`, which counts scheduler steps from 0: equal to what
 * transformers.optimization's lambda of that name gives, to the last bit where libm's
 * cos agrees. */
double ct_schedule_factor(const ct_schedule *schedule, int64_t step);

#endif
