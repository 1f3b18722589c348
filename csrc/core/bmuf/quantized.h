/* Distances that travel quantized to 8 or 4 bits.
 *
 * Every rank sends the codes of a part of the elements to the rank that adds up this
 * part, and that sends codes of the sum to all: 2 (W - 1) / W times the bytes of the
 * codes, as a ring's all_reduce, and all get the same bits. What the codes miss is kept
 * and goes with the next block's distances; what the codes of a sum miss is kept by the
 * rank that has added it up, together with what its own codes of that part missed.
 *
 * Source: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
 * Double-Pass Error-Compensated Compression", 2019, with one memory for both passes;
 * math/quantized.h for the codes. */
#ifndef CT_BMUF_QUANTIZED_H
#define CT_BMUF_QUANTIZED_H

#include "core/bmuf/bmuf.h"

/* The shares of the batch, which has all elements of its dtype, become their sums over
 * the ranks. A value that is not finite makes those of its block NaN on all ranks. */
CT_NODISCARD ct_status ct_bmuf_sum_coded(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                         ct_comm *comm, const ct_bmuf_batch *batch,
                                         ct_error *err);

#endif
