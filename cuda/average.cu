/* Exponential moving averages on a CUDA device. Mirrors csrc/cpu/average.c. */
#include "average.cuh"
#include "kernels.h"
#include "launch.cuh"

struct average_operand : ct_span {
    ct_span value;
};

template <typename Real>
__device__ static void
average(const average_operand &operand, const ct_cuda_range &range,
        const ct_ema_coef &coef)
{
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        const Real value = ct_load_as<Real>(operand.value.data, operand.value.dtype, i);
        ct_average_element(coef, value, operand.data, operand.dtype, i);
    }
}

CT_KERNEL
average_kernel(const ct_cuda_batch<average_operand> __grid_constant__ batch,
               const ct_ema_coef coef)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const average_operand &operand = batch.operands[range.operand];
        if (operand.value.dtype == CT_F64) {
            average<double>(operand, range, coef);
        }
        else {
            average<float>(operand, range, coef);
        }
    }
}

ct_status
ct_cuda_average(void *stream, const ct_span *averages, const ct_span *values,
                size_t n_spans, double decay, ct_error *err)
{
    ct_status status = ct_check_pairs("average", averages, values, n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_ema_coef coef = ct_ema_coef_of(decay);
    return ct_cuda_in_batches<average_operand>(
        n_spans, [&](size_t i) { return average_operand{averages[i], values[i]}; },
        [&](const ct_cuda_batch<average_operand> &batch) {
            CT_LAUNCH(average_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch, coef);
            return ct_cuda_launched("launch average", err);
        });
}
