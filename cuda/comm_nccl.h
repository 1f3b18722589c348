/* Communicators over NCCL. */
#ifndef CT_CUDA_COMM_NCCL_H
#define CT_CUDA_COMM_NCCL_H

#include "core/comm/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

ct_comm_id_fn ct_nccl_id;
ct_comm_join_fn ct_nccl_join;

#ifdef __cplusplus
}
#endif

#endif
