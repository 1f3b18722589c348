/* Conversions between the stored dtype and the type of the computation, for tiles.
 *
 * For float16 the processor has instructions with the same results as math/half.h; the
 * compiler does not find them behind the arithmetic. They halve the time of an update
 * of float16. */
#include "cpu/tile.h"

#define CT_BODY "cpu/body/tile.h"
#include "cpu/expand.h"

typedef void
widen_body(const void *data, size_t from, size_t n, ct_tile *to, bool wide);
typedef void
narrow_body(const ct_tile *from, bool wide, void *data, size_t to, size_t n);

static widen_body *const wideners[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(widen);
static narrow_body *const narrowers[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(narrow);

#ifdef CT_HAVE_X86_LEVELS
#include <immintrin.h>

__attribute__((target("avx,f16c"))) static void
widen_f16_f16c(const uint16_t *from, size_t n, float *to)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
    }
    for (; i < n; i++) {
        to[i] = ct_f32_from_f16(from[i]);
    }
}

__attribute__((target("avx,f16c"))) static void
narrow_f16_f16c(const float *from, size_t n, uint16_t *to)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i half =
            _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(to + i), half);
    }
    for (; i < n; i++) {
        to[i] = ct_f16_from_f32(from[i]);
    }
}

static bool
has_f16c(ct_isa isa, ct_dtype dtype, bool wide)
{
    return isa != CT_ISA_BASE && dtype == CT_F16 && !wide;
}
#endif

void
ct_tile_load(ct_isa isa, ct_tile *tile, bool wide, ct_dtype dtype, const void *data,
             size_t from, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (has_f16c(isa, dtype, wide)) {
        widen_f16_f16c((const uint16_t *)data + from, n, tile->f32);
        return;
    }
#endif
    wideners[isa][dtype](data, from, n, tile, wide);
}

void
ct_tile_store(ct_isa isa, const ct_tile *tile, bool wide, ct_dtype dtype, void *data,
              size_t to, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (has_f16c(isa, dtype, wide)) {
        narrow_f16_f16c(tile->f32, n, (uint16_t *)data + to);
        return;
    }
#endif
    narrowers[isa][dtype](tile, wide, data, to, n);
}
