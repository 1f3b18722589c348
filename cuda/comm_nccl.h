/* Communicators over NCCL. */
#ifndef CT_CUDA_COMM_NCCL_H
#define CT_CUDA_COMM_NCCL_H

#include "core/comm/plugin.h"

CT_BEGIN_DECLS

ct_comm_id_fn ct_nccl_id;
ct_comm_join_fn ct_nccl_join;

CT_END_DECLS

#endif
