/* Gradients that travel in 16 bits.
 *
 * Each is divided by the number of ranks, so that sums cannot overflow where the
 * average does not, rounded to the 16-bit dtype, summed and brought back. Gradients of
 * 16 bits travel as they are. */
#ifndef CT_CODEC_HALF_H
#define CT_CODEC_HALF_H

#include "core/ddp/codec.h"

/* dtype is CT_F16 or CT_BF16. For n_buckets buckets. Released with ops->free. */
CT_NODISCARD ct_status ct_codec_half_new(ct_codec **codec, const ct_device *device,
                                         void *stream, ct_dtype dtype, size_t n_buckets,
                                         ct_error *err);

#endif
