/* Communicators over NCCL, which is loaded at first use. */
#ifndef CT_CUDA_COMM_NCCL_H
#define CT_CUDA_COMM_NCCL_H

#include "core/ct_plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

ct_comm_id_fn ct_nccl_id;
ct_comm_join_fn ct_nccl_join;

/* The version, 10000 * major + 100 * minor + patch. */
CT_NODISCARD ct_status ct_nccl_version(int *version, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
