/* CRC-32C and CRC-32 against published values, and the two ways against each other. */
#include "core/base/crc.h"
#include "ct_test.h"

#include <string.h>

static unsigned char noise[100000];

static void
fill_noise(void)
{
    uint32_t seed = 12345;
    for (size_t i = 0; i < sizeof noise; i++) {
        seed = seed * 1664525u + 1013904223u;
        noise[i] = (unsigned char)(seed >> 24);
    }
}

/* RFC 3720, appendix B.4. */
static void
test_rfc_vectors(void)
{
    unsigned char data[32];
    memset(data, 0, sizeof data);
    CHECK(ct_crc32c(0, data, 32) == 0x8a9136aau);
    memset(data, 0xff, sizeof data);
    CHECK(ct_crc32c(0, data, 32) == 0x62a8ab43u);
    for (size_t i = 0; i < 32; i++) {
        data[i] = (unsigned char)i;
    }
    CHECK(ct_crc32c(0, data, 32) == 0x46dd794eu);
    CHECK(ct_crc32c(0, "123456789", 9) == 0xe3069283u);
}

static void
test_zip_vectors(void)
{
    CHECK(ct_crc32(0, "123456789", 9) == 0xcbf43926u);
    CHECK(ct_crc32(0, "", 0) == 0);
    CHECK(ct_crc32(ct_crc32(0, "1234", 4), "56789", 5) == 0xcbf43926u);
}

static void
test_instruction_equals_tables_at_every_length_and_alignment(void)
{
    for (size_t n = 0; n < 70000; n += n < 64 ? 1 : 977) {
        for (size_t at = 0; at < 9; at++) {
            CHECK(ct_crc32c(7, noise + at, n) == ct_crc32c_portable(7, noise + at, n));
            CHECK(ct_crc32(7, noise + at, n) == ct_crc32_portable(7, noise + at, n));
        }
    }
}

static void
test_pieces_combine_to_the_whole(void)
{
    uint32_t whole = ct_crc32c(0, noise, sizeof noise);
    uint32_t zip_whole = ct_crc32_portable(0, noise, sizeof noise);
    for (size_t cut = 0; cut <= sizeof noise; cut += 7919) {
        uint32_t a = ct_crc32c(0, noise, cut);
        uint32_t b = ct_crc32c(0, noise + cut, sizeof noise - cut);
        CHECK(ct_crc32c_combine(a, b, sizeof noise - cut) == whole);
        CHECK(ct_crc32c(a, noise + cut, sizeof noise - cut) == whole);
        a = ct_crc32(0, noise, cut);
        b = ct_crc32(0, noise + cut, sizeof noise - cut);
        CHECK(ct_crc32_combine(a, b, sizeof noise - cut) == zip_whole);
    }
}

int
main(void)
{
    fill_noise();
    test_rfc_vectors();
    test_zip_vectors();
    test_instruction_equals_tables_at_every_length_and_alignment();
    test_pieces_combine_to_the_whole();
    return 0;
}
