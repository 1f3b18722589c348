#include "core/base/alloc.h"
#include "core/base/copy_far.h"
#include "ct_test.h"

#include <stdbool.h>
#include <string.h>

enum {
    LONGEST = 3 * (16 << 10) + 200, /* three blocks and a rest */
    EDGE = 128
};

static unsigned char
byte_at(size_t i)
{
    return (unsigned char)(i * 31 + i / 251);
}

/* Copies between these offsets from a line, and looks at what lies around, too. */
static void
check_copy(unsigned char *to, const unsigned char *from, size_t offset, size_t bytes)
{
    memset(to, 0xee, LONGEST + 2 * EDGE);
    ct_copy_far(to + EDGE + offset, from + 64 - offset, bytes);
    for (size_t i = 0; i < LONGEST + 2 * EDGE; i++) {
        const bool is_copied = i >= EDGE + offset && i < EDGE + offset + bytes;
        CHECK(to[i] == (is_copied ? from[i - EDGE - offset + 64 - offset] : 0xee));
    }
}

static void
test_every_byte_is_copied_and_no_other(void)
{
    static const size_t lengths[] = {0,     1,     63,        64,      65,
                                     16383, 16384, 16384 + 3, 3 << 14, LONGEST};
    static const size_t offsets[] = {0, 1, 15, 16, 63};
    unsigned char *to = ct_alloc(LONGEST + 2 * EDGE);
    unsigned char *from = ct_alloc(LONGEST + 2 * EDGE);
    CHECK(to != NULL && from != NULL);
    for (size_t i = 0; i < LONGEST + 2 * EDGE; i++) {
        from[i] = byte_at(i);
    }
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++) {
            check_copy(to, from, offsets[o], lengths[k]);
        }
    }
    ct_free(to);
    ct_free(from);
}

int
main(void)
{
    test_every_byte_is_copied_and_no_other();
    return 0;
}
