/* The first two steps of an update by a measured rule on a CUDA device. Mirrors
 * csrc/cpu/measure.c.
 *
 * A block writes two partial sums of each chunk; then a block for each span folds the
 * sums, and a thread settles the span's constants, so no data goes to the host between
 * the steps. */
#include "kernels.h"
#include "reduce.cuh"
#include "update.cuh"

/* A measured rule for both types of computation. */
#define CT_MEASURED(rule, constants, n_states)                                         \
    struct measured_##rule : ct_rule_##rule {                                          \
        __device__ static void measure(const ct_##constants##_coef_f32 *c, float grad, \
                                       float param, float *state, float *terms)        \
        {                                                                              \
            ct_##rule##_measure_f32(c, grad, param, state, terms);                     \
        }                                                                              \
        __device__ static void                                                         \
        measure(const ct_##constants##_coef_f64 *c, double grad, double param,         \
                double *state, double *terms)                                          \
        {                                                                              \
            ct_##rule##_measure_f64(c, grad, param, state, terms);                     \
        }                                                                              \
    };
#include "math/measured.def"
#undef CT_MEASURED

struct measure_operand : ct_cuda_update_operand {
    size_t number;
};

template <typename Rule, typename Real>
__device__ static void
measure_range(const measure_operand &operand, const ct_cuda_range &range, double *sums)
{
    const auto c = Rule::rounded(&operand.constants, Real());
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        Real state[CT_RULE_MAX_STATES] = {}, terms[CT_MEASURES];
        for (int k = 0; k < Rule::n_states; k++) {
            state[k] = ct_load_state<Real>(operand, k, i);
        }
        Rule::measure(&c, ct_load_as<Real>(operand.grad, operand.grad_dtype, i),
                      ct_load_as<Real>(operand.param, operand.dtype, i), state, terms);
        for (int k = 0; k < Rule::n_states; k++) {
            ct_store_state(state[k], operand, k, i);
        }
        for (int m = 0; m < CT_MEASURES; m++) {
            sums[m] += (double)terms[m] * (double)terms[m];
        }
    }
}

template <typename Rule>
CT_KERNEL
measure_kernel(const ct_cuda_batch<measure_operand> __grid_constant__ batch,
               double *partials)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const measure_operand &operand = batch.operands[range.operand];
        double sums[CT_MEASURES] = {};
        if (operand.dtype == CT_F64) {
            measure_range<Rule, double>(operand, range, sums);
        }
        else {
            measure_range<Rule, float>(operand, range, sums);
        }
        for (int m = 0; m < CT_MEASURES; m++) {
            const double sum = ct_block_sum(CT_NORM_ONE, sums[m]);
            if (threadIdx.x == 0) {
                partials[CT_MEASURES * chunk + m] = sum;
            }
        }
    }
}

CT_KERNEL
fold_kernel(const ct_cuda_batch<measure_operand> __grid_constant__ batch,
            const double *partials, double *sums)
{
    for (uint32_t i = blockIdx.x; i < batch.n_operands; i += gridDim.x) {
        const uint32_t begin = i == 0 ? 0 : batch.chunk_end[i - 1];
        const uint32_t n = batch.chunk_end[i] - begin;
        for (int m = 0; m < CT_MEASURES; m++) {
            const double sum = ct_list_sum(
                CT_NORM_ONE, partials + CT_MEASURES * begin + m, n, CT_MEASURES);
            if (threadIdx.x == 0) {
                sums[CT_MEASURES * batch.operands[i].number + m] = sum;
            }
        }
    }
}

typedef decltype(&measure_kernel<measured_lamb>) measure_kernel_fn;

static measure_kernel_fn
kernel_of(ct_rule rule)
{
    switch (rule) {
#define CT_MEASURED(rule, constants, n_states)                                         \
    case CT_RULE_##rule:                                                               \
        return measure_kernel<measured_##rule>;
#include "math/measured.def"
#undef CT_MEASURED
    default: /* ct_measure_check let no other rule pass */
        return NULL;
    }
}

static ct_status
enqueue(void *stream, double *partials, const ct_update &u, double *sums, ct_error *err)
{
    const measure_kernel_fn kernel = kernel_of(u.rule);
    double *next = partials;
    return ct_cuda_in_batches<measure_operand>(
        u.n_spans,
        [&](size_t i) { return measure_operand{ct_cuda_operand_of(u, i), i}; },
        [&](const ct_cuda_batch<measure_operand> &batch) {
            CT_LAUNCH(kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch, next);
            ct_status status = ct_cuda_launched("launch measure", err);
            if (status == CT_OK) {
                CT_LAUNCH(fold_kernel, ct_cuda_grid_size(batch.n_operands),
                          ct_cuda_block_size, stream, batch, next, sums);
                status = ct_cuda_launched("launch measure's last sums", err);
            }
            next += (size_t)CT_MEASURES * batch.n_chunks;
            return status;
        });
}

ct_status
ct_cuda_measure(void *stream, ct_scratch *scratch, const ct_update *update,
                double *sums, ct_error *err)
{
    const ct_span all = {sums, CT_MEASURES * update->n_spans, CT_F64};
    ct_status status = ct_measure_check(update, err);
    size_t n_chunks = 0;
    for (size_t i = 0; status == CT_OK && i < update->n_spans; i++) {
        n_chunks += ct_cuda_chunks_of(update->spans[i].n);
    }
    if (status == CT_OK && n_chunks != 0) {
        status =
            ct_cuda_scratch_grow(scratch, CT_MEASURES * n_chunks * sizeof(double), err);
    }
    if (status == CT_OK && update->n_spans != 0) {
        status = ct_cuda_zero(stream, &all, 1, err); /* empty spans are not launched */
    }
    return status == CT_OK && n_chunks != 0
               ? enqueue(stream, (double *)scratch->data, *update, sums, err)
               : status;
}

/* ---- settling: a thread for each span -------------------------------------------- */

struct settle_operand {
    size_t n; /* 1: empty spans are settled, too */
    size_t number, whole;
    ct_rule_coef constants;
};

CT_KERNEL
settle_kernel(const ct_cuda_batch<settle_operand> __grid_constant__ batch,
              const double *sums, ct_rule rule, ct_rule_coef *settled)
{
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < batch.n_operands;
         i += step) {
        const settle_operand &operand = batch.operands[i];
        ct_rule_coef coef = operand.constants;
        ct_rule_settle(rule, &coef, sums + CT_MEASURES * operand.number, operand.whole);
        settled[operand.number] = coef;
    }
}

ct_status
ct_cuda_settle(void *stream, const ct_update *update, const double *sums,
               ct_rule_coef *settled, ct_error *err)
{
    const ct_update &u = *update;
    ct_status status = ct_measure_check(update, err);
    if (status != CT_OK) {
        return status;
    }
    return ct_cuda_in_batches<settle_operand>(
        u.n_spans,
        [&](size_t i) {
            const ct_update_span &span = u.spans[i];
            return settle_operand{1, i, ct_update_whole(&span), u.coefs[span.coef]};
        },
        [&](const ct_cuda_batch<settle_operand> &batch) {
            CT_LAUNCH(settle_kernel, 1, ct_cuda_block_size, stream, batch, sums, u.rule,
                      settled);
            return ct_cuda_launched("launch settle", err);
        });
}
