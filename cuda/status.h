/* Turns CUDA's results into the core's. */
#ifndef CT_CUDA_STATUS_H
#define CT_CUDA_STATUS_H

#include "core/base/status.h"

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

/* While any thread of the process captures a stream, CUDA rejects calls without a place
 * in the graph, and ends the capture, unless the mode of the calling thread is relaxed.
 * Returns the thread's mode before, for ct_cuda_restore_mode(). */
static inline enum cudaStreamCaptureMode
ct_cuda_relax_mode(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static inline void
ct_cuda_restore_mode(enum cudaStreamCaptureMode mode)
{
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

/* cudaSuccess, cudaErrorNotReady while the device has not come to the event, or another
 * error. CUDA keeps cudaErrorNotReady, too, as the thread's last error, for the next
 * launch to report. */
static inline cudaError_t
ct_cuda_query(cudaEvent_t event)
{
    const enum cudaStreamCaptureMode mode = ct_cuda_relax_mode();
    const cudaError_t busy = cudaEventQuery(event);
    ct_cuda_restore_mode(mode);
    if (busy == cudaErrorNotReady) {
        (void)cudaGetLastError();
    }
    return busy;
}

/* An event behind what is on the stream so far; the caller's. */
static inline ct_status
ct_cuda_mark(cudaStream_t stream, cudaEvent_t *here, ct_error *err)
{
    ct_status status = ct_cuda_check(
        cudaEventCreateWithFlags(here, cudaEventDisableTiming), "make an event", err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_cuda_check(cudaEventRecord(*here, stream), "record an event", err);
    if (status != CT_OK) {
        (void)cudaEventDestroy(*here);
    }
    return status;
}

#endif
