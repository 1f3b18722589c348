/* Spans in host memory, for collectives that work on the device's. */
#ifndef CT_CUDA_NCCL_STAGING_H
#define CT_CUDA_NCCL_STAGING_H

#include "core/comm/comm.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Starts as {0}; memory of the device that grows as needed. */
typedef struct ct_nccl_staging {
    char *memory;
    size_t room;
} ct_nccl_staging;

/* Whether one of the request's spans lies in the host's memory. */
bool ct_nccl_is_staged(const ct_request *request);

/* *staged becomes the request with spans of the device's memory alone: of each span in
 * the host's a copy, made on the stream. True when there is such a span. */
CT_NODISCARD ct_status ct_nccl_stage(ct_nccl_staging *staging,
                                     const ct_request *request, ct_request *staged,
                                     cudaStream_t stream, bool *is_staged,
                                     ct_error *err);

/* Copies what the staged collective leaves back, on the stream. */
CT_NODISCARD ct_status ct_nccl_unstage(const ct_request *request,
                                       const ct_request *staged, cudaStream_t stream,
                                       ct_error *err);

void ct_nccl_staging_release(ct_nccl_staging *staging);

#ifdef __cplusplus
}
#endif

#endif
