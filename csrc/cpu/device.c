/* The CPU's device table. */
#include "cpu/kernels.h"

const ct_device ct_device_cpu = {
    .name = "cpu",
    .norm = ct_cpu_norm,
    .norms = ct_cpu_norms,
    .clip = ct_cpu_clip,
    .decide = ct_cpu_decide,
    .update = ct_cpu_update,
    .table_reserve = ct_cpu_table_reserve,
    .table_release = ct_cpu_table_release,
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
    .transfer = ct_cpu_transfer,
    .read = ct_cpu_read,
    .read_begin = ct_cpu_read_begin,
    .read_end = ct_cpu_read_end,
    .read_release = ct_cpu_read_release,
    .scratch_grow = ct_cpu_scratch_grow,
    .scratch_release = ct_cpu_scratch_release,
    .use = ct_cpu_use,
    .dlpack = 1, /* kDLCPU */
};
