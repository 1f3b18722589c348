/* Sums of pairs of spans on a CUDA device. Mirrors csrc/cpu/add.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "math/scale.h"

struct add_operand : ct_span {
    ct_span value;
};

__device__ static inline float
times(float value, double factor)
{
    return ct_scale_apply_f32(value, (float)factor, INFINITY);
}

__device__ static inline double
times(double value, double factor)
{
    return ct_scale_apply_f64(value, factor, INFINITY);
}

/* Each step is rounded to the sum's dtype, as the CPU's tile is. */
template <typename Sum, typename Value>
__device__ static void
add(const add_operand &operand, const ct_cuda_range &range, double factor)
{
    Sum *sums = (Sum *)operand.data;
    const Value *values = (const Value *)operand.value.data;
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        Sum added;
        ct_store(ct_load(values[i]), &added);
        ct_store(times(ct_load(added), factor), &added);
        ct_store(ct_load(sums[i]) + ct_load(added), &sums[i]);
    }
}

CT_KERNEL
add_kernel(const ct_cuda_batch<add_operand> __grid_constant__ batch, double factor)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const add_operand &operand = batch.operands[range.operand];
        ct_visit_float(operand.dtype, [&](auto sum) {
            ct_visit_float(operand.value.dtype, [&](auto value) {
                add<typename decltype(sum)::type, typename decltype(value)::type>(
                    operand, range, factor);
            });
        });
    }
}

ct_status
ct_cuda_add(void *stream, const ct_span *sums, const ct_span *values, size_t n_spans,
            double factor, ct_error *err)
{
    ct_status status = ct_check_pairs("add", sums, values, n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    return ct_cuda_in_batches<add_operand>(
        n_spans, [&](size_t i) { return add_operand{sums[i], values[i]}; },
        [&](const ct_cuda_batch<add_operand> &batch) {
            CT_LAUNCH(add_kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch, factor);
            return ct_cuda_launched("launch add", err);
        });
}
