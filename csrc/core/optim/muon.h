/* Newton-Schulz: the nearest orthogonal matrix, or one near it, by the device's matrix
 * product.
 *
 * Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024: X becomes a X + (b A + c A A) X with A = X X', n_steps times; in bfloat16, as
 * there, each product added in float32 and rounded once, or in a wider dtype. */
#ifndef CORE_OPTIM_MUON_H
#define CORE_OPTIM_MUON_H

#include "core/base/status.h"
#include "core/device/device.h"

CT_BEGIN_DECLS

typedef struct ct_orthogonal {
    size_t rows, cols;
    ct_dtype dtype; /* CT_BF16, CT_F32 or CT_F64 */
    double a, b, c;
    int n_steps;
} ct_orthogonal;

/* Bytes of device memory for the run, the matrix at their beginning included. */
size_t ct_orthogonal_bytes(const ct_orthogonal *o);

/* Where in memory a matrix waits for its division by the norm. */
void *ct_orthogonal_waiting(const ct_orthogonal *o, void *memory);

/* Works on a matrix of norm <= 1, row major, at the beginning of memory. *result: the
 * address of the outcome, there or elsewhere in memory. */
CT_NODISCARD ct_status ct_orthogonal_run(const ct_device *device, void *stream,
                                         ct_scratch *scratch, const ct_orthogonal *o,
                                         void *memory, void **result, ct_error *err);

CT_END_DECLS

#endif
