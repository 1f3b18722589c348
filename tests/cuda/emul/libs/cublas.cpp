/* A libcublas.so.13 for the emulation: the functions that cuda/cublas.c asks for, by
 * the definition. It is opened as the real one is. */
#include "../emul.h"

#include <stdint.h>

namespace {

struct context {
    cudaStream_t stream;
};

template <typename Real>
int
multiply(int op_a, int op_b, int64_t m, int64_t n, int64_t k, Real alpha, const Real *a,
         int64_t lda, const Real *b, int64_t ldb, Real beta, Real *c, int64_t ldc)
{
    if (lda < (op_a ? k : m) || ldb < (op_b ? n : k) || ldc < m || lda < 1 || ldb < 1) {
        return 7; /* CUBLAS_STATUS_INVALID_VALUE */
    }
    emul::open_device_memory(true);
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < m; i++) {
            Real sum = 0;
            for (int64_t p = 0; p < k; p++) {
                const Real x = op_a ? a[p + i * lda] : a[i + p * lda];
                sum += x * (op_b ? b[j + p * ldb] : b[p + j * ldb]);
            }
            Real &to = c[i + j * ldc];
            to = beta == 0 ? alpha * sum : alpha * sum + beta * to;
        }
    }
    emul::open_device_memory(false);
    return 0;
}

} // namespace

extern "C" {

int
cublasCreate_v2(context **handle)
{
    static context only;
    *handle = &only;
    return 0;
}

int
cublasSetStream_v2(context *handle, cudaStream_t stream)
{
    handle->stream = stream;
    return 0;
}

int
cublasGetProperty(int type, int *value)
{
    static const int version[] = {13, 1, 0};
    *value = version[type];
    return 0;
}

const char *
cublasGetStatusName(int status)
{
    return status == 7 ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_SUCCESS";
}

int
cublasSgemm_v2_64(context *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                  const float *alpha, const float *a, int64_t lda, const float *b,
                  int64_t ldb, const float *beta, float *c, int64_t ldc)
{
    emul::seen.stream = handle->stream;
    return multiply(op_a, op_b, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}

int
cublasDgemm_v2_64(context *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                  const double *alpha, const double *a, int64_t lda, const double *b,
                  int64_t ldb, const double *beta, double *c, int64_t ldc)
{
    emul::seen.stream = handle->stream;
    return multiply(op_a, op_b, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc);
}

} // extern "C"
