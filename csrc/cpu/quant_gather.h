/* The two loops of 8-bit state that look something up for every element, with the
 * gathers of AVX2, which GCC does not use by itself: the lookups take a third of the
 * time, and the update of AdamW's codes two thirds. The results are those of the plain
 * loops in quant_body.h, which do what is left over. */
#ifndef CT_CPU_QUANT_GATHER_H
#define CT_CPU_QUANT_GATHER_H

#include "cpu/isa.h"

#include <stddef.h>
#include <stdint.h>

/* to[i] = map[codes[i]] * absmax; both return how many elements they have done, none
 * for the base set. */
size_t ct_quant_gather_numbers(ct_isa isa, const uint8_t *codes, const float *map,
                               float absmax, float *to, size_t n);

/* codes[i] from keys[i], by the entries of a ct_quant_search. */
size_t ct_quant_gather_quantized(ct_isa isa, const int32_t *keys,
                                 const uint32_t *entries, uint8_t *codes, size_t n);

#endif
