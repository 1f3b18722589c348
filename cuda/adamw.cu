/* AdamW on a CUDA device. Mirrors csrc/cpu/adamw.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"

struct adamw_operand : ct_adamw_span {
    ct_adamw_coef constants;
};

__device__ static inline ct_adamw_coef_f32
rounded(const ct_adamw_coef *c, float)
{
    return ct_adamw_round_f32(c);
}

__device__ static inline ct_adamw_coef_f64
rounded(const ct_adamw_coef *c, double)
{
    return ct_adamw_round_f64(c);
}

__device__ static inline void
apply(const ct_adamw_coef_f32 *c, float grad, float *param, float *m, float *v)
{
    ct_adamw_apply_f32(c, grad, param, m, v);
}

__device__ static inline void
apply(const ct_adamw_coef_f64 *c, double grad, double *param, double *m, double *v)
{
    ct_adamw_apply_f64(c, grad, param, m, v);
}

template <typename Element>
__device__ static void
update(const adamw_operand &operand, const ct_cuda_range &range, bool zero_grads)
{
    typedef typename ct_tag<Element>::real real;
    const auto c = rounded(&operand.constants, real());
    Element *grads = (Element *)operand.grad, *params = (Element *)operand.param;
    Element *ms = (Element *)operand.m, *vs = (Element *)operand.v;

    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        real param = ct_load(params[i]), m = ct_load(ms[i]), v = ct_load(vs[i]);
        apply(&c, ct_load(grads[i]), &param, &m, &v);
        ct_store(param, &params[i]);
        ct_store(m, &ms[i]);
        ct_store(v, &vs[i]);
        if (zero_grads) {
            grads[i] = Element();
        }
    }
}

__global__ static void
__launch_bounds__(ct_cuda_block_size)
    adamw_kernel(const ct_cuda_batch<adamw_operand> __grid_constant__ batch,
                 bool zero_grads)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const adamw_operand &operand = batch.operands[range.operand];
        ct_visit_float(operand.dtype, [&](auto tag) {
            update<typename decltype(tag)::type>(operand, range, zero_grads);
        });
    }
}

ct_status
ct_cuda_adamw(void *stream, const ct_adamw_coef *coefs, const ct_adamw_span *spans,
              size_t n_spans, bool zero_grads, ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = ct_cuda_check_float("adamw", i, spans[i].dtype, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<adamw_operand>(
        n_spans,
        [&](size_t i) { return adamw_operand{spans[i], coefs[spans[i].coef]}; },
        [&](const ct_cuda_batch<adamw_operand> &batch) {
            CT_LAUNCH(adamw_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch, zero_grads);
            return ct_cuda_launched("launch adamw", err);
        });
}
