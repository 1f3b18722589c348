#include "nccl_staging.h"

#include "status.h"

enum {
    ALIGNMENT = 256 /* of a part of the memory */
};

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

static bool
is_on_host(const ct_span *span)
{
    struct cudaPointerAttributes found;
    if (span->n == 0) {
        return false;
    }
    if (cudaPointerGetAttributes(&found, span->data) != cudaSuccess) {
        (void)cudaGetLastError(); /* memory that CUDA has never seen */
        return true;
    }
    return found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged;
}

bool
ct_nccl_is_staged(const ct_request *request)
{
    return is_on_host(&request->in) || is_on_host(&request->out);
}

static size_t
place_of(const ct_span *span, bool is_staged, size_t *used)
{
    const size_t at = *used;
    if (is_staged) {
        *used += (bytes_of(span) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return at;
}

static ct_status
make_room(ct_nccl_staging *s, size_t bytes, ct_error *err)
{
    if (bytes <= s->room) {
        return CT_OK;
    }
    ct_nccl_staging_release(s);
    ct_status status = ct_cuda_check(cudaMalloc((void **)&s->memory, bytes),
                                     "get memory for a collective on host memory", err);
    s->room = status == CT_OK ? bytes : 0;
    return status;
}

ct_status
ct_nccl_stage(ct_nccl_staging *s, const ct_request *request, ct_request *staged,
              cudaStream_t stream, bool *is_staged, ct_error *err)
{
    const bool in = is_on_host(&request->in), out = is_on_host(&request->out);
    size_t used = 0;
    *staged = *request;
    *is_staged = in || out;
    const size_t in_at = place_of(&request->in, in, &used);
    const size_t out_at = place_of(&request->out, out, &used);
    ct_status status = make_room(s, used, err);
    if (status != CT_OK || !*is_staged) {
        return status;
    }
    staged->in.data = in ? s->memory + in_at : request->in.data;
    staged->out.data = out ? s->memory + out_at : request->out.data;
    return in ? ct_cuda_check(cudaMemcpyAsync(staged->in.data, request->in.data,
                                              bytes_of(&request->in),
                                              cudaMemcpyHostToDevice, stream),
                              "copy to the device", err)
              : CT_OK;
}

ct_status
ct_nccl_unstage(const ct_request *request, const ct_request *staged,
                cudaStream_t stream, ct_error *err)
{
    const bool in_place = request->what == CT_ALL_REDUCE ||
                          request->what == CT_BROADCAST || request->what == CT_REDUCE;
    const ct_span *to = in_place ? &request->in : &request->out;
    const ct_span *from = in_place ? &staged->in : &staged->out;
    return to->data == from->data
               ? CT_OK
               : ct_cuda_check(cudaMemcpyAsync(to->data, from->data, bytes_of(to),
                                               cudaMemcpyDeviceToHost, stream),
                               "copy from the device", err);
}

void
ct_nccl_staging_release(ct_nccl_staging *s)
{
    (void)cudaFree(s->memory);
    *s = (ct_nccl_staging){0};
}
