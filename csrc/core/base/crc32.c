#include "core/base/crc32.h"

#include "core/base/crc.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0xedb88320u

/* Constants, worked out at first use. */
static ct_crc_table table;
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)

enum {
    LANE_BYTES = 16,
    FOLD_BYTES = 4 * LANE_BYTES, /* four products are under way at a time */
    FOLDED_BYTES = 2 * FOLD_BYTES
};

/* What moves the two halves of a lane past the distance that it is folded over: x^(n +
 * 32) and x^(n - 32), reflected, for a distance of n bits. */
static uint64_t fold_far[2], fold_near[2];

/* x^bits modulo the polynomial, as the product of reflected numbers takes it. */
static uint64_t
power(uint64_t bits)
{
    uint32_t value = ct_crc_append_zeros(POLYNOMIAL, bits / 8);
    return (uint64_t)value << 1;
}

static void
fill_folds(void)
{
    fold_far[0] = power(8 * FOLD_BYTES + 32);
    fold_far[1] = power(8 * FOLD_BYTES - 32);
    fold_near[0] = power(8 * LANE_BYTES + 32);
    fold_near[1] = power(8 * LANE_BYTES - 32);
}

__attribute__((target("pclmul,sse2"))) static __m128i
fold(__m128i lane, __m128i by, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(lane, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse2"))) static __m128i
load_lane(const unsigned char *p)
{
    __m128i lane;
    memcpy(&lane, p, sizeof lane);
    return lane;
}

/* Folds all whole lanes of data[0..n), n >= FOLDED_BYTES, into one; what stays is that
 * lane followed by the rest, and tables sum that. */
__attribute__((target("pclmul,sse2"))) static uint32_t
run_folded(uint32_t crc, const unsigned char *p, size_t n)
{
    unsigned char lane[LANE_BYTES];
    __m128i x[4], far = _mm_set_epi64x((long long)fold_far[1], (long long)fold_far[0]);
    __m128i near = _mm_set_epi64x((long long)fold_near[1], (long long)fold_near[0]);
    for (size_t i = 0; i < 4; i++) {
        x[i] = load_lane(p + i * LANE_BYTES);
    }
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
    for (p += FOLD_BYTES, n -= FOLD_BYTES; n >= FOLD_BYTES; n -= FOLD_BYTES) {
        for (size_t i = 0; i < 4; i++) {
            x[i] = fold(x[i], far, load_lane(p + i * LANE_BYTES));
        }
        p += FOLD_BYTES;
    }
    for (size_t i = 1; i < 4; i++) {
        x[0] = fold(x[0], near, x[i]);
    }
    for (; n >= LANE_BYTES; n -= LANE_BYTES, p += LANE_BYTES) {
        x[0] = fold(x[0], near, load_lane(p));
    }
    memcpy(lane, &x[0], sizeof lane);
    /* The lane has the start value in it: the tables begin with none of their own. */
    crc = ct_crc_table_run(&table, 0xffffffffu, lane, sizeof lane);
    return ct_crc_table_run(&table, crc, p, n);
}

#endif

static void
fill_table(void)
{
    ct_crc_table_init(&table, POLYNOMIAL);
#if defined(__x86_64__)
    fill_folds();
    has_instruction = __builtin_cpu_supports("pclmul");
#endif
}

uint32_t
ct_crc32_portable(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&once, fill_table);
    return ct_crc_table_run(&table, crc, data, n);
}

uint32_t
ct_crc32(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&once, fill_table);
#if defined(__x86_64__)
    if (has_instruction && n >= FOLDED_BYTES) {
        return run_folded(crc, data, n);
    }
#endif
    return ct_crc_table_run(&table, crc, data, n);
}

uint32_t
ct_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    return ct_crc_combine(POLYNOMIAL, crc_a, crc_b, n_b);
}
