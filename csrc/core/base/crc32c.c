#include "core/base/crc32c.h"

#include "core/base/crc.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u

/* Bytes of each of the three streams: long enough to hide the cost of joining them,
 * short enough for all three to stay in the first-level cache. */
enum {
    STREAM_BYTES = 4096,
    STREAMED_BYTES = 3 * STREAM_BYTES
};

/* Constants, worked out at first use. shift[s][k][b] moves byte k of a checksum past
 * s + 1 streams of bytes. */
static ct_crc_table table;
static uint32_t shift[2][4][256];
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void
fill_tables(void)
{
    ct_crc_table_init(&table, POLYNOMIAL);
    for (uint32_t s = 0; s < 2; s++) {
        uint32_t factor =
            ct_crc_append_zeros(POLYNOMIAL, (uint64_t)STREAM_BYTES * (s + 1));
        for (uint32_t k = 0; k < 4; k++) {
            for (uint32_t byte = 0; byte < 256; byte++) {
                shift[s][k][byte] =
                    ct_crc_multiply(POLYNOMIAL, factor, byte << (8 * k));
            }
        }
    }
#if defined(__x86_64__)
    has_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

uint32_t
ct_crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&once, fill_tables);
    return ct_crc_table_run(&table, crc, data, n);
}

uint32_t
ct_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    return ct_crc_combine(POLYNOMIAL, crc_a, crc_b, n_b);
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
    (void)pthread_once(&once, fill_tables);
#if defined(__x86_64__)
    if (has_instruction) {
        return run_instruction(crc, data, n);
    }
#endif
    return ct_crc_table_run(&table, crc, data, n);
}
