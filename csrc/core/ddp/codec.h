/* How a bucket of gradients is sent: as it is, or in 16 bits.
 *
 * A codec begins one collective for a bucket when it is full, and when that has ended
 * makes the average over the ranks from its result. Every rank has the same codec
 * and gets the same bits. A NaN on one rank is a NaN on all. */
#ifndef CORE_DDP_CODEC_H
#define CORE_DDP_CODEC_H

#include "core/comm/comm.h"
#include "core/ddp/bucket.h"
#include "core/device/device.h"

#include <stdbool.h>

typedef struct ct_codec ct_codec;

/* A bucket in its turn. */
typedef struct ct_parcel {
    size_t bucket; /* which; each comes once in a backward pass */
    ct_span flat;  /* the gradients; then their average */
    int owner;     /* the rank that gets the average, or CT_EVERY_RANK */
} ct_parcel;

typedef struct ct_codec_ops {
    ct_status (*start)(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel,
                       ct_work **work, ct_error *err);
    /* After the work has been waited for. NULL: the work left the average. */
    ct_status (*finish)(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel,
                        ct_error *err);
    void (*free)(ct_codec *codec);
} ct_codec_ops;

struct ct_codec {
    const ct_codec_ops *ops;
};

/* Averages as they are. Nothing to free, one for all. */
extern ct_codec ct_codec_whole;

/* The collective that brings a parcel's average or sum to those who get it, in `flat`.
 */
ct_request
ct_parcel_request(const ct_parcel *parcel, const ct_span *flat, ct_reduce_op op);

/* Gradients that travel in 16 bits.
 *
 * Each is divided by the number of ranks, so that sums cannot overflow where the
 * average does not, rounded to the 16-bit dtype, summed and brought back. Gradients of
 * 16 bits travel as they are. */

/* dtype is CT_F16 or CT_BF16. For n_buckets buckets. Released with ops->free. */
CT_NODISCARD ct_status ct_codec_half_new(ct_codec **codec, const ct_device *device,
                                         void *stream, ct_dtype dtype, size_t n_buckets,
                                         ct_error *err);

#endif
