/* Schedules: a learning rate, or a factor of a learning rate, as a function of the
 * step.
 *
 * A schedule is a kind and the values of its options. The kinds come in families with
 * separate options: transformers' ("linear"), fairseq's ("fairseq.cosine") and
 * DeepSpeed's ("deepspeed.WarmupLR"). Numbers are doubles; whole numbers are exact up
 * to 2^53, as in the originals' divisions. */
#ifndef CT_SCHEDULE_H
#define CT_SCHEDULE_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

#define CT_SCHEDULE_SLOTS 28

typedef enum ct_option_form {
    CT_OPTION_REAL,    /* finite */
    CT_OPTION_INTEGER, /* whole, at most 2^53 */
    CT_OPTION_FLAG,    /* 0 or 1 */
    CT_OPTION_WORD     /* index in `words` */
} ct_option_form;

typedef struct ct_schedule_option {
    const char *name;
    ct_option_form form;
    int above;                /* must the value exceed low? */
    double low;               /* the least value, or -Inf */
    double initial;           /* default; NaN: none */
    const char *const *words; /* of a CT_OPTION_WORD; ends with NULL */
} ct_schedule_option;

typedef struct ct_schedule_kind ct_schedule_kind;
typedef struct ct_schedule_family ct_schedule_family;

typedef struct ct_schedule {
    const ct_schedule_family *family;
    const ct_schedule_kind *kind;
    double slots[CT_SCHEDULE_SLOTS]; /* the family's options, then derived values */
} ct_schedule;

/* Makes *schedule a schedule of the kind called name, with default options; next call
 * ct_schedule_set, then ct_schedule_finish. CT_EINVAL lists the names. */
CT_NODISCARD ct_status ct_schedule_init(ct_schedule *schedule, const char *name,
                                        ct_error *err);

/* The kind's name within the family, such as "linear". */
const char *ct_schedule_name(const ct_schedule *schedule);
/* What the family's names begin with: "", "fairseq." or "deepspeed.". */
const char *ct_schedule_prefix(const ct_schedule *schedule);

/* Option number i of the family, or NULL past the last. */
const ct_schedule_option *ct_schedule_option_at(const ct_schedule *schedule, size_t i);
/* Does the kind read option number i? */
int ct_schedule_takes(const ct_schedule *schedule, size_t i);
/* Number of the option called name, whether or not the kind reads it, or -1. */
int ct_schedule_find(const ct_schedule *schedule, const char *name);

/* Set an option. CT_EINVAL names the option: the kind does not have it (the message
 * suggests another), or the value is out of range or a truth value. */
CT_NODISCARD ct_status ct_schedule_set(ct_schedule *schedule, const char *name,
                                       double value, ct_error *err);
CT_NODISCARD ct_status ct_schedule_set_flag(ct_schedule *schedule, const char *name,
                                            int value, ct_error *err);
CT_NODISCARD ct_status ct_schedule_set_word(ct_schedule *schedule, const char *name,
                                            const char *word, ct_error *err);

/* Derives the formula's constants. CT_EINVAL names an option that is missing or
 * contradicts another. */
CT_NODISCARD ct_status ct_schedule_finish(ct_schedule *schedule, ct_error *err);

/* The learning rate, or factor, at `step`; the head of each family's file defines the
 * value and the counting of steps. Equal to the original's to the last bit, provided
 * that libm agrees with Python's math. */
double ct_schedule_value(const ct_schedule *schedule, int64_t step);

CT_END_DECLS

#endif
