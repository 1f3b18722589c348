/* Sums of parameter deltas over the ranks in quantized values of 8 or 4 bits.
 *
 * Every rank sends the quantized values of each part of the elements to the rank that
 * sums this part, and that rank sends the quantized sum to all: 2 (W - 1) / W times the
 * quantized bytes, as a ring's all_reduce, with the same bits on all ranks. The
 * quantization error is kept as a residual and added to the next block's deltas; the
 * error of a quantized sum is added to the residual of the summing rank.
 *
 * Source: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
 * Double-Pass Error-Compensated Compression", 2019, with one memory for both passes;
 * math/quantized.h for the quantized values. */
#ifndef CT_BMUF_QUANTIZED_H
#define CT_BMUF_QUANTIZED_H

#include "core/bmuf/bmuf.h"

/* Replaces the terms, one for each element of their dtype, by their sums over the
 * ranks. A value that is not finite makes its quantization block NaN on all ranks. */
CT_NODISCARD ct_status ct_bmuf_sum_quantized(ct_bmuf *bmuf, ct_comm *comm,
                                             const ct_span *terms, ct_error *err);

#endif
