/* Averages gradients over the ranks, bucket by bucket, while they are being computed.
 *
 * A cycle is one backward pass. Each parameter's gradient is announced when it is
 * there; a bucket whose gradients all are is exchanged. Buckets take turns, in one
 * order on every rank whatever arrives first, so that all ranks call the same
 * collectives: in the first cycle that in which they are full when gradients come in
 * the reverse of the parameters' order, and from then on that in which they were full
 * on rank 0, as no bucket should wait for one that is full later. At the end of the
 * pass ct_reducer_finish waits for the rest. Before it every parameter has to have been
 * announced: those without a gradient as zeros.
 *
 * With owners only the owner of a bucket gets its averages, and what the others gave is
 * of no more use once it has been sent: `settled` says which turns those are, during
 * the pass, too, as at most `most_under_way` bytes are on their way beside the bucket
 * that was started last. */
#ifndef CT_REDUCER_H
#define CT_REDUCER_H

#include "core/ddp/bucket.h"
#include "core/comm/comm.h"
#include "core/ddp/bucket.h"
#include "core/device/device.h"

typedef struct ct_reducer_param {
    ct_span place; /* in the bucket's memory; of one alone the gradient itself */
    ct_span grad;  /* announced in this cycle; .data NULL: not yet */
    uint32_t expected, seen; /* announcements in a cycle */
} ct_reducer_param;

typedef struct ct_reducer_bucket {
    ct_span flat;
    size_t pending;     /* parameters still to come */
    ct_scratch rounded; /* what is sent in 16 bits */
    ct_work *work;
} ct_reducer_bucket;

typedef struct ct_reducer {
    const ct_device *device;
    void *stream;
    ct_bucket_plan plan;
    ct_reducer_param *params;
    ct_reducer_bucket *buckets;
    bool rounds;      /* gradients of more than 16 bits are sent in... */
    ct_dtype rounded; /* ... CT_F16 or CT_BF16; the caller's choice between cycles */
    int64_t *turns;   /* buckets in the order of their exchange */
    int64_t *filled;  /* n_filled of them in that in which they were full */
    size_t n_filled;
    bool in_turn;          /* the turns are those of a cycle before */
    size_t started;        /* turns that have come in this cycle */
    size_t settled;        /* of those, the ones whose exchange has ended */
    size_t under_way;      /* bytes of the others */
    size_t most_under_way; /* with owners */
    bool has_owners;
    bool active;      /* within a cycle */
    bool learning;    /* starts nothing before the end, and counts announcements */
    bool copies_back; /* averages are brought to where the gradients were */
    double factor;    /* of the averages; 1 */
    ct_label label;   /* of the bucket that is exchanged; counts buckets */
} ct_reducer;

/* Plans for parameters of these lengths and dtypes; the memory of buckets that are not
 * alone is given by ct_reducer_set_memory. On failure there is nothing to release. */
CT_NODISCARD ct_status ct_reducer_init(ct_reducer *r, const ct_device *device,
                                       void *stream, const ct_span *params,
                                       size_t n_params, const ct_bucket_limits *limits,
                                       const ct_owners *owners, ct_error *err);
void ct_reducer_fini(ct_reducer *r); /* not within a cycle */

/* The memory of a bucket: as many elements as it has, alive as long as r. */
void ct_reducer_set_memory(ct_reducer *r, size_t bucket, void *memory);

/* Begins a cycle. */
void ct_reducer_begin(ct_reducer *r);

/* Whether a parameter has been announced as often in this cycle as it may be. */
bool ct_reducer_is_complete(const ct_reducer *r, size_t param);

/* Announces a gradient, of the parameter's length and dtype, which is copied into its
 * bucket, unless it lies there or the bucket is its alone; a parameter must not be
 * complete. Starts the buckets whose turn has come. After CT_ECOMM: ct_reducer_abort.
 */
CT_NODISCARD ct_status ct_reducer_announce(ct_reducer *r, ct_comm *comm, size_t param,
                                           const ct_span *grad, ct_error *err);

/* Ends the cycle: the averages are in the buckets, and with copies_back where the
 * gradients were. CT_EINVAL when a parameter is missing; on any failure as
 * ct_reducer_abort. */
CT_NODISCARD ct_status ct_reducer_finish(ct_reducer *r, ct_comm *comm, ct_error *err);

/* Gives up a cycle: waits for what is under way, whatever comes of it. */
void ct_reducer_abort(ct_reducer *r, ct_comm *comm);

#endif
