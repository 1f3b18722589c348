/* CRC-32 (IEEE 802.3), the checksum of ZIP archives. */
#ifndef CT_CRC32_H
#define CT_CRC32_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The checksum of what gave `crc` (0 for nothing yet) followed by data[0..n). */
uint32_t ct_crc32(uint32_t crc, const void *data, size_t n);

#ifdef __cplusplus
}
#endif

#endif
