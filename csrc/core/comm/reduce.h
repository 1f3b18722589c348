/* The elementwise reduction of several ranks' operands.
 *
 * Ranks are taken in order and floats are added in double and rounded once, so the
 * result depends neither on who comes first nor on how the elements are divided. */
#ifndef CT_REDUCE_H
#define CT_REDUCE_H

#include "core/comm/comm.h"

#include <stddef.h>

/* out[i] = op over in[0..n_in) of in[r][i], for i < n; out may be one of the inputs.
 *
 * A NaN in any makes max and min NaN. Sums of integers wrap; their means are rounded
 * towards zero. Of bools, sum and max say "any", min and mean "all". */
void ct_reduce(void *out, const void *const *in, size_t n_in, size_t n, ct_dtype dtype,
               ct_reduce_op op);

/* The same, compiled for each instruction set that this processor has, slowest first;
 * the results have the same bits. Returns how many. */
enum {
    CT_REDUCE_MOST_SETS = 3
};
typedef void ct_reduce_fn(void *out, const void *const *in, size_t n_in, size_t n,
                          ct_dtype dtype, ct_reduce_op op);
size_t ct_reduce_sets(ct_reduce_fn *sets[CT_REDUCE_MOST_SETS]);

#endif
