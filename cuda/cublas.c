/* A handle belongs to a device and remembers a stream: a handle per device, with the
 * lock held from setting the stream to the enqueuing call.
 *
 * The library is opened at the first product and not linked: a wheel of ctrainer runs
 * without cuBLAS until a rule needs matrices. Hence the declarations below instead of
 * NVIDIA's header. */
#include "cublas.h"

#include "dynlib.h"
#include "status.h"

#include <pthread.h>

/* The part of cublas_v2.h that is used; the numbers are cuBLAS's ABI. */
typedef struct cublasContext *cublas_handle;
typedef int cublas_status; /* 0 is success */
enum {
    CUBLAS_OP_N = 0,
    CUBLAS_OP_T = 1,
    CUDA_R_16BF = 14,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_GEMM_DEFAULT = -1,
    /* Else partial sums over k may be bfloat16, as products are. */
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};

typedef cublas_status
sgemm_fn(cublas_handle handle, int trans_a, int trans_b, int64_t m, int64_t n,
         int64_t k, const float *alpha, const float *a, int64_t lda, const float *b,
         int64_t ldb, const float *beta, float *c, int64_t ldc);
typedef cublas_status
dgemm_fn(cublas_handle handle, int trans_a, int trans_b, int64_t m, int64_t n,
         int64_t k, const double *alpha, const double *a, int64_t lda, const double *b,
         int64_t ldb, const double *beta, double *c, int64_t ldc);
typedef cublas_status
gemm_ex_fn(cublas_handle handle, int trans_a, int trans_b, int64_t m, int64_t n,
           int64_t k, const void *alpha, const void *a, int type_a, int64_t lda,
           const void *b, int type_b, int64_t ldb, const void *beta, void *c,
           int type_c, int64_t ldc, int compute_type, int algorithm);

typedef struct cublas_functions {
    cublas_status (*create)(cublas_handle *handle);
    cublas_status (*set_stream)(cublas_handle handle, cudaStream_t stream);
    cublas_status (*set_math_mode)(cublas_handle handle, int mode);
    cublas_status (*get_property)(int property, int *value);
    const char *(*status_name)(cublas_status status);
    sgemm_fn *sgemm;
    dgemm_fn *dgemm;
    gemm_ex_fn *gemm_ex;
} cublas_functions;

static const ct_dynlib_spec library = {"libcublas.so.13", "nvidia/cu13/lib",
                                       "nvidia-cublas>=13,<14"};
static const ct_dynlib_symbol symbols[] = {
    {"cublasCreate_v2",     offsetof(cublas_functions, create)       },
    {"cublasSetStream_v2",  offsetof(cublas_functions, set_stream)   },
    {"cublasSetMathMode",   offsetof(cublas_functions, set_math_mode)},
    {"cublasGetProperty",   offsetof(cublas_functions, get_property) },
    {"cublasGetStatusName", offsetof(cublas_functions, status_name)  },
    {"cublasSgemm_v2_64",   offsetof(cublas_functions, sgemm)        },
    {"cublasDgemm_v2_64",   offsetof(cublas_functions, dgemm)        },
    {"cublasGemmEx_64",     offsetof(cublas_functions, gemm_ex)      },
};

enum {
    MAX_DEVICES = 64
};

static cublas_functions cublas;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;
static cublas_handle handles[MAX_DEVICES];

/* The lock is held: the table is filled once. */
static ct_status
load(ct_error *err)
{
    if (loaded) {
        return CT_OK;
    }
    ct_status status = ct_dynlib_load(&library, symbols,
                                      sizeof symbols / sizeof symbols[0], &cublas, err);
    loaded = status == CT_OK;
    return status;
}

static ct_status
check(cublas_status result, const char *what, ct_error *err)
{
    if (result == 0) {
        return CT_OK;
    }
    return ct_fail(err, CT_EDEVICE, "cannot %s: cuBLAS says %s", what,
                   cublas.status_name(result));
}

static ct_status
start(cublas_handle *handle, ct_error *err)
{
    cublas_handle made = NULL;
    ct_status status = check(cublas.create(&made), "start cuBLAS", err);
    if (status == CT_OK) {
        status = check(cublas.set_math_mode(
                           made, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
                       "set cuBLAS's math mode", err);
    }
    if (status == CT_OK) {
        *handle = made;
    }
    return status;
}

/* The current device's handle, made at first use. The lock is held. */
static ct_status
handle_borrow(cublas_handle *handle, ct_error *err)
{
    int device = 0;
    ct_status status = load(err);
    if (status == CT_OK) {
        status = ct_cuda_check(cudaGetDevice(&device), "ask for the device", err);
    }
    if (status == CT_OK && device >= MAX_DEVICES) {
        status = ct_fail(err, CT_EDEVICE, "device %d: at most %d devices work", device,
                         (int)MAX_DEVICES);
    }
    if (status == CT_OK && handles[device] == NULL) {
        status = start(&handles[device], err);
    }
    if (status == CT_OK) {
        *handle = handles[device];
    }
    return status;
}

static cublas_status
multiply(cublas_handle handle, const ct_cublas_product *p)
{
    const int op_a = p->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int op_b = p->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    if (p->dtype == CT_F64) {
        return cublas.dgemm(handle, op_a, op_b, p->m, p->n, p->k, &p->alpha, p->a,
                            p->lda, p->b, p->ldb, &p->beta, p->c, p->ldc);
    }
    /* cuBLAS reads the factors as the type of the computation; float32 for bf16
     * matrices, too. */
    const float alpha = (float)p->alpha, beta = (float)p->beta;
    if (p->dtype == CT_BF16) {
        return cublas.gemm_ex(handle, op_a, op_b, p->m, p->n, p->k, &alpha, p->a,
                              CUDA_R_16BF, p->lda, p->b, CUDA_R_16BF, p->ldb, &beta,
                              p->c, CUDA_R_16BF, p->ldc, CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT);
    }
    return cublas.sgemm(handle, op_a, op_b, p->m, p->n, p->k, &alpha, p->a, p->lda,
                        p->b, p->ldb, &beta, p->c, p->ldc);
}

ct_status
ct_cublas_gemm(void *stream, const ct_cublas_product *product, ct_error *err)
{
    cublas_handle handle = NULL;
    (void)pthread_mutex_lock(&lock);
    ct_status status = handle_borrow(&handle, err);
    if (status == CT_OK) {
        status = check(cublas.set_stream(handle, stream), "set cuBLAS's stream", err);
    }
    if (status == CT_OK) {
        status = check(multiply(handle, product), "multiply matrices", err);
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

/* By property, since cublasGetVersion wants a handle and that a device. */
ct_status
ct_cublas_version(int *version, ct_error *err)
{
    int parts[3] = {0};
    (void)pthread_mutex_lock(&lock);
    ct_status status = load(err);
    for (int i = 0; status == CT_OK && i < 3; i++) {
        status = check(cublas.get_property(i, &parts[i]), "ask for its version", err);
    }
    (void)pthread_mutex_unlock(&lock);
    if (status == CT_OK) {
        *version = 10000 * parts[0] + 100 * parts[1] + parts[2];
    }
    return status;
}
