/* Values on their way to other ranks: quantized to 8 or 4 bits, a scale for each block
 * of them, and what rounding left of every value, which is added to the next. */
#ifndef CT_DEVICE_QUANTIZED_H
#define CT_DEVICE_QUANTIZED_H

#include "core/base/span.h"

#include <stdint.h>

typedef struct ct_encoding {
    ct_span values;  /* of a float dtype; read */
    float *residual; /* n: added to the values, then what the codes miss of the sum */
    int8_t *codes;   /* ct_quantized_bytes(n, bits) */
    float *scales;   /* ct_quantized_blocks(n) */
    int bits;        /* of a code: 8 or 4 */
} ct_encoding;

/* What `parts` ranks have sent, each part_bytes behind the one before. */
typedef struct ct_decoding {
    ct_span values; /* of a float dtype; written: factor times the sum of the parts */
    const int8_t *codes;
    const float *scales;
    size_t parts, part_bytes;
    float factor;
    int bits;
} ct_decoding;

#endif
