/* Stochastic rounding to bfloat16 of elements that are in the cache already. */
#ifndef CT_CPU_DITHER_H
#define CT_CPU_DITHER_H

#include "core/device/update.h"
#include "cpu/tile.h"

/* The n <= CT_TILE elements of a tile, of the type `real`, F32 or F64, to `to`, by the
 * random bits of elements number, number + 1, ...; number is a multiple of 8. */
void ct_dither(ct_isa isa, ct_dtype real, const ct_tile *from, uint16_t *to,
               const ct_rounding *rounding, uint64_t number, size_t n);

#endif
