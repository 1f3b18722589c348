#include "cpu/quant_gather.h"

#include "cpu/quant.h"

#ifdef CT_HAVE_X86_LEVELS
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t
numbers_avx2(const uint8_t *codes, const float *map, float absmax, float *to, size_t n)
{
    const __m256 scale = _mm256_set1_ps(absmax);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i eight =
            _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        const __m256 number = _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(eight), 4);
        _mm256_storeu_ps(to + i, _mm256_mul_ps(number, scale));
    }
    return i;
}

/* Eight codes, each in 32 bits. */
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
quantized_avx2(const int32_t *keys, const uint32_t *entries, uint8_t *codes, size_t n)
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
        _mm256_storeu_si256((__m256i *)(void *)(codes + i), all);
    }
    return i;
}
#endif

size_t
ct_quant_gather_numbers(ct_isa isa, const uint8_t *codes, const float *map,
                        float absmax, float *to, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return numbers_avx2(codes, map, absmax, to, n);
    }
#endif
    (void)isa, (void)codes, (void)map, (void)absmax, (void)to, (void)n;
    return 0;
}

size_t
ct_quant_gather_quantized(ct_isa isa, const int32_t *keys, const uint32_t *entries,
                          uint8_t *codes, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return quantized_avx2(keys, entries, codes, n);
    }
#endif
    (void)isa, (void)keys, (void)entries, (void)codes, (void)n;
    return 0;
}
