/* A matrix as the product of two thin ones, by one step of power iteration.
 *
 * M is rows x cols, row major, float32. P and Q lie transposed: `rank` rows of `rows`
 * and of `cols` elements, so that their columns are spans. Everything goes through the
 * device's table.
 *
 * Source: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019, algorithm 1. */
#ifndef CT_LOW_RANK_H
#define CT_LOW_RANK_H

#include "core/ct_device.h"

typedef struct ct_low_rank {
    const ct_device *device;
    void *stream;
    ct_scratch *scratch;
    size_t rows, cols, rank;
    float *matrix, *p, *q;
} ct_low_rank;

/* P = M Q. */
CT_NODISCARD ct_status ct_low_rank_project(const ct_low_rank *m, ct_error *err);

/* Makes P's columns orthonormal, those that depend on others 0; then Q = M' P. */
CT_NODISCARD ct_status ct_low_rank_fit(const ct_low_rank *m, ct_error *err);

/* product = factor * P Q', and M becomes factor * (M - P Q'). */
CT_NODISCARD ct_status ct_low_rank_expand(const ct_low_rank *m, double factor,
                                          float *product, ct_error *err);

#endif
