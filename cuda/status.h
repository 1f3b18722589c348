/* Turns CUDA's results into the core's. */
#ifndef CT_CUDA_STATUS_H
#define CT_CUDA_STATUS_H

#include "core/ct_status.h"

#include <cuda_runtime_api.h>

static inline ct_status
ct_cuda_check(cudaError_t result, const char *what, ct_error *err)
{
    if (result == cudaSuccess) {
        return CT_OK;
    }
    return ct_fail(err, CT_EDEVICE, "cannot %s: CUDA says %s (%s)", what,
                   cudaGetErrorString(result), cudaGetErrorName(result));
}

#endif
