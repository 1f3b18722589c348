/* PowerSGD: gradients as products of two thin matrices, what is lost being remembered.
 *
 * A parameter's gradient, plus what the last times lost of it, is a matrix M of as many
 * rows as its first dimension. All ranks multiply it by the same Q, average P = M Q,
 * make its columns orthonormal, and average Q = M' P; P Q' is the average gradient, and
 * M - P Q' the new loss. Q serves the next time. What would not become `min_rate` times
 * smaller, such as vectors, travels whole, in one collective with the Ps. In the
 * batched form a bucket is one square matrix, padded with zeros.
 *
 * A bucket with Inf or NaN on any rank becomes NaN on all, and losses and Q start anew.
 * Buckets are in memory that the host can write.
 *
 * Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
 * Compression for Distributed Optimization", 2019, algorithms 1 and 2. */
#ifndef CT_POWER_SGD_H
#define CT_POWER_SGD_H

#include "core/ct_bucket.h"
#include "core/ct_codec.h"

typedef struct ct_power_sgd_config {
    size_t rank;         /* columns of P and Q, >= 1 */
    uint64_t start_iter; /* passes before, in which gradients travel whole */
    double min_rate;     /* > 0: a matrix is compressed if that many times smaller */
    bool batched;
} ct_power_sgd_config;

/* rank 1, from pass 1000 on, if half as long. */
ct_power_sgd_config ct_power_sgd_default(void);

/* rows[i] is the first dimension of parameter i, or 1; both are read now and not kept.
 * Released with ops->free. CT_EINVAL or CT_ENOMEM. */
CT_NODISCARD ct_status ct_power_sgd_new(ct_codec **codec, const ct_device *device,
                                        void *stream, const ct_power_sgd_config *config,
                                        const ct_bucket_plan *plan, const size_t *rows,
                                        const size_t *lengths, ct_error *err);

#endif
