/* 8-bit state to and from tiles. Mirrors cuda/quant.cuh. */
#ifndef CT_CPU_QUANT_H
#define CT_CPU_QUANT_H

#include "core/device/update.h"
#include "cpu/tile.h"

/* A bucket holds the numbers of equal sign, exponent and first seven bits, from 2^-23
 * to 1. */
enum {
    CT_QUANT_BUCKETS = (23 << 7) + 1 /* of either sign */
};

/* What finds the nearest number of a map. */
typedef struct ct_quant_search {
    const float *map; /* borrowed during an update; NULL: not made yet */
    bool direct;      /* no bucket has two middles, and there are entries: */
    /* For each bucket the lowest value and, eight bits up, a limit: keys with a greater
     * second half have the next value. */
    uint32_t entries[2 * CT_QUANT_BUCKETS];
    float middles[CT_QUANT_MAP_SIZE - 1];
} ct_quant_search;

/* One for each state of a rule. */
typedef struct ct_quant_searches {
    ct_quant_search of[CT_RULE_MAX_STATES];
} ct_quant_searches;

/* No table is made. */
void ct_quant_searches_init(ct_quant_searches *searches);

/* Whether the tables fit the maps of a span's state. */
bool ct_quant_fits(const ct_quant_searches *searches, const ct_update_span *span,
                   size_t n_states);

/* Remakes the tables that do not fit: some microseconds each. */
void ct_quant_prepare(ct_quant_searches *searches, const ct_update_span *span,
                      size_t n_states);

/* State k of elements [from, from + n) into the tile, of type `real`, F32 or F64; from
 * is a multiple of CT_QUANT_BLOCK, n <= CT_TILE. */
void ct_quant_load(ct_isa isa, ct_dtype real, ct_tile *tile, const ct_update_span *span,
                   size_t k, size_t from, size_t n);

/* And back. The blocks that n elements end in have no others. */
void ct_quant_store(ct_isa isa, ct_dtype real, const ct_tile *tile,
                    const ct_quant_search *search, const ct_update_span *span, size_t k,
                    size_t from, size_t n);

#endif
