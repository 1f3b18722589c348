/* CRC-32 (IEEE 802.3), the checksum of ZIP archives.
 *
 * Folds 64 bytes at a time with the processor's carry-less product, or uses tables;
 * both give the same values.
 *
 * Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel, 2009, for bit-reflected data. */
#ifndef CORE_BASE_CRC_H
#define CORE_BASE_CRC_H

#include "core/base/decls.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Continues the checksum `crc` (0: of nothing) by data[0..n). */
uint32_t ct_crc32(uint32_t crc, const void *data, size_t n);

/* ct_crc32() by tables alone. */
uint32_t ct_crc32_portable(uint32_t crc, const void *data, size_t n);

/* The checksum of a followed by b, from the checksums of both and the length of b. */
uint32_t ct_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b);

/* CRC-32C (Castagnoli), the checksum of a checkpoint's files.
 *
 * Uses the processor's instruction in three interleaved streams, or tables; both give
 * the same values.
 *
 * Source: RFC 3720, appendix B.4 (test vectors); Gopal et al., "Fast CRC Computation
 * for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011 (the streams). */

/* Continues the checksum `crc` (0: of nothing) by data[0..n). */
uint32_t ct_crc32c(uint32_t crc, const void *data, size_t n);

/* ct_crc32() by tables alone. */
uint32_t ct_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* The checksum of a followed by b, from the checksums of both and the length of b. */
uint32_t ct_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_b);

CT_END_DECLS

#endif
