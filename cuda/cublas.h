/* cuBLAS, loaded at first use. */
#ifndef CT_CUDA_CUBLAS_H
#define CT_CUDA_CUBLAS_H

#include "core/device/device.h"

#include <stdint.h>

CT_BEGIN_DECLS

/* A product in cuBLAS's own terms: column major, C (m x n) = alpha * op(A) * op(B) +
 * beta * C. */
typedef struct ct_cublas_product {
    ct_dtype dtype; /* CT_F32, CT_F64, or CT_BF16 added in fp32 */
    bool trans_a, trans_b;
    int64_t m, n, k;
    double alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
} ct_cublas_product;

/* CT_EDEVICE when cuBLAS cannot be found or fails. */
CT_NODISCARD ct_status ct_cublas_gemm(void *stream, const ct_cublas_product *product,
                                      ct_error *err);

/* The version, 10000 * major + 100 * minor + patch. */
CT_NODISCARD ct_status ct_cublas_version(int *version, ct_error *err);

CT_END_DECLS

#endif
