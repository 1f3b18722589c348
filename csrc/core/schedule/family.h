/* What the files of the families of schedules share. */
#ifndef CT_SCHEDULE_FAMILY_H
#define CT_SCHEDULE_FAMILY_H

#include "core/schedule/schedule.h"

#include <math.h>

CT_BEGIN_DECLS

#define CT_PI 3.141592653589793

/* Option number i as a bit of `takes` and `needs`. */
#define CT_BIT(i) (1u << (i))

/* Entries of a family's table of options. NONE: no default value. */
#define CT_NONE ((double)NAN)
#define CT_REAL(name, low, initial) {name, CT_OPTION_REAL, 0, low, initial, NULL}
#define CT_POSITIVE(name, initial) {name, CT_OPTION_REAL, 1, 0.0, initial, NULL}
#define CT_COUNT(name, low, initial) {name, CT_OPTION_INTEGER, 0, low, initial, NULL}
#define CT_FLAG(name, initial) {name, CT_OPTION_FLAG, 0, 0.0, initial, NULL}
#define CT_WORD(name, words, initial) {name, CT_OPTION_WORD, 0, 0.0, initial, words}

#define CT_KIND(name, takes, needs, prepare, value) {name, takes, needs, prepare, value}

struct ct_schedule_kind {
    const char *name;
    uint32_t takes; /* options of the formula */
    uint32_t needs; /* required options */
    /* Checks options against each other and fills slots after the options'; or NULL. */
    ct_status (*prepare)(double *slots, ct_error *err);
    double (*value)(const double *slots, double step);
};

struct ct_schedule_family {
    const char *prefix;
    const ct_schedule_option *options;
    const ct_schedule_kind *kinds;
    size_t n_options, n_kinds;
};

extern const ct_schedule_family ct_schedule_deepspeed;
extern const ct_schedule_family ct_schedule_fairseq;

/* Python's max(0.0, x): below 0 becomes 0, as do -0 and NaN. */
static inline double
ct_at_least_zero(double x)
{
    return x > 0.0 ? x : 0.0;
}

CT_END_DECLS

#endif
