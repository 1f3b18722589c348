#include "core/base/crc.h"

void
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

/* Byte by byte, so that it means the same on every byte order; compilers make one
 * load of it where they may. */
static uint32_t
load_le32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
           (uint32_t)p[3] << 24;
}

uint32_t
ct_crc_table_run(const ct_crc_table *table, uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    const uint32_t(*t)[256] = table->t;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low = crc ^ load_le32(p);
        uint32_t high = load_le32(p + 4);
        crc = t[7][low & 255u] ^ t[6][low >> 8 & 255u] ^ t[5][low >> 16 & 255u] ^
              t[4][low >> 24] ^ t[3][high & 255u] ^ t[2][high >> 8 & 255u] ^
              t[1][high >> 16 & 255u] ^ t[0][high >> 24];
    }
    for (; n > 0; n--, p++) {
        crc = (crc >> 8) ^ t[0][(crc ^ *p) & 255u];
    }
    return ~crc;
}

uint32_t
ct_crc_multiply(uint32_t polynomial, uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        product ^= b & (0u - (uint32_t)((a & bit) != 0));
        b = (b >> 1) ^ (polynomial & (0u - (b & 1u)));
    }
    return product;
}

uint32_t
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

uint32_t
ct_crc_combine(uint32_t polynomial, uint32_t crc_a, uint32_t crc_b, uint64_t n_b)
{
    uint32_t moved =
        ct_crc_multiply(polynomial, ct_crc_append_zeros(polynomial, n_b), crc_a);
    return moved ^ crc_b;
}
