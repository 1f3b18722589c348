/* 8-bit state on the CPU: tables for finding values of a map, and gathers of AVX2. */
#include "cpu/quant.h"

#include "math/quant.h"

enum {
    LEAST = (127 - 23) << 23, /* 2^-23 */
    MOST = 23 << 23,          /* the key of 1 */
    NO_LIMIT = 0xffff         /* above every second half of a key */
};

/* A number's bits as an integer of the same order, negative for negative numbers. All
 * numbers below 2^-23 have equal keys. */
static inline int32_t
key_of(float unit)
{
    const int32_t sign = -(int32_t)(ct_bits_from_f32(unit) >> 31);
    const int32_t size = (int32_t)ct_quant_magnitude(unit);
    const int32_t above = size > LEAST ? size - LEAST : 0;
    return (above < MOST ? above : MOST) ^ sign;
}

/* ---- look-ups -------------------------------------------------------------------
 *
 * The two look-ups for every element use the gathers of AVX2; GCC does not generate
 * gathers from plain loops. The look-ups then take a third of the time, the update of
 * AdamW's quantized state two thirds. The loops of cpu/body/quant.h do the rest.
 */

#ifdef CT_HAVE_X86_LEVELS
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t
numbers_avx2(const uint8_t *quantized, const float *map, float absmax, float *to,
             size_t n)
{
    const __m256 scale = _mm256_set1_ps(absmax);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i eight =
            _mm_loadl_epi64((const __m128i *)(const void *)(quantized + i));
        const __m256 number = _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(eight), 4);
        _mm256_storeu_ps(to + i, _mm256_mul_ps(number, scale));
    }
    return i;
}

/* Eight quantized values, each in 32 bits. */
__attribute__((target("avx2"))) static inline __m256i
eight_quantized(const int32_t *keys, const uint32_t *entries)
{
    const __m256i key = _mm256_loadu_si256((const __m256i *)(const void *)keys);
    const __m256i entry =
        _mm256_i32gather_epi32((const int *)(const void *)(entries + CT_QUANT_BUCKETS),
                               _mm256_srai_epi32(key, 16), 4);
    const __m256i above = _mm256_cmpgt_epi32(
        _mm256_and_si256(key, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(entry, 8));
    return _mm256_sub_epi32(_mm256_and_si256(entry, _mm256_set1_epi32(0xff)), above);
}

__attribute__((target("avx2"))) static size_t
quantized_avx2(const int32_t *keys, const uint32_t *entries, uint8_t *quantized,
               size_t n)
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i low = _mm256_packus_epi32(eight_quantized(keys + i, entries),
                                                eight_quantized(keys + i + 8, entries));
        const __m256i high =
            _mm256_packus_epi32(eight_quantized(keys + i + 16, entries),
                                eight_quantized(keys + i + 24, entries));
        const __m256i all =
            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
        _mm256_storeu_si256((__m256i *)(void *)(quantized + i), all);
    }
    return i;
}
#endif

/* to[i] = map[quantized[i]] * absmax; returns the number of elements done, 0 for the
 * base set. */
static size_t
gather_numbers(ct_isa isa, const uint8_t *quantized, const float *map, float absmax,
               float *to, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return numbers_avx2(quantized, map, absmax, to, n);
    }
#endif
    (void)isa, (void)quantized, (void)map, (void)absmax, (void)to, (void)n;
    return 0;
}

/* quantized[i] from keys[i], by the entries of a ct_quant_search; returns as above. */
static size_t
gather_quantized(ct_isa isa, const int32_t *keys, const uint32_t *entries,
                 uint8_t *quantized, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return quantized_avx2(keys, entries, quantized, n);
    }
#endif
    (void)isa, (void)keys, (void)entries, (void)quantized, (void)n;
    return 0;
}

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/quant.h"
#include "cpu/expand.h"

typedef void
dequantise_body(const uint8_t *restrict quantized, const float *restrict map,
                float absmax, void *to, size_t from, size_t n);
typedef float quantise_body(ct_isa isa, const void *from, const ct_quant_search *search,
                            uint8_t *restrict quantized, size_t n);

static dequantise_body *const dequantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(dequantise);
static quantise_body *const quantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(quantise);

_Static_assert(CT_TILE % CT_QUANT_BLOCK == 0, "a tile is made of whole blocks");

/* ---- the search ------------------------------------------------------------------ */

/* Fills in entries up to the bucket of `key`, from the bucket *next on. False if the
 * bucket has a limit already. */
static bool
fill(ct_quant_search *search, int32_t *next, int32_t key, uint32_t value,
     uint32_t limit)
{
    const int32_t bucket = (key >> 16) + CT_QUANT_BUCKETS;
    if (bucket < *next) {
        return false;
    }
    while (*next < bucket) {
        search->entries[(*next)++] = value | (uint32_t)NO_LIMIT << 8;
    }
    search->entries[(*next)++] = value | limit << 8;
    return true;
}

/* A middle too near to 0 for a key of its own cannot be a limit. */
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
    for (uint32_t i = 0; i + 1 < CT_QUANT_MAP_SIZE; i++) {
        const float middle = ct_quant_middle(map[i], map[i + 1]);
        const int32_t key = key_of(middle);
        search->middles[i] = middle;
        search->direct = search->direct && has_key(middle) &&
                         fill(search, &next, key, i, (uint32_t)key & 0xffff);
    }
    search->direct =
        search->direct && fill(search, &next, MOST, CT_QUANT_MAP_SIZE - 1, NO_LIMIT);
}

/* Mostly all parameters share a map; after loading a checkpoint each may have another.
 */
static bool
fits(const ct_quant_search *search, const float *map)
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

/* ---- tiles ----------------------------------------------------------------------- */

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
    const uint8_t *quantized = (const uint8_t *)span->state[k] + from;
    for (size_t done = 0; done < n; done += CT_QUANT_BLOCK) {
        const float absmax = quant.absmax[(from + done) / CT_QUANT_BLOCK];
        void *to = real == CT_F64 ? (void *)&tile->f64[done] : (void *)&tile->f32[done];
        const size_t size = block_at(done, n);
        const size_t part =
            real == CT_F64
                ? 0
                : gather_numbers(isa, quantized + done, quant.map, absmax, to, size);
        dequantisers[isa][real](quantized + done, quant.map, absmax, to, part, size);
    }
}

void
ct_quant_store(ct_isa isa, ct_dtype real, const ct_tile *tile,
               const ct_quant_search *search, const ct_update_span *span, size_t k,
               size_t from, size_t n)
{
    uint8_t *quantized = (uint8_t *)span->state[k] + from;
    float *absmax = span->quant[k].absmax + from / CT_QUANT_BLOCK;
    for (size_t done = 0; done < n; done += CT_QUANT_BLOCK) {
        const void *x = real == CT_F64 ? (const void *)&tile->f64[done]
                                       : (const void *)&tile->f32[done];
        *absmax++ =
            quantisers[isa][real](isa, x, search, quantized + done, block_at(done, n));
    }
}
