/* NumPy's wheels carry an OpenBLAS with 64-bit integers, whose names say so; one with
 * 32-bit integers is left alone. The library is private to its module, so it is found
 * among the objects of the process, and looked for until it is there, since NumPy may
 * be imported later. */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include "cpu/blas.h"

#if defined(__linux__)

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum {
    ROW_MAJOR = 101,
    AS_IT_IS = 111,
    TRANSPOSED = 112
};

typedef void sgemm64_fn(int order, int trans_a, int trans_b, int64_t m, int64_t n,
                        int64_t k, float alpha, const float *a, int64_t lda,
                        const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
typedef void
dgemm64_fn(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
           double alpha, const double *a, int64_t lda, const double *b, int64_t ldb,
           double beta, double *c, int64_t ldc);

typedef struct blas {
    sgemm64_fn *sgemm;
    dgemm64_fn *dgemm;
} blas;

static blas found;
static atomic_bool is_found;

/* Both functions of one library, or neither. */
static bool
load(void *library, const char *sgemm, const char *dgemm, blas *to)
{
    void *const s = dlsym(library, sgemm), *const d = dlsym(library, dgemm);
    memcpy((void *)&to->sgemm, (const void *)&s, sizeof s);
    memcpy((void *)&to->dgemm, (const void *)&d, sizeof d);
    return s != NULL && d != NULL;
}

static int
visit(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "openblas") == NULL) {
        return 0;
    }
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return 0;
    }
    /* The reference that dlopen took is kept: the functions stay where they are. */
    return load(library, "scipy_cblas_sgemm64_", "scipy_cblas_dgemm64_", arg) ||
           load(library, "cblas_sgemm64_", "cblas_dgemm64_", arg);
}

/* Two threads that look at once find the same. */
static bool
find(blas *functions)
{
    if (!atomic_load_explicit(&is_found, memory_order_acquire)) {
        if (dl_iterate_phdr(visit, functions) == 0) {
            return false;
        }
        static atomic_flag taken = ATOMIC_FLAG_INIT;
        if (!atomic_flag_test_and_set(&taken)) {
            found = *functions;
            atomic_store_explicit(&is_found, true, memory_order_release);
        }
        return true;
    }
    *functions = found;
    return true;
}

static int
operation(bool transposed)
{
    return transposed ? TRANSPOSED : AS_IT_IS;
}

/* A stride is at least 1 to a BLAS, whatever the matrix. */
static int64_t
stride(size_t ld)
{
    return ld > 0 ? (int64_t)ld : 1;
}

bool
ct_blas_gemm(const ct_gemm *g)
{
    blas functions;
    if (!find(&functions)) {
        return false;
    }
    const int ta = operation(g->trans_a), tb = operation(g->trans_b);
    const int64_t m = (int64_t)g->m, n = (int64_t)g->n, k = (int64_t)g->k;
    if (g->dtype == CT_F64) {
        functions.dgemm(ROW_MAJOR, ta, tb, m, n, k, g->alpha, g->a, stride(g->lda),
                        g->b, stride(g->ldb), g->beta, g->c, stride(g->ldc));
    }
    else {
        functions.sgemm(ROW_MAJOR, ta, tb, m, n, k, (float)g->alpha, g->a,
                        stride(g->lda), g->b, stride(g->ldb), (float)g->beta, g->c,
                        stride(g->ldc));
    }
    return true;
}

#else

bool
ct_blas_gemm(const ct_gemm *gemm)
{
    (void)gemm;
    return false;
}

#endif
