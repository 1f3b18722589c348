/* CRC-32 (IEEE 802.3), the checksum of ZIP archives.
 *
 * Folds 64 bytes at a time with the processor's carry-less product where there is one,
 * uses tables elsewhere; both give the same values.
 *
 * Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel, 2009, for bit-reflected data. */
#ifndef CORE_BASE_CRC_H
#define CORE_BASE_CRC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The checksum of what gave `crc` (0 for nothing yet) followed by data[0..n). */
uint32_t ct_crc32(uint32_t crc, const void *data, size_t n);

/* The same without special instructions. */
uint32_t ct_crc32_portable(uint32_t crc, const void *data, size_t n);

/* The checksum of a followed by b, from those of each and b's length. */
uint32_t ct_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b);

/* CRC-32C (Castagnoli), the checksum of a checkpoint's files.
 *
 * Uses the processor's instruction in three interleaved streams where there is one,
 * tables elsewhere; both give the same values.
 *
 * Source: RFC 3720, appendix B.4 (test vectors); Gopal et al., "Fast CRC Computation
 * for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011 (the streams). */

/* The checksum of what gave `crc` (0 for nothing yet) followed by data[0..n). */
uint32_t ct_crc32c(uint32_t crc, const void *data, size_t n);

/* The same without special instructions. */
uint32_t ct_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* The checksum of a followed by b, from those of each and b's length. */
uint32_t ct_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b);

#ifdef __cplusplus
}
#endif

#endif
