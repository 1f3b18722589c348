/* Averaging of elements that are in the cache already, for kernels that do so in their
 * own pass. */
#ifndef CT_CPU_AVERAGE_H
#define CT_CPU_AVERAGE_H

#include "cpu/isa.h"

#include <stddef.h>

/* Adds elements [at, at + n) of value to the moving average, for any two dtypes:
 * computed in `real`, F32 or F64; n <= CT_TILE unless both dtypes are `real`. */
void ct_average_elements(ct_isa isa, ct_dtype real, void *average,
                         ct_dtype average_dtype, const void *value,
                         ct_dtype value_dtype, size_t at, size_t n, double decay);

#endif
