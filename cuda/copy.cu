/* Copies between many pairs of spans on a CUDA device. Mirrors csrc/cpu/copy.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"

struct copy_operand {
    void *to;
    const void *from;
    size_t n;
    ct_dtype to_dtype, from_dtype;
    unsigned raw_size; /* bytes of an element copied unchanged, else 0 */
};

template <typename To, typename From>
__device__ static void
convert(const copy_operand &operand, const ct_cuda_range &range)
{
    To *to = (To *)operand.to;
    const From *from = (const From *)operand.from;
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        ct_store(ct_load(from[i]), &to[i]);
    }
}

template <typename Raw>
__device__ static void
copy_raw(const copy_operand &operand, const ct_cuda_range &range)
{
    Raw *to = (Raw *)operand.to;
    const Raw *from = (const Raw *)operand.from;
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        to[i] = from[i];
    }
}

__device__ static void
copy_range(const copy_operand &operand, const ct_cuda_range &range)
{
    switch (operand.raw_size) {
    case 1:
        copy_raw<uint8_t>(operand, range);
        return;
    case 2:
        copy_raw<uint16_t>(operand, range);
        return;
    case 4:
        copy_raw<uint32_t>(operand, range);
        return;
    case 8:
        copy_raw<uint64_t>(operand, range);
        return;
    default:
        break;
    }
    ct_visit_float(operand.to_dtype, [&](auto to) {
        ct_visit_float(operand.from_dtype, [&](auto from) {
            convert<typename decltype(to)::type, typename decltype(from)::type>(operand,
                                                                                range);
        });
    });
}

CT_KERNEL
copy_kernel(const ct_cuda_batch<copy_operand> __grid_constant__ batch)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        copy_range(batch.operands[range.operand], range);
    }
}

static ct_status
check_pair(size_t i, const ct_span &to, const ct_span &from, ct_error *err)
{
    if (to.n != from.n) {
        return ct_fail(err, CT_EINVAL,
                       "copy: span %zu has %zu elements to fill from %zu", i, to.n,
                       from.n);
    }
    if (to.dtype == from.dtype) {
        return CT_OK;
    }
    ct_status status = ct_cuda_check_float("copy", i, to.dtype, err);
    return status == CT_OK ? ct_cuda_check_float("copy", i, from.dtype, err) : status;
}

static copy_operand
operand_of(const ct_span &to, const ct_span &from)
{
    const bool raw = to.dtype == from.dtype;
    const unsigned size = raw ? (unsigned)ct_dtype_size(to.dtype) : 0;
    return {to.data, from.data, to.n, to.dtype, from.dtype, size};
}

ct_status
ct_cuda_copy(void *stream, const ct_span *to, const ct_span *from, size_t n_spans,
             ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = check_pair(i, to[i], from[i], err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<copy_operand>(
        n_spans, [&](size_t i) { return operand_of(to[i], from[i]); },
        [&](const ct_cuda_batch<copy_operand> &batch) {
            CT_LAUNCH(copy_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch);
            return ct_cuda_launched("launch copy", err);
        });
}
