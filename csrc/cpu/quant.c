#include "cpu/quant.h"

#include "math/ct_quant_math.h"

#include <math.h>

/* In the order of the numbers: the negative ones backwards, then the others. */
static inline int32_t
bucket_of(float unit)
{
    const int32_t top = (int32_t)(ct_quant_magnitude(unit) >> 16) - CT_QUANT_LOWEST;
    const int32_t low = top > 0 ? top : 0;
    const int32_t size = low < CT_QUANT_BUCKETS ? low : CT_QUANT_BUCKETS - 1;
    const int32_t negative = (int32_t)(ct_bits_from_f32(unit) >> 31);
    return CT_QUANT_BUCKETS + (size ^ -negative);
}

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/quant_body.h"
#include "cpu/expand.h"

typedef void dequantise_body(const uint8_t *restrict codes, const float *restrict map,
                             float absmax, void *to, size_t n);
typedef float quantise_body(const void *from, const ct_quant_search *search,
                            uint8_t *restrict codes, size_t n);

static dequantise_body *const dequantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(dequantise);
static quantise_body *const quantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(quantise);

_Static_assert(CT_TILE % CT_QUANT_BLOCK == 0, "a tile is made of whole blocks");

/* ---- the search -------------------------------------------------------------------
 */

/* The lowest number of a bucket. */
static float
lowest_of(int32_t bucket)
{
    const int32_t size = bucket - CT_QUANT_BUCKETS;
    if (size >= 0) {
        return size == 0 ? 0.0f
                         : ct_f32_from_bits((uint32_t)(size + CT_QUANT_LOWEST) << 16);
    }
    if (bucket == 0) {
        return -INFINITY;
    }
    return -ct_f32_from_bits(((uint32_t)(-size + CT_QUANT_LOWEST) << 16) - 1);
}

static void
make(ct_quant_search *search, const float *map)
{
    search->map = map;
    for (size_t i = 0; i + 1 < CT_QUANT_CODES; i++) {
        search->middles[i] = ct_quant_middle(map[i], map[i + 1]);
    }
    search->middles[CT_QUANT_CODES - 1] = INFINITY;
    uint32_t code = 0;
    search->most = 1;
    for (int32_t b = 0; b < 2 * CT_QUANT_BUCKETS; b++) {
        const uint32_t before = code;
        while (code < CT_QUANT_CODES - 1 && lowest_of(b) > search->middles[code]) {
            code++;
        }
        const int passed = (int)(code - before);
        search->most = b != 0 && passed > search->most ? passed : search->most;
        search->first[b] = (uint8_t)code;
    }
    const int left = (int)(CT_QUANT_CODES - 1 - code);
    search->most = left > search->most ? left : search->most;
}

/* Mostly all parameters share one; those of a checkpoint may have one each. */
static bool
fits(const ct_quant_search *search, const float *map)
{
    size_t i = 0;
    if (search->map == NULL || search->map == map) {
        return search->map != NULL;
    }
    while (i < CT_QUANT_CODES && search->map[i] == map[i]) {
        i++;
    }
    return i == CT_QUANT_CODES;
}

void
ct_quant_searches_init(ct_quant_searches *searches)
{
    for (size_t k = 0; k < CT_RULE_MAX_STATES; k++) {
        searches->of[k].map = NULL;
    }
}

bool
ct_quant_fits(const ct_quant_searches *searches, const ct_update_span *span,
              size_t n_states)
{
    size_t k = 0;
    while (k < n_states && fits(&searches->of[k], span->quant[k].map)) {
        k++;
    }
    return k == n_states;
}

void
ct_quant_prepare(ct_quant_searches *searches, const ct_update_span *span,
                 size_t n_states)
{
    for (size_t k = 0; k < n_states; k++) {
        if (!fits(&searches->of[k], span->quant[k].map)) {
            make(&searches->of[k], span->quant[k].map);
        }
    }
}

/* ---- tiles ------------------------------------------------------------------------
 */

static size_t
block_at(size_t done, size_t n)
{
    return n - done < CT_QUANT_BLOCK ? n - done : CT_QUANT_BLOCK;
}

void
ct_quant_load(ct_isa isa, ct_dtype real, ct_tile *tile, const ct_update_span *span,
              size_t k, size_t from, size_t n)
{
    const ct_quant quant = span->quant[k];
    const uint8_t *codes = (const uint8_t *)span->state[k] + from;
    for (size_t done = 0; done < n; done += CT_QUANT_BLOCK) {
        const float absmax = quant.absmax[(from + done) / CT_QUANT_BLOCK];
        void *to = real == CT_F64 ? (void *)&tile->f64[done] : (void *)&tile->f32[done];
        dequantisers[isa][real](codes + done, quant.map, absmax, to, block_at(done, n));
    }
}

void
ct_quant_store(ct_isa isa, ct_dtype real, const ct_tile *tile,
               const ct_quant_search *search, const ct_update_span *span, size_t k,
               size_t from, size_t n)
{
    uint8_t *codes = (uint8_t *)span->state[k] + from;
    float *absmax = span->quant[k].absmax + from / CT_QUANT_BLOCK;
    for (size_t done = 0; done < n; done += CT_QUANT_BLOCK) {
        const void *x = real == CT_F64 ? (const void *)&tile->f64[done]
                                       : (const void *)&tile->f32[done];
        *absmax++ = quantisers[isa][real](x, search, codes + done, block_at(done, n));
    }
}
