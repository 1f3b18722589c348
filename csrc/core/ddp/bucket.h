/* The plan of buckets: gradients that are exchanged together.
 *
 * Gradients arrive about in the reverse order of the parameters, so buckets are filled
 * in that order, each up to the parameter that reaches the limit. Every bucket has one
 * dtype. The first bucket of a dtype is small, so that the exchange begins early. The
 * rules are those of Li et al., "PyTorch Distributed: Experiences on
 * Accelerating Data Parallel Training", 2020, section 3.2.3. The plan depends on
 * lengths, dtypes, owners and limits alone: ranks with the same parameters have the
 * same plan.
 *
 * A parameter may have an owner, the one rank that gets its average (Rajbhandari et
 * al., "ZeRO", 2020, stage 2). Each owner has one bucket of each dtype, because a
 * bucket keeps its memory when the gradients in it are no longer needed: gradients that
 * do not fit are exchanged in place. */
#ifndef CT_BUCKET_H
#define CT_BUCKET_H

#include "core/base/span.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ct_bucket_limits {
    size_t first_bytes; /* of the first bucket of each dtype */
    size_t cap_bytes;   /* of the others */
    size_t alone_bytes; /* a longer parameter has a bucket to itself; 0: no limit */
} ct_bucket_limits;

/* The ranks that get the averages. */
typedef struct ct_owners {
    const int *of; /* by parameter: a rank or CT_EVERY_RANK; NULL: every rank for all */
    int world_size;
} ct_owners;

enum {
    CT_EVERY_RANK = -1
};

typedef struct ct_bucket {
    ct_dtype dtype;
    size_t first, n_params; /* plan->order[first .. first + n_params) */
    size_t n;               /* elements */
    int owner;              /* a rank or CT_EVERY_RANK */
    bool alone;             /* of one parameter: can be exchanged in place */
} ct_bucket;

/* Starts as {0}. */
typedef struct ct_bucket_plan {
    ct_bucket *buckets; /* in the order of their first parameters' arrival */
    size_t n_buckets, n_params;
    uint32_t *order;     /* parameters, bucket by bucket */
    uint32_t *bucket_of; /* by parameter */
    size_t *offset;      /* by parameter: elements before it in the bucket */
} ct_bucket_plan;

/* params[i].n and .dtype are read. Fewer than 2^32 parameters. CT_EINVAL for an owner
 * that is no rank. */
CT_NODISCARD ct_status ct_bucket_plan_init(ct_bucket_plan *plan, const ct_span *params,
                                           size_t n_params,
                                           const ct_bucket_limits *limits,
                                           const ct_owners *owners, ct_error *err);
void ct_bucket_plan_fini(ct_bucket_plan *plan);

#endif
