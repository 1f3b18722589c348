/* The CUDA entries of the device table. */
#ifndef CT_CUDA_KERNELS_H
#define CT_CUDA_KERNELS_H

#include "core/device/device.h"

CT_BEGIN_DECLS

ct_norm_fn ct_cuda_norm;
ct_norms_fn ct_cuda_norms;
ct_clip_fn ct_cuda_clip;
ct_decide_fn ct_cuda_decide;
ct_update_fn ct_cuda_update;
ct_table_reserve_fn ct_cuda_table_reserve;
ct_table_release_fn ct_cuda_table_release;
ct_average_fn ct_cuda_average;
ct_measure_fn ct_cuda_measure;
ct_settle_fn ct_cuda_settle;
ct_factor_sums_fn ct_cuda_factor_sums;
ct_factor_fn ct_cuda_factor;
ct_scale_fn ct_cuda_scale;
ct_zero_fn ct_cuda_zero;
ct_copy_fn ct_cuda_copy;
ct_add_fn ct_cuda_add;
ct_gemm_fn ct_cuda_gemm;
ct_cross_entropy_fn ct_cuda_cross_entropy;
ct_encode_fn ct_cuda_encode;
ct_decode_fn ct_cuda_decode;
ct_transfer_fn ct_cuda_transfer;
ct_read_fn ct_cuda_read;
ct_read_begin_fn ct_cuda_read_begin;
ct_read_end_fn ct_cuda_read_end;
ct_read_release_fn ct_cuda_read_release;
ct_pin_fn ct_cuda_pin;
ct_unpin_fn ct_cuda_unpin;
ct_fetch_begin_fn ct_cuda_fetch_begin;
ct_fetch_end_fn ct_cuda_fetch_end;
ct_send_fn ct_cuda_send;
ct_capturing_fn ct_cuda_capturing;
ct_scratch_grow_fn ct_cuda_scratch_grow;
ct_scratch_release_fn ct_cuda_scratch_release;
ct_use_fn ct_cuda_use;

/* Asks the framework of the process for the memory that it keeps for later; returns
 * whether there may be more now. NULL: nobody is asked. Called where memory has run
 * out, with no lock held; another attempt follows. */
extern bool (*ct_cuda_free_kept)(void); /* device.cu */

extern const ct_mapping_ops ct_cuda_mapping_ops; /* mapping.c */
extern const ct_device ct_device_cuda;

CT_END_DECLS

#endif
