/* Matrix products by torch, without the GIL: through the C functions that torch exports
 * to the programs of AOTInductor (torch/csrc/inductor/aoti_torch/c/shim.h). A torch
 * without the functions, or a process without torch, leaves the products to ours.
 *
 * torch loads its library for itself alone, so the objects of the process are searched
 * until the library is found. */
#define _GNU_SOURCE /* dl_iterate_phdr */

#include "binding/optim/optim.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct tensor tensor;
typedef int32_t value_fn(void);
typedef int32_t from_memory_fn(void *data, int64_t n_dims, const int64_t *sizes,
                               const int64_t *strides, int64_t offset, int32_t dtype,
                               int32_t device_type, int32_t device_index, tensor **to);
typedef int32_t delete_fn(tensor *t);
typedef int32_t
addmm_fn(tensor *out, tensor *self, tensor *a, tensor *b, double beta, double alpha);

/* Symbols by name: in the order of the fields of `torch_functions`. */
static const char *const names[] = {
    "aoti_torch_create_tensor_from_blob", "aoti_torch_delete_tensor_object",
    "aoti_torch_cpu_addmm_out",           "aoti_torch_device_type_cpu",
    "aoti_torch_dtype_float32",           "aoti_torch_dtype_float64",
    "aoti_torch_dtype_bfloat16",
};

typedef struct torch_functions {
    from_memory_fn *from_memory;
    delete_fn *delete;
    addmm_fn *addmm;
    value_fn *cpu, *float32, *float64, *bfloat16;
} torch_functions;

static torch_functions torch;
static atomic_bool is_found;

static int
visit(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libtorch_cpu.") == NULL) {
        return 0;
    }
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return 0;
    }
    /* dlopen's reference is kept: the functions stay loaded. */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *const function = dlsym(library, names[i]);
        if (function == NULL) {
            return 0;
        }
        memcpy((char *)arg + i * sizeof function, (const void *)&function,
               sizeof function);
    }
    return 1;
}

/* Two threads that search at once find the same. */
static bool
find(torch_functions *functions)
{
    if (atomic_load_explicit(&is_found, memory_order_acquire)) {
        *functions = torch;
        return true;
    }
    if (dl_iterate_phdr(visit, functions) == 0) {
        return false;
    }
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&taken)) {
        torch = *functions;
        atomic_store_explicit(&is_found, true, memory_order_release);
    }
    return true;
}

/* Without instructions for bfloat16, torch's products of bfloat16 are slower than those
 * of the factors in float32. */
static bool
multiplies_bf16(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return false;
#endif
}

/* Rows x cols of a matrix, or its transpose. */
static tensor *
view(const torch_functions *f, const void *data, bool transposed, size_t rows,
     size_t cols, size_t ld, int32_t dtype)
{
    const int64_t sizes[] = {(int64_t)rows, (int64_t)cols};
    const int64_t across[] = {(int64_t)ld, 1}, down[] = {1, (int64_t)ld};
    tensor *made = NULL;
    const int32_t failed =
        f->from_memory((void *)data, 2, sizes, transposed ? down : across, 0, dtype,
                       f->cpu(), 0, &made);
    return failed ? NULL : made;
}

bool
ctpy_torch_gemm(const ct_gemm *g)
{
    torch_functions f;
    if (g->k == 0 || (g->dtype == CT_BF16 && !multiplies_bf16()) || !find(&f)) {
        return false;
    }
    const int32_t dtype = g->dtype == CT_F32   ? f.float32()
                          : g->dtype == CT_F64 ? f.float64()
                                               : f.bfloat16();
    tensor *const a = view(&f, g->a, g->trans_a, g->m, g->k, g->lda, dtype);
    tensor *const b = view(&f, g->b, g->trans_b, g->k, g->n, g->ldb, dtype);
    tensor *const c = view(&f, g->c, false, g->m, g->n, g->ldc, dtype);
    const bool done = a != NULL && b != NULL && c != NULL &&
                      f.addmm(c, c, a, b, g->beta, g->alpha) == 0;
    tensor *const made[] = {a, b, c};
    for (size_t i = 0; i < 3; i++) {
        if (made[i] != NULL) {
            (void)f.delete(made[i]);
        }
    }
    return done;
}
