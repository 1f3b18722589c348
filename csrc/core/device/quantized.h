/* Values on the way to other ranks: quantized to 8 or 4 bits with a scale for each
 * block, and a residual, the error of rounding, to be added to the next values. */
#ifndef CT_DEVICE_QUANTIZED_H
#define CT_DEVICE_QUANTIZED_H

#include "core/base/span.h"

#include <stdint.h>

typedef struct ct_encoding {
    ct_span values;    /* of a float dtype; read */
    float *residual;   /* n: added to the values; becomes the sum's rounding error */
    int8_t *quantized; /* ct_quantized_bytes(n, bits) */
    float *scales;     /* ct_quantized_blocks(n) */
    int bits;          /* of a quantized value: 8 or 4 */
} ct_encoding;

/* The parts received from `parts` ranks, part_bytes apart. */
typedef struct ct_decoding {
    ct_span values; /* of a float dtype; written: factor times the sum of the parts */
    const int8_t *quantized;
    const float *scales;
    size_t parts, part_bytes;
    float factor;
    int bits;
} ct_decoding;

#endif
