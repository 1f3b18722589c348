/* The tables that find the nearest number of an 8-bit state's map, for cpu/update.c. */
#ifndef CT_CPU_QUANT_SEARCH_H
#define CT_CPU_QUANT_SEARCH_H

#include "cpu/kernels.h"
#include "math/quant.h"

/* A bucket holds the numbers of equal sign, exponent and first seven bits, from 2^-23
 * to 1. */
enum {
    QUANT_BUCKETS = (23 << 7) + 1 /* of either sign */
};

/* What finds the nearest number of a map. */
typedef struct quant_search {
    const float *map; /* borrowed during an update; NULL: not made yet */
    bool direct;      /* no bucket has two middles, and there are entries: */
    /* For each bucket the lowest value and, eight bits up, a limit: keys with a greater
     * second half have the next value. */
    uint32_t entries[2 * QUANT_BUCKETS];
    float middles[CT_QUANT_MAP_SIZE - 1];
} quant_search;

/* One for each state of a rule. */
typedef struct quant_searches {
    quant_search of[CT_RULE_MAX_STATES];
} quant_searches;

enum {
    QUANT_LEAST = (127 - 23) << 23, /* 2^-23 */
    QUANT_MOST = 23 << 23,          /* the key of 1 */
    QUANT_NO_LIMIT = 0xffff         /* above every second half of a key */
};

/* A number's bits as an integer of the same order, negative for negative numbers. All
 * numbers below 2^-23 have equal keys. */
static inline int32_t
quant_key_of(float unit)
{
    const int32_t sign = -(int32_t)(ct_bits_from_f32(unit) >> 31);
    const int32_t size = (int32_t)ct_quant_magnitude(unit);
    const int32_t above = size > QUANT_LEAST ? size - QUANT_LEAST : 0;
    return (above < QUANT_MOST ? above : QUANT_MOST) ^ sign;
}

/* Fills in entries up to the bucket of `key`, from the bucket *next on. False if the
 * bucket has a limit already. */
static inline bool
quant_fill(quant_search *search, int32_t *next, int32_t key, uint32_t value,
           uint32_t limit)
{
    const int32_t bucket = (key >> 16) + QUANT_BUCKETS;
    if (bucket < *next) {
        return false;
    }
    while (*next < bucket) {
        search->entries[(*next)++] = value | (uint32_t)QUANT_NO_LIMIT << 8;
    }
    search->entries[(*next)++] = value | limit << 8;
    return true;
}

/* A middle too near to 0 for a key of its own cannot be a limit. */
static inline bool
quant_has_key(float middle)
{
    return ct_quant_magnitude(middle) > QUANT_LEAST &&
           ct_quant_magnitude(middle) < QUANT_LEAST + QUANT_MOST;
}

static inline void
quant_make(quant_search *search, const float *map)
{
    int32_t next = 0;
    search->map = map;
    search->direct = true;
    for (uint32_t i = 0; i + 1 < CT_QUANT_MAP_SIZE; i++) {
        const float middle = ct_quant_middle(map[i], map[i + 1]);
        const int32_t key = quant_key_of(middle);
        search->middles[i] = middle;
        search->direct = search->direct && quant_has_key(middle) &&
                         quant_fill(search, &next, key, i, (uint32_t)key & 0xffff);
    }
    search->direct =
        search->direct &&
        quant_fill(search, &next, QUANT_MOST, CT_QUANT_MAP_SIZE - 1, QUANT_NO_LIMIT);
}

/* Mostly all parameters share a map; after loading a checkpoint each may have another.
 */
static inline bool
quant_fits_map(const quant_search *search, const float *map)
{
    size_t i = 0;
    if (search->map == NULL || search->map == map) {
        return search->map != NULL;
    }
    while (i < CT_QUANT_MAP_SIZE && search->map[i] == map[i]) {
        i++;
    }
    return i == CT_QUANT_MAP_SIZE;
}

static inline void
quant_searches_init(quant_searches *searches)
{
    for (size_t k = 0; k < CT_RULE_MAX_STATES; k++) {
        searches->of[k].map = NULL;
    }
}

/* Whether the tables fit the maps of a span's state. */
static inline bool
quant_fits(const quant_searches *searches, const ct_update_span *span, size_t n_states)
{
    size_t k = 0;
    while (k < n_states && quant_fits_map(&searches->of[k], span->quant[k].map)) {
        k++;
    }
    return k == n_states;
}

/* Remakes the tables that do not fit: some microseconds each. */
static inline void
quant_prepare(quant_searches *searches, const ct_update_span *span, size_t n_states)
{
    for (size_t k = 0; k < n_states; k++) {
        if (!quant_fits_map(&searches->of[k], span->quant[k].map)) {
            quant_make(&searches->of[k], span->quant[k].map);
        }
    }
}

#endif
