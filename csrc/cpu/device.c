/* The CPU's device table, and its memory: ordinary memory, nothing to wait for. */
#include "cpu/kernels.h"

#include "core/base/alloc.h"

#include <string.h>

static ct_status
cpu_read(void *stream, const double *device_value, double *host, ct_error *err)
{
    (void)stream;
    (void)err;
    *host = *device_value;
    return CT_OK;
}

static ct_status
cpu_transfer(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    (void)stream;
    (void)err;
    if (bytes != 0) {
        memcpy(to, from, bytes);
    }
    return CT_OK;
}

static void
cpu_scratch_release(ct_scratch *scratch)
{
    ct_free(scratch->data);
    *scratch = (ct_scratch){0};
}

const ct_device ct_device_cpu = {
    .name = "cpu",
    .norm = ct_cpu_norm,
    .norms = ct_cpu_norms,
    .update = ct_cpu_update,
    .average = ct_cpu_average,
    .measure = ct_cpu_measure,
    .settle = ct_cpu_settle,
    .factor_sums = ct_cpu_factor_sums,
    .factor = ct_cpu_factor,
    .scale = ct_cpu_scale,
    .zero = ct_cpu_zero,
    .copy = ct_cpu_copy,
    .add = ct_cpu_add,
    .gemm = ct_cpu_gemm,
    .encode = ct_cpu_encode,
    .decode = ct_cpu_decode,
    .transfer = cpu_transfer,
    .read = cpu_read,
    .scratch_grow = ct_cpu_scratch_grow,
    .scratch_release = cpu_scratch_release,
    .dlpack = 1, /* kDLCPU */
};
