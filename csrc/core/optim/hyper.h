/* Hyperparameters of optimizers: their ranges, and what is derived from them alike. */
#ifndef CT_HYPER_H
#define CT_HYPER_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A number that must lie in [low, below). An infinite `below` allows Inf, too; where
 * `low` is -Inf anything but NaN is right. */
typedef struct ct_hyper {
    const char *name;
    double value, low, below;
} ct_hyper;

/* CT_EINVAL names the first number that is out of its range; NaN always is. */
CT_NODISCARD ct_status ct_hyper_check(const ct_hyper *numbers, size_t n, ct_error *err);

/* CT_EINVAL unless step, which counts from 1, is >= 1. */
CT_NODISCARD ct_status ct_hyper_check_step(uint64_t step, ct_error *err);

/* 1 - keep^step: what a moving average that started from 0 sums to after `step` values
 * of 1, each weighted with 1 - keep. */
double ct_hyper_bias(double keep, uint64_t step);

#ifdef __cplusplus
}
#endif

#endif
