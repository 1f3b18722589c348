/* A libcublas.so.13 for the emulation: the functions that cuda/cublas.c asks for, by
 * the definition. It is opened as the real one is. */
#include "../emul.h"
#include "math/half.h"

#include <stdint.h>

namespace {

const int invalid_value = 7; /* CUBLAS_STATUS_INVALID_VALUE */

struct context {
    cudaStream_t stream;
    bool whole_sums; /* over k, where parts of bfloat16 products' may be bfloat16 */
};

template <typename Element>
void
touch(const Element *matrix, int64_t rows, int64_t cols, int64_t ld, bool writes)
{
    for (int64_t j = 0; j < cols; j++) {
        emul::touch(matrix + j * ld, (size_t)rows * sizeof *matrix, writes);
    }
}

/* Elements of type Element, added as Real; in_parts: as elements of Element. */
template <typename Real, typename Element>
void
multiply(int op_a, int op_b, int64_t m, int64_t n, int64_t k, Real alpha,
         const Element *a, int64_t lda, const Element *b, int64_t ldb, Real beta,
         Element *c, int64_t ldc, bool in_parts)
{
    touch(a, op_a ? k : m, op_a ? m : k, lda, false);
    touch(b, op_b ? n : k, op_b ? k : n, ldb, false);
    touch(c, m, n, ldc, true);
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < m; i++) {
            Real sum = 0;
            for (int64_t p = 0; p < k; p++) {
                const Real x = (Real)(op_a ? a[p + i * lda] : a[i + p * lda]);
                sum += x * (Real)(op_b ? b[j + p * ldb] : b[p + j * ldb]);
                sum = in_parts && p == k / 2 ? (Real)(Element)sum : sum;
            }
            Element &to = c[i + j * ldc];
            to = (Element)(beta == 0 ? alpha * sum : alpha * sum + beta * (Real)to);
        }
    }
}

template <typename Real, typename Element>
int
enqueue(cudaStream_t stream, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
        Real alpha, const Element *a, int64_t lda, const Element *b, int64_t ldb,
        Real beta, Element *c, int64_t ldc, bool in_parts = false)
{
    if (lda < (op_a ? k : m) || ldb < (op_b ? n : k) || ldc < m || lda < 1 || ldb < 1) {
        return invalid_value;
    }
    emul::seen.stream = stream;
    emul::enqueue(stream, "cublasGemm", [=] {
        multiply(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, in_parts);
    });
    return 0;
}

struct bfloat16 {
    uint16_t bits;
    explicit bfloat16(float value) : bits(ct_bf16_from_f32(value))
    {
    }
    explicit operator float() const
    {
        return ct_f32_from_bf16(bits);
    }
};

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
cublasSetMathMode(context *handle, int mode)
{
    handle->whole_sums = (mode & 16) != 0;
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
    return status == invalid_value ? "CUBLAS_STATUS_INVALID_VALUE"
                                   : "CUBLAS_STATUS_SUCCESS";
}

int
cublasSgemm_v2_64(context *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                  const float *alpha, const float *a, int64_t lda, const float *b,
                  int64_t ldb, const float *beta, float *c, int64_t ldc)
{
    return enqueue(handle->stream, op_a, op_b, m, n, k, *alpha, a, lda, b, ldb, *beta,
                   c, ldc);
}

int
cublasDgemm_v2_64(context *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                  const double *alpha, const double *a, int64_t lda, const double *b,
                  int64_t ldb, const double *beta, double *c, int64_t ldc)
{
    return enqueue(handle->stream, op_a, op_b, m, n, k, *alpha, a, lda, b, ldb, *beta,
                   c, ldc);
}

int
cublasGemmEx_64(context *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                const void *alpha, const void *a, int type_a, int64_t lda,
                const void *b, int type_b, int64_t ldb, const void *beta, void *c,
                int type_c, int64_t ldc, int compute_type, int algorithm)
{
    const int bf16 = 14, compute_f32 = 68, default_algorithm = -1;
    if (type_a != bf16 || type_b != bf16 || type_c != bf16 ||
        compute_type != compute_f32 || algorithm != default_algorithm) {
        return invalid_value;
    }
    return enqueue(handle->stream, op_a, op_b, m, n, k, *(const float *)alpha,
                   (const bfloat16 *)a, lda, (const bfloat16 *)b, ldb,
                   *(const float *)beta, (bfloat16 *)c, ldc, !handle->whole_sums);
}

} // extern "C"
