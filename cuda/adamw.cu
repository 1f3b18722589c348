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

/* A thread asks for several elements before it works on the first: 16 bytes of each
 * array, or the memory would wait for the arithmetic. */
template <typename Element>
__device__ static void
update(const adamw_operand &operand, const ct_cuda_range &range, bool zero_grads)
{
    typedef typename ct_tag<Element>::real real;
    const unsigned ahead = 16 / sizeof(real);
    const size_t step = blockDim.x;
    const auto c = rounded(&operand.constants, real());
    Element *grads = (Element *)operand.grad, *params = (Element *)operand.param;
    Element *ms = (Element *)operand.m, *vs = (Element *)operand.v;

    for (size_t i = range.begin + threadIdx.x; i < range.end; i += ahead * step) {
        real grad[ahead] = {}, param[ahead] = {}, m[ahead] = {}, v[ahead] = {};
        for (unsigned k = 0; k < ahead && i + k * step < range.end; k++) {
            grad[k] = ct_load(grads[i + k * step]);
            param[k] = ct_load(params[i + k * step]);
            m[k] = ct_load(ms[i + k * step]);
            v[k] = ct_load(vs[i + k * step]);
        }
        for (unsigned k = 0; k < ahead && i + k * step < range.end; k++) {
            apply(&c, grad[k], &param[k], &m[k], &v[k]);
            ct_store(param[k], &params[i + k * step]);
            ct_store(m[k], &ms[i + k * step]);
            ct_store(v[k], &vs[i + k * step]);
            if (zero_grads) {
                grads[i + k * step] = Element();
            }
        }
    }
}

CT_KERNEL
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
