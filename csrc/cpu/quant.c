#include "cpu/quant.h"

#include "cpu/quant_gather.h"
#include "math/quant.h"

enum {
    LEAST = (127 - 23) << 23, /* 2^-23 */
    MOST = 23 << 23,          /* what a key of 1 is */
    NO_LIMIT = 0xffff         /* no key's second half is above it */
};

/* A number's bits as an integer that has its order: the negative ones below 0. Numbers
 * below 2^-23 are as one. */
static inline int32_t
key_of(float unit)
{
    const int32_t sign = -(int32_t)(ct_bits_from_f32(unit) >> 31);
    const int32_t size = (int32_t)ct_quant_magnitude(unit);
    const int32_t above = size > LEAST ? size - LEAST : 0;
    return (above < MOST ? above : MOST) ^ sign;
}

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/quant.h"
#include "cpu/expand.h"

typedef void dequantise_body(const uint8_t *restrict codes, const float *restrict map,
                             float absmax, void *to, size_t from, size_t n);
typedef float quantise_body(ct_isa isa, const void *from, const ct_quant_search *search,
                            uint8_t *restrict codes, size_t n);

static dequantise_body *const dequantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(dequantise);
static quantise_body *const quantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(quantise);

_Static_assert(CT_TILE % CT_QUANT_BLOCK == 0, "a tile is made of whole blocks");

/* ---- the search -------------------------------------------------------------------
 */

/* Fills in entries up to that of `key`, from the bucket *next on. False where the
 * bucket has a limit already. */
static bool
fill(ct_quant_search *search, int32_t *next, int32_t key, uint32_t code, uint32_t limit)
{
    const int32_t bucket = (key >> 16) + CT_QUANT_BUCKETS;
    if (bucket < *next) {
        return false;
    }
    while (*next < bucket) {
        search->entries[(*next)++] = code | (uint32_t)NO_LIMIT << 8;
    }
    search->entries[(*next)++] = code | limit << 8;
    return true;
}

/* A middle so near to 0 that its key is not its own cannot be a limit. */
static bool
has_key(float middle)
{
    return ct_quant_magnitude(middle) > LEAST &&
           ct_quant_magnitude(middle) < LEAST + MOST;
}

static void
make(ct_quant_search *search, const float *map)
{
    int32_t next = 0;
    search->map = map;
    search->direct = true;
    for (uint32_t i = 0; i + 1 < CT_QUANT_CODES; i++) {
        const float middle = ct_quant_middle(map[i], map[i + 1]);
        const int32_t key = key_of(middle);
        search->middles[i] = middle;
        search->direct = search->direct && has_key(middle) &&
                         fill(search, &next, key, i, (uint32_t)key & 0xffff);
    }
    search->direct =
        search->direct && fill(search, &next, MOST, CT_QUANT_CODES - 1, NO_LIMIT);
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
        const size_t size = block_at(done, n);
        const size_t part = real == CT_F64
                                ? 0
                                : ct_quant_gather_numbers(isa, codes + done, quant.map,
                                                          absmax, to, size);
        dequantisers[isa][real](codes + done, quant.map, absmax, to, part, size);
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
        *absmax++ =
            quantisers[isa][real](isa, x, search, codes + done, block_at(done, n));
    }
}
