/* Scaling of many spans, within a limit, on a CUDA device. Mirrors csrc/cpu/scale.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "math/scale.h"

__device__ static inline float
apply(float x, float factor, float limit)
{
    return ct_scale_apply_f32(x, factor, limit);
}

__device__ static inline double
apply(double x, double factor, double limit)
{
    return ct_scale_apply_f64(x, factor, limit);
}

template <typename Element>
__device__ static void
scale(void *data, const ct_cuda_range &range, double factor, double limit)
{
    typedef typename ct_tag<Element>::real real;
    Element *elements = (Element *)data;
    const real f = (real)factor, most = (real)limit;

    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        ct_store(apply(ct_load(elements[i]), f, most), &elements[i]);
    }
}

CT_KERNEL
scale_kernel(const ct_cuda_batch<ct_span> __grid_constant__ batch, double factor,
             double limit)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const ct_span &span = batch.operands[range.operand];
        ct_visit_float(span.dtype, [&](auto tag) {
            scale<typename decltype(tag)::type>(span.data, range, factor, limit);
        });
    }
}

ct_status
ct_cuda_scale(void *stream, double factor, double limit, const ct_span *spans,
              size_t n_spans, ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = ct_cuda_check_float("scale", i, spans[i].dtype, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<ct_span>(
        n_spans, [&](size_t i) { return spans[i]; },
        [&](const ct_cuda_batch<ct_span> &batch) {
            CT_LAUNCH(scale_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch, factor, limit);
            return ct_cuda_launched("launch scale", err);
        });
}
