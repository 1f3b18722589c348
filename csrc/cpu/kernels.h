/* The CPU's entries of the device table. */
#ifndef CT_CPU_KERNELS_H
#define CT_CPU_KERNELS_H

#include "core/device/device.h"

ct_norm_fn ct_cpu_norm;
ct_norms_fn ct_cpu_norms;
ct_update_fn ct_cpu_update;
ct_average_fn ct_cpu_average;
ct_measure_fn ct_cpu_measure;
ct_settle_fn ct_cpu_settle;
ct_factor_sums_fn ct_cpu_factor_sums;
ct_factor_fn ct_cpu_factor;
ct_scale_fn ct_cpu_scale;
ct_zero_fn ct_cpu_zero;
ct_copy_fn ct_cpu_copy;
ct_add_fn ct_cpu_add;
ct_gemm_fn ct_cpu_gemm;
ct_encode_fn ct_cpu_encode;
ct_decode_fn ct_cpu_decode;
ct_status ct_cpu_scratch_grow(ct_scratch *scratch, size_t bytes, ct_error *err);

#endif
