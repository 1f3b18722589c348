/* The CUDA device: the table, memory, and the entries that wait. Mirrors
 * csrc/cpu/device.c.
 *
 * Entries work on the calling thread's current device, which must be the stream's. */
#include "kernels.h"
#include "status.h"

#include <string.h>

/* kDLCUDA. The host emulation of the tests, with device memory that torch may use as
 * the host's, defines another. */
#ifndef CT_CUDA_DLPACK
#define CT_CUDA_DLPACK 2
#endif

bool (*ct_cuda_free_kept)(void) = NULL;

/* For calls that have nothing to do with a graph. */
struct outside_of_capture {
    const cudaStreamCaptureMode mode = ct_cuda_relax_mode();

    ~outside_of_capture()
    {
        ct_cuda_restore_mode(mode);
    }
};

/* Waits: cudaFree, when a block is outgrown, until the device is idle. Doubling makes
 * that a handful of times in a process. */
ct_status
ct_cuda_scratch_grow(ct_scratch *scratch, size_t bytes, ct_error *err)
{
    if (bytes <= scratch->bytes) {
        return CT_OK;
    }
    const outside_of_capture outside;
    const size_t doubled = 2 * scratch->bytes;
    size_t wanted = bytes > doubled ? bytes : doubled;
    void *data = NULL;
    cudaError_t result = cudaMalloc(&data, wanted);
    if (result == cudaErrorMemoryAllocation && ct_cuda_free_kept != NULL &&
        ct_cuda_free_kept()) {
        (void)cudaGetLastError();
        wanted = bytes;
        result = cudaMalloc(&data, wanted);
    }
    if (result != cudaSuccess) {
        (void)cudaGetLastError(); /* or the next launch would report the error */
        return ct_cuda_check(result, "get scratch memory on the device", err);
    }
    (void)cudaFree(scratch->data);
    *scratch = {data, wanted};
    return CT_OK;
}

void
ct_cuda_scratch_release(ct_scratch *scratch)
{
    const outside_of_capture outside;
    (void)cudaFree(scratch->data);
    *scratch = {NULL, 0};
}

static ct_status
copy_and_wait(void *stream, void *to, const void *from, size_t bytes,
              cudaMemcpyKind kind, ct_error *err)
{
    const outside_of_capture outside;
    const cudaStream_t s = (cudaStream_t)stream;
    ct_status status = ct_cuda_check(cudaMemcpyAsync(to, from, bytes, kind, s),
                                     "copy to or from the device", err);
    if (status != CT_OK) {
        return status;
    }
    return ct_cuda_check(cudaStreamSynchronize(s), "wait for the stream", err);
}

/* The driver finds the direction from the addresses. */
ct_status
ct_cuda_transfer(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    return bytes == 0 ? CT_OK
                      : copy_and_wait(stream, to, from, bytes, cudaMemcpyDefault, err);
}

ct_status
ct_cuda_read(void *stream, const double *device_value, double *host, ct_error *err)
{
    return copy_and_wait(stream, host, device_value, sizeof *host,
                         cudaMemcpyDeviceToHost, err);
}

/* Pinned memory, as a copy to any other waits for the stream. */
static ct_status
open_read(ct_pending_read *read, ct_error *err)
{
    const outside_of_capture outside;
    ct_status status = CT_OK;
    if (read->host == NULL) {
        status = ct_cuda_check(
            cudaHostAlloc(&read->host, CT_PENDING_READ_MAX, cudaHostAllocDefault),
            "get pinned memory", err);
    }
    if (status == CT_OK && read->event == NULL) {
        status = ct_cuda_check(cudaEventCreateWithFlags((cudaEvent_t *)&read->event,
                                                        cudaEventDisableTiming),
                               "make an event", err);
    }
    if (status != CT_OK) {
        (void)cudaGetLastError(); /* or the next launch would report the error */
    }
    return status;
}

ct_status
ct_cuda_capturing(void *stream, bool *capturing, ct_error *err)
{
    cudaStreamCaptureStatus answer = cudaStreamCaptureStatusNone;
    ct_status status =
        ct_cuda_check(cudaStreamIsCapturing((cudaStream_t)stream, &answer),
                      "ask whether the stream is captured", err);
    *capturing = answer != cudaStreamCaptureStatusNone;
    return status;
}

/* Of a graph, each replay records the event. */
static ct_status
record(cudaStream_t stream, cudaEvent_t event, ct_error *err)
{
    bool capturing = false;
    ct_status status = ct_cuda_capturing(stream, &capturing, err);
    return status == CT_OK
               ? ct_cuda_check(cudaEventRecordWithFlags(event, stream,
                                                        capturing
                                                            ? cudaEventRecordExternal
                                                            : cudaEventRecordDefault),
                               "record an event", err)
               : status;
}

ct_status
ct_cuda_read_begin(void *stream, ct_pending_read *read, const void *device_values,
                   size_t bytes, ct_error *err)
{
    const cudaStream_t s = (cudaStream_t)stream;
    ct_status status = open_read(read, err);
    read->bytes = bytes;
    if (status == CT_OK) {
        status = ct_cuda_check(cudaMemcpyAsync(read->host, device_values, bytes,
                                               cudaMemcpyDeviceToHost, s),
                               "copy to the host", err);
    }
    return status == CT_OK ? record(s, (cudaEvent_t)read->event, err) : status;
}

ct_status
ct_cuda_read_end(const ct_pending_read *read, void *values, ct_error *err)
{
    const outside_of_capture outside;
    ct_status status = ct_cuda_check(cudaEventSynchronize((cudaEvent_t)read->event),
                                     "wait for a copy to the host", err);
    if (status == CT_OK) {
        memcpy(values, read->host, read->bytes);
    }
    return status;
}

/* The copy may still be under way. */
void
ct_cuda_read_release(ct_pending_read *read)
{
    const outside_of_capture outside;
    if (read->event != NULL) {
        (void)cudaEventSynchronize((cudaEvent_t)read->event);
        (void)cudaEventDestroy((cudaEvent_t)read->event);
    }
    (void)cudaFreeHost(read->host);
    *read = {NULL, NULL, 0};
}

ct_status
ct_cuda_pin(void *data, size_t bytes, ct_error *err)
{
    const outside_of_capture outside;
    ct_status status =
        ct_cuda_check(cudaHostRegister(data, bytes, cudaHostRegisterPortable),
                      "pin memory of the host", err);
    if (status != CT_OK) {
        (void)cudaGetLastError(); /* or the next launch would report the error */
    }
    return status;
}

void
ct_cuda_unpin(void *data)
{
    const outside_of_capture outside;
    (void)cudaHostUnregister(data);
}

ct_status
ct_cuda_fetch_begin(void *stream, const ct_host_copy *copies, size_t n, void **copied,
                    ct_error *err)
{
    const cudaStream_t s = (cudaStream_t)stream;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        status = ct_cuda_check(cudaMemcpyAsync(copies[i].to, copies[i].from,
                                               copies[i].bytes, cudaMemcpyDefault, s),
                               "copy to or from the host", err);
    }
    if (status == CT_OK) {
        status = *copied == NULL ? ct_cuda_mark(s, (cudaEvent_t *)copied, err)
                                 : record(s, (cudaEvent_t)*copied, err);
    }
    if (status != CT_OK) {
        (void)cudaStreamSynchronize(s); /* no copy may be under way any more */
    }
    return status;
}

ct_status
ct_cuda_fetch_end(void *copied, ct_error *err)
{
    const outside_of_capture outside;
    ct_status status = ct_cuda_check(cudaEventSynchronize((cudaEvent_t)copied),
                                     "wait for copies to the host", err);
    (void)cudaEventDestroy((cudaEvent_t)copied);
    return status;
}

ct_status
ct_cuda_use(int ordinal, int *before, ct_error *err)
{
    ct_status status = ct_cuda_check(cudaGetDevice(before), "ask for the device", err);
    if (status != CT_OK || *before == ordinal) {
        return status;
    }
    status = ct_cuda_check(cudaSetDevice(ordinal), "change the device", err);
    if (status != CT_OK) {
        (void)cudaGetLastError(); /* or the next launch would report the error */
    }
    return status;
}

const ct_device ct_device_cuda = {
    "cuda",
    ct_cuda_norm,
    ct_cuda_norms,
    ct_cuda_clip,
    ct_cuda_decide,
    ct_cuda_update,
    ct_cuda_table_reserve,
    ct_cuda_table_release,
    ct_cuda_average,
    ct_cuda_measure,
    ct_cuda_settle,
    ct_cuda_factor_sums,
    ct_cuda_factor,
    ct_cuda_scale,
    ct_cuda_zero,
    ct_cuda_copy,
    ct_cuda_add,
    ct_cuda_gemm,
    ct_cuda_cross_entropy,
    ct_cuda_encode,
    ct_cuda_decode,
    ct_cuda_transfer,
    ct_cuda_read,
    ct_cuda_read_begin,
    ct_cuda_read_end,
    ct_cuda_read_release,
    ct_cuda_pin,
    ct_cuda_unpin,
    ct_cuda_fetch_begin,
    ct_cuda_fetch_end,
    ct_cuda_send,
    ct_cuda_capturing,
    ct_cuda_scratch_grow,
    ct_cuda_scratch_release,
    ct_cuda_use,
    &ct_cuda_mapping_ops,
    CT_CUDA_DLPACK,
};
