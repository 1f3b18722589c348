/* Averages gradients over the ranks, bucket by bucket, during the backward pass.
 *
 * A cycle is one backward pass. Each parameter's gradient is announced as soon as
 * autograd has computed it; a full bucket is exchanged. Buckets take turns in one order
 * on every rank, whatever gradient arrives first, so that all ranks call the same
 * collectives. The order of the first cycle assumes that gradients arrive in the
 * reverse order of the parameters; later cycles use the order in which rank 0's buckets
 * filled up, so that no bucket waits for a later one. ct_reducer_finish waits for the
 * rest at the end of the pass; before that every parameter has to be announced, zeros
 * standing for a missing gradient.
 *
 * With owners, only the owner of a bucket gets the averages, and the other ranks may
 * drop their gradients once sent: `settled` counts the turns that have ended, already
 * during the pass, as at most `most_under_way` bytes are under way beside the bucket
 * that was started last. */
#ifndef CT_REDUCER_H
#define CT_REDUCER_H

#include "core/comm/comm.h"
#include "core/device/device.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the plan of buckets ---------------------------------------------------------
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

typedef struct ct_bucket_plan {
    ct_bucket *buckets; /* in the order of their first parameters' arrival */
    size_t n_buckets, n_params;
    uint32_t *order;     /* parameters, bucket by bucket */
    uint32_t *bucket_of; /* by parameter */
    size_t *offset;      /* by parameter: elements before it in the bucket */
} ct_bucket_plan;

/* ---- the exchange ---------------------------------------------------------------- */
typedef struct ct_reducer_param {
    ct_span place; /* in the bucket's memory; the gradient itself for a bucket of one */
    ct_span grad;  /* announced in this cycle; .data NULL before */
    uint32_t expected, seen; /* announcements in a cycle */
} ct_reducer_param;

typedef struct ct_reducer_bucket {
    ct_span flat;
    size_t pending;     /* parameters not announced yet */
    ct_scratch rounded; /* the gradients in fp16 or bf16, for sending */
    ct_work *work;
} ct_reducer_bucket;

typedef struct ct_reducer {
    const ct_device *device;
    void *stream;
    ct_bucket_plan plan;
    ct_reducer_param *params;
    ct_reducer_bucket *buckets;
    bool rounds;      /* wider gradients are sent as... */
    ct_dtype rounded; /* ... CT_F16 or CT_BF16; the caller's choice between cycles */
    int64_t *turns;   /* buckets in the order of their exchange */
    int64_t *filled;  /* the first n_filled buckets in the order of filling up */
    size_t n_filled;
    bool in_turn;          /* the turns are of an earlier cycle */
    size_t started;        /* turns begun in this cycle */
    size_t settled;        /* turns with an ended exchange */
    size_t under_way;      /* bytes of begun turns that have not ended */
    size_t most_under_way; /* with owners */
    bool has_owners;
    bool active;      /* within a cycle */
    bool learning;    /* counts announcements, and starts nothing before the end */
    bool copies_back; /* averages are copied back to the gradients' memory */
    double factor;    /* of the averages; 1 */
    ct_label label;   /* of the bucket that is exchanged; counts buckets */
} ct_reducer;

/* Plans for the parameters' lengths and dtypes, fewer than 2^32; CT_EINVAL for an owner
 * that is no rank. ct_reducer_set_memory sets the memory
 * of buckets that are not alone. On failure there is nothing to release. */
CT_NODISCARD ct_status ct_reducer_init(ct_reducer *r, const ct_device *device,
                                       void *stream, const ct_span *params,
                                       size_t n_params, const ct_bucket_limits *limits,
                                       const ct_owners *owners, ct_error *err);
void ct_reducer_fini(ct_reducer *r); /* not within a cycle */

/* Sets the memory of a bucket, of the bucket's length and alive as long as r. */
void ct_reducer_set_memory(ct_reducer *r, size_t bucket, void *memory);

void ct_reducer_begin(ct_reducer *r);

/* Whether a parameter has had all announcements of this cycle. */
static inline bool
ct_reducer_is_complete(const ct_reducer *r, size_t param)
{
    const ct_reducer_param *p = &r->params[param];
    return !r->learning && p->seen > 0 && p->seen >= p->expected;
}

/* Announces a gradient of the parameter's length and dtype. The gradient is copied into
 * the bucket, unless already there or alone in the bucket; the parameter must not be
 * complete. Starts the full buckets in turn. After CT_ECOMM: ct_reducer_abort.
 */
CT_NODISCARD ct_status ct_reducer_announce(ct_reducer *r, ct_comm *comm, size_t param,
                                           const ct_span *grad, ct_error *err);

/* Ends the cycle: the averages are in the buckets, and with copies_back in the
 * gradients' memory. CT_EINVAL when a parameter is missing; on any failure as
 * ct_reducer_abort. */
CT_NODISCARD ct_status ct_reducer_finish(ct_reducer *r, ct_comm *comm, ct_error *err);

/* Drops a cycle, after waiting for the exchanges under way and ignoring failures. */
void ct_reducer_abort(ct_reducer *r, ct_comm *comm);

#endif
