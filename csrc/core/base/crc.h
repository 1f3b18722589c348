/* Table-driven CRC of 32 bits, eight bytes at a time, for any reflected polynomial.
 *
 * Source: Kounavis and Berry, "A Systematic Approach to Building High Performance
 * Software-based CRC Generators", 2005 (slicing by 8). */
#ifndef CT_CRC_TABLE_H
#define CT_CRC_TABLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* t[k][b]: what byte b contributes when k more bytes follow it. */
typedef struct ct_crc_table {
    uint32_t t[8][256];
} ct_crc_table;

void ct_crc_table_init(ct_crc_table *table, uint32_t polynomial);
uint32_t
ct_crc_table_run(const ct_crc_table *table, uint32_t crc, const void *data, size_t n);

/* a * b modulo the polynomial; bit 31 is x^0. */
uint32_t ct_crc_multiply(uint32_t polynomial, uint32_t a, uint32_t b);

/* x^(8 n) modulo the polynomial: multiplying by it appends n zero bytes. */
uint32_t ct_crc_append_zeros(uint32_t polynomial, uint64_t n);

/* The checksum of a followed by b, from those of each and b's length. */
uint32_t
ct_crc_combine(uint32_t polynomial, uint32_t crc_a, uint32_t crc_b, uint64_t n_b);

#ifdef __cplusplus
}
#endif

#endif
