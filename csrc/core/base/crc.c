/* CRC-32 of ZIP and PNG and CRC-32C of Castagnoli, by instructions of the processor
 * (x86-64) or by tables, eight bytes at a time, with equal results. Checksums of parts
 * combine into the checksum of the whole, so that several threads can sum a file. */
#include "core/base/crc.h"

#include "core/base/buf.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Table-driven CRC of 32 bits, eight bytes at a time, for any reflected polynomial.
 *
 * Source: Kounavis and Berry, "A Systematic Approach to Building High Performance
 * Software-based CRC Generators", 2005 (slicing by 8). */

/* t[k][b]: contribution of byte b, followed by k more bytes. */
typedef struct ct_crc_table {
    uint32_t t[8][256];
} ct_crc_table;

static void
ct_crc_table_init(ct_crc_table *table, uint32_t polynomial)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (polynomial & (0u - (crc & 1u)));
        }
        table->t[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = table->t[k - 1][byte];
            table->t[k][byte] = (crc >> 8) ^ table->t[0][crc & 255u];
        }
    }
}

static uint32_t
ct_crc_table_run(const ct_crc_table *table, uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    const uint32_t(*t)[256] = table->t;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low = crc ^ ct_load_le32(p);
        uint32_t high = ct_load_le32(p + 4);
        crc = t[7][low & 255u] ^ t[6][low >> 8 & 255u] ^ t[5][low >> 16 & 255u] ^
              t[4][low >> 24] ^ t[3][high & 255u] ^ t[2][high >> 8 & 255u] ^
              t[1][high >> 16 & 255u] ^ t[0][high >> 24];
    }
    for (; n > 0; n--, p++) {
        crc = (crc >> 8) ^ t[0][(crc ^ *p) & 255u];
    }
    return ~crc;
}

/* a * b modulo the polynomial; bit 31 is x^0. */
static uint32_t
ct_crc_multiply(uint32_t polynomial, uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        product ^= b & (0u - (uint32_t)((a & bit) != 0));
        b = (b >> 1) ^ (polynomial & (0u - (b & 1u)));
    }
    return product;
}

/* x^(8 n) modulo the polynomial: multiplying by it appends n zero bytes. */
static uint32_t
ct_crc_append_zeros(uint32_t polynomial, uint64_t n)
{
    uint32_t result = 0x80000000u, square = 0x00800000u; /* x^0 and x^8 */
    for (; n != 0; n >>= 1) {
        if (n & 1u) {
            result = ct_crc_multiply(polynomial, result, square);
        }
        square = ct_crc_multiply(polynomial, square, square);
    }
    return result;
}

/* The checksum of a followed by b, from the checksums of both and the length of b. */
static uint32_t
ct_crc_combine(uint32_t polynomial, uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    uint32_t moved =
        ct_crc_multiply(polynomial, ct_crc_append_zeros(polynomial, n_b), crc_a);
    return moved ^ crc_b;
}

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0xedb88320u

/* Constants, computed at first use. */
static ct_crc_table crc32_table;
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)

enum {
    LANE_BYTES = 16,
    FOLD_BYTES = 4 * LANE_BYTES, /* four products at a time */
    FOLDED_BYTES = 2 * FOLD_BYTES
};

/* Factors of the two halves of a lane for folding it over n bits: x^(n + 32) and x^(n -
 * 32), reflected. */
static uint64_t fold_far[2], fold_near[2];

/* x^bits modulo the polynomial, shifted as a product of reflected numbers needs. */
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

/* Folds all whole lanes of p[0..n), n >= FOLDED_BYTES, into one lane; tables sum this
 * lane and the rest. */
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
    /* The lane contains the start value: the tables begin without one. */
    crc = ct_crc_table_run(&crc32_table, 0xffffffffu, lane, sizeof lane);
    return ct_crc_table_run(&crc32_table, crc, p, n);
}

#endif

static void
fill_table(void)
{
    ct_crc_table_init(&crc32_table, POLYNOMIAL);
#if defined(__x86_64__)
    fill_folds();
    has_instruction = __builtin_cpu_supports("pclmul");
#endif
}

uint32_t
ct_crc32_portable(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&once, fill_table);
    return ct_crc_table_run(&crc32_table, crc, data, n);
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
    return ct_crc_table_run(&crc32_table, crc, data, n);
}

uint32_t
ct_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    return ct_crc_combine(POLYNOMIAL, crc_a, crc_b, n_b);
}

#define CRC32C_POLYNOMIAL 0x82f63b78u

/* Bytes of each of the three streams: long enough to hide the cost of combining,
 * short enough for the first-level cache. */
enum {
    STREAM_BYTES = 4096,
    STREAMED_BYTES = 3 * STREAM_BYTES
};

/* Constants, computed at first use. shift[s][k][b] moves byte k of a checksum past s +
 * 1 streams. */
static ct_crc_table crc32c_table;
static uint32_t shift[2][4][256];
static bool crc32c_has_instruction;
static pthread_once_t crc32c_once = PTHREAD_ONCE_INIT;

static void
fill_tables(void)
{
    ct_crc_table_init(&crc32c_table, CRC32C_POLYNOMIAL);
    for (uint32_t s = 0; s < 2; s++) {
        uint32_t factor =
            ct_crc_append_zeros(CRC32C_POLYNOMIAL, (uint64_t)STREAM_BYTES * (s + 1));
        for (uint32_t k = 0; k < 4; k++) {
            for (uint32_t byte = 0; byte < 256; byte++) {
                shift[s][k][byte] =
                    ct_crc_multiply(CRC32C_POLYNOMIAL, factor, byte << (8 * k));
            }
        }
    }
#if defined(__x86_64__)
    crc32c_has_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

uint32_t
ct_crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&crc32c_once, fill_tables);
    return ct_crc_table_run(&crc32c_table, crc, data, n);
}

uint32_t
ct_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    return ct_crc_combine(CRC32C_POLYNOMIAL, crc_a, crc_b, n_b);
}

#if defined(__x86_64__)

static uint32_t
move_past(uint32_t (*by)[256], uint32_t crc)
{
    return by[0][crc & 255u] ^ by[1][crc >> 8 & 255u] ^ by[2][crc >> 16 & 255u] ^
           by[3][crc >> 24];
}

static uint64_t
load64(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* The instruction takes three cycles but starts one each cycle, hence three streams. */
__attribute__((target("sse4.2"))) static uint32_t
run_streams(uint32_t crc, const unsigned char *p)
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < STREAM_BYTES; i += 8) {
        a = __builtin_ia32_crc32di(a, load64(p + i));
        b = __builtin_ia32_crc32di(b, load64(p + STREAM_BYTES + i));
        c = __builtin_ia32_crc32di(c, load64(p + STREAMED_BYTES - STREAM_BYTES + i));
    }
    return move_past(shift[1], (uint32_t)a) ^ move_past(shift[0], (uint32_t)b) ^
           (uint32_t)c;
}

__attribute__((target("sse4.2"))) static uint32_t
run_instruction(uint32_t crc, const unsigned char *p, size_t n)
{
    crc = ~crc;
    for (; n >= STREAMED_BYTES; n -= STREAMED_BYTES, p += STREAMED_BYTES) {
        crc = run_streams(crc, p);
    }
    for (; n >= 8; n -= 8, p += 8) {
        crc = (uint32_t)__builtin_ia32_crc32di(crc, load64(p));
    }
    for (; n > 0; n--, p++) {
        crc = __builtin_ia32_crc32qi(crc, *p);
    }
    return ~crc;
}

#endif

uint32_t
ct_crc32c(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&crc32c_once, fill_tables);
#if defined(__x86_64__)
    if (crc32c_has_instruction) {
        return run_instruction(crc, data, n);
    }
#endif
    return ct_crc_table_run(&crc32c_table, crc, data, n);
}
