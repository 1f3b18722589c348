#include "core/base/copy_far.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

/* An ordinary store fetches the line that it is about to overwrite; these do not, which
 * is a third of the traffic. A core fetches ahead within a page and no further, so it
 * is kept on a few pages at once. Measured on two cores that copy 16 MB each: 2.4 ms by
 * memcpy, 1.8 by these stores in order, 1.25 from 4 pages in turn. */
enum {
    LINE_BYTES = 64, /* a multiple of what one store takes */
    PAGE_BYTES = 4096,
    PAGES = 4,
    BLOCK_BYTES = PAGES * PAGE_BYTES
};

static inline void
stream_line(char *to, const char *from)
{
    __m128i parts[LINE_BYTES / sizeof(__m128i)];
    memcpy(parts, from, sizeof parts);
    for (size_t i = 0; i < LINE_BYTES / sizeof(__m128i); i++) {
        void *at = to + i * sizeof(__m128i);
        _mm_stream_si128(at, parts[i]);
    }
}

static void
stream_block(char *to, const char *from)
{
    for (size_t line = 0; line < PAGE_BYTES; line += LINE_BYTES) {
        for (size_t page = 0; page < BLOCK_BYTES; page += PAGE_BYTES) {
            stream_line(to + page + line, from + page + line);
        }
    }
}

void
ct_copy_far(void *to, const void *from, size_t bytes)
{
    const size_t unaligned = -(uintptr_t)to % LINE_BYTES;
    size_t at = unaligned < bytes ? unaligned : bytes;
    memcpy(to, from, at);
    for (; bytes - at >= BLOCK_BYTES; at += BLOCK_BYTES) {
        stream_block((char *)to + at, (const char *)from + at);
    }
    _mm_sfence(); /* other cores see these stores before any that follows */
    memcpy((char *)to + at, (const char *)from + at, bytes - at);
}

#else

void
ct_copy_far(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif
