/* Learning-rate schedules: a rate, or the factor of one, as a function of the step.
 *
 * A schedule is a kind and the values of its options. The kinds come in families with
 * options of their own: transformers' ("linear"), fairseq's ("fairseq.cosine") and
 * DeepSpeed's ("deepspeed.WarmupLR"). A number that an option holds is a double; whole
 * numbers are exact up to 2^53, as they are in the originals' divisions. */
#ifndef CT_SCHEDULE_H
#define CT_SCHEDULE_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CT_SCHEDULE_SLOTS 28

typedef enum ct_option_form {
    CT_OPTION_REAL,    /* finite */
    CT_OPTION_INTEGER, /* whole, at most 2^53 */
    CT_OPTION_FLAG,    /* 0 or 1 */
    CT_OPTION_WORD     /* its place in `words` */
} ct_option_form;

typedef struct ct_schedule_option {
    const char *name;
    ct_option_form form;
    int above;                /* must it be more than low? */
    double low;               /* the least value, or -Inf */
    double initial;           /* where it is not given; NaN where it then has none */
    const char *const *words; /* of a CT_OPTION_WORD; ends with NULL */
} ct_schedule_option;

typedef struct ct_schedule_kind ct_schedule_kind;
typedef struct ct_schedule_family ct_schedule_family;

typedef struct ct_schedule {
    const ct_schedule_family *family;
    const ct_schedule_kind *kind;
    double slots[CT_SCHEDULE_SLOTS]; /* the family's options, then what follows */
} ct_schedule;

/* Makes *schedule one of the kind called name, every option at its default: next
 * ct_schedule_set, then ct_schedule_finish. CT_EINVAL lists the names. */
CT_NODISCARD ct_status ct_schedule_init(ct_schedule *schedule, const char *name,
                                        ct_error *err);

/* The kind's name within its family, such as "linear". */
const char *ct_schedule_name(const ct_schedule *schedule);
/* What the family's names begin with: "", "fairseq." or "deepspeed.". */
const char *ct_schedule_prefix(const ct_schedule *schedule);

/* Option number i of the family, or NULL past the last one. */
const ct_schedule_option *ct_schedule_option_at(const ct_schedule *schedule, size_t i);
/* Does the kind read option number i? */
int ct_schedule_takes(const ct_schedule *schedule, size_t i);
/* Number of the option called name, whether or not the kind reads it, or -1. */
int ct_schedule_find(const ct_schedule *schedule, const char *name);

/* Give an option a value. CT_EINVAL names it: the kind does not read it, and the
 * message says which is meant, or the value is out of range or a truth value. */
CT_NODISCARD ct_status ct_schedule_set(ct_schedule *schedule, const char *name,
                                       double value, ct_error *err);
CT_NODISCARD ct_status ct_schedule_set_flag(ct_schedule *schedule, const char *name,
                                            int value, ct_error *err);
CT_NODISCARD ct_status ct_schedule_set_word(ct_schedule *schedule, const char *name,
                                            const char *word, ct_error *err);

/* Derives what the formula needs. CT_EINVAL names an option that is missing or
 * contradicts another. */
CT_NODISCARD ct_status ct_schedule_finish(ct_schedule *schedule, ct_error *err);

/* The rate, or the factor of one, at `step`: each family says which and how it counts.
 * Equal to the original's to the last bit, where libm agrees with Python's math. */
double ct_schedule_value(const ct_schedule *schedule, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
