/* Newton-Schulz: the orthogonal matrix next to a given one, or near it, by the device's
 * matrix product.
 *
 * Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024: X becomes a X + (b A + c A A) X with A = X X', as often as asked; in bfloat16,
 * as there, each product added in float32 and rounded once, or in a wider dtype. */
#ifndef CT_ORTHOGONAL_H
#define CT_ORTHOGONAL_H

#include "core/device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_orthogonal {
    size_t rows, cols;
    ct_dtype dtype; /* CT_BF16, CT_F32 or CT_F64 */
    double a, b, c;
    int n_steps;
} ct_orthogonal;

/* Bytes of device memory that it takes, the matrix included, which comes first. */
size_t ct_orthogonal_bytes(const ct_orthogonal *o);

/* Works on a matrix of norm <= 1, row major, at the beginning of memory. *result is
 * where the outcome lies: there, or elsewhere in memory. */
CT_NODISCARD ct_status ct_orthogonal_run(const ct_device *device, void *stream,
                                         ct_scratch *scratch, const ct_orthogonal *o,
                                         void *memory, void **result, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
