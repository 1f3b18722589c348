/* SGD with momentum on a CUDA device. Mirrors csrc/cpu/sgd.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"

struct sgd_operand : ct_sgd_span {
    ct_sgd_coef constants;
};

__device__ static inline ct_sgd_coef_f32
rounded(const ct_sgd_coef *c, float)
{
    return ct_sgd_round_f32(c);
}

__device__ static inline ct_sgd_coef_f64
rounded(const ct_sgd_coef *c, double)
{
    return ct_sgd_round_f64(c);
}

__device__ static inline void
apply(const ct_sgd_coef_f32 *c, float grad, float *param)
{
    ct_sgd_plain_f32(c, grad, param);
}

__device__ static inline void
apply(const ct_sgd_coef_f64 *c, double grad, double *param)
{
    ct_sgd_plain_f64(c, grad, param);
}

__device__ static inline void
apply(const ct_sgd_coef_f32 *c, float grad, float *param, float *momentum)
{
    ct_sgd_momentum_f32(c, grad, param, momentum);
}

__device__ static inline void
apply(const ct_sgd_coef_f64 *c, double grad, double *param, double *momentum)
{
    ct_sgd_momentum_f64(c, grad, param, momentum);
}

template <typename Element>
__device__ static void
update(const sgd_operand &operand, const ct_cuda_range &range, bool zero_grads)
{
    typedef typename ct_tag<Element>::real real;
    const auto c = rounded(&operand.constants, real());
    Element *grads = (Element *)operand.grad, *params = (Element *)operand.param;
    Element *buffer = (Element *)operand.momentum;

    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        real param = ct_load(params[i]);
        if (buffer == NULL) {
            apply(&c, ct_load(grads[i]), &param);
        }
        else {
            real momentum = ct_load(buffer[i]);
            apply(&c, ct_load(grads[i]), &param, &momentum);
            ct_store(momentum, &buffer[i]);
        }
        ct_store(param, &params[i]);
        if (zero_grads) {
            grads[i] = Element();
        }
    }
}

CT_KERNEL
sgd_kernel(const ct_cuda_batch<sgd_operand> __grid_constant__ batch, bool zero_grads)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const sgd_operand &operand = batch.operands[range.operand];
        ct_visit_float(operand.dtype, [&](auto tag) {
            update<typename decltype(tag)::type>(operand, range, zero_grads);
        });
    }
}

ct_status
ct_cuda_sgd(void *stream, const ct_sgd_coef *coefs, const ct_sgd_span *spans,
            size_t n_spans, bool zero_grads, ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = ct_cuda_check_float("sgd", i, spans[i].dtype, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<sgd_operand>(
        n_spans, [&](size_t i) { return sgd_operand{spans[i], coefs[spans[i].coef]}; },
        [&](const ct_cuda_batch<sgd_operand> &batch) {
            CT_LAUNCH(sgd_kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch, zero_grads);
            return ct_cuda_launched("launch sgd", err);
        });
}
