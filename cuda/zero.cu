/* Zeros over many spans on a CUDA device. Mirrors csrc/cpu/zero.c. */
#include "kernels.h"
#include "launch.cuh"

/* Lengths are in units of 16 bytes if address and length allow, else in bytes. */
struct zero_operand {
    void *data;
    size_t n;
    bool wide;
};

CT_KERNEL
zero_kernel(const ct_cuda_batch<zero_operand> __grid_constant__ batch)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range r = ct_cuda_range_of(batch, chunk);
        const zero_operand &to = batch.operands[r.operand];
        for (size_t i = r.begin + threadIdx.x; i < r.end; i += blockDim.x) {
            if (to.wide) {
                ((uint4 *)to.data)[i] = make_uint4(0, 0, 0, 0);
            }
            else {
                ((unsigned char *)to.data)[i] = 0;
            }
        }
    }
}

/* Operand 2 * i is the part of span i that goes by 16 bytes, 2 * i + 1 the rest. */
static zero_operand
operand_of(const ct_span *spans, size_t half)
{
    const ct_span &span = spans[half / 2];
    const size_t bytes = span.n * ct_dtype_size(span.dtype);
    const bool aligned = (uintptr_t)span.data % sizeof(uint4) == 0;
    const size_t wide = aligned ? bytes / sizeof(uint4) : 0;
    if (half % 2 == 0) {
        return {span.data, wide, true};
    }
    const size_t done = wide * sizeof(uint4);
    return {(unsigned char *)span.data + done, bytes - done, false};
}

ct_status
ct_cuda_zero(void *stream, const ct_span *spans, size_t n_spans, ct_error *err)
{
    return ct_cuda_in_batches<zero_operand>(
        2 * n_spans, [&](size_t half) { return operand_of(spans, half); },
        [&](const ct_cuda_batch<zero_operand> &batch) {
            CT_LAUNCH(zero_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch);
            return ct_cuda_launched("launch zero", err);
        });
}
