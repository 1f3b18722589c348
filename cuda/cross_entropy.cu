/* Cross entropy of rows of logits on a CUDA device. Mirrors csrc/cpu/cross_entropy.c.
 *
 * A block takes a row at a time and reads it three times, as the CPU does. Each
 * thread's values are merged in one order, so two runs agree; the order is not the
 * CPU's. */
#include "element.cuh"
#include "kernels.h"
#include "math/softmax.h"
#include "reduce.cuh"

__device__ static inline float
exp_below(float x)
{
    return ct_exp_below_f32(x);
}

__device__ static inline double
exp_below(double x)
{
    return ct_exp_below_f64(x);
}

__device__ static inline float
softmax_grad(float logit, float most, float factor, float share)
{
    return ct_softmax_grad_f32(logit, most, factor, share);
}

__device__ static inline double
softmax_grad(double logit, double most, double factor, double share)
{
    return ct_softmax_grad_f64(logit, most, factor, share);
}

/* The largest over the block that is not NaN, in each thread; every thread has to come.
 */
template <typename Real>
__device__ static inline Real
block_most(Real most)
{
    __shared__ Real of_warp[ct_n_warps];
    const unsigned lane = threadIdx.x % ct_warp_size, warp = threadIdx.x / ct_warp_size;

    for (unsigned step = ct_warp_size / 2; step > 0; step /= 2) {
        const Real other = __shfl_down_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
    }
    if (lane == 0) {
        of_warp[warp] = most;
    }
    __syncthreads();
    most = of_warp[0];
    for (unsigned i = 1; i < ct_n_warps; i++) {
        most = of_warp[i] > most ? of_warp[i] : most;
    }
    __syncthreads(); /* of_warp is free for the next row */
    return most;
}

/* The sum over the block, in each thread. */
__device__ static inline double
block_sum(double sum)
{
    __shared__ double all;
    sum = ct_block_sum(CT_NORM_ONE, sum);
    if (threadIdx.x == 0) {
        all = sum;
    }
    __syncthreads();
    sum = all;
    __syncthreads();
    return sum;
}

template <typename Element>
__device__ static inline void
one_row(const ct_cross_entropy &work, size_t row)
{
    typedef typename ct_tag<Element>::real real;
    Element *const x = ct_global((Element *)work.logits) + row * work.stride;
    const size_t n = work.classes, target = (size_t)work.targets[row];
    const real nan = (real)NAN;
    real most = -(real)INFINITY;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        const real value = ct_load(x[i]);
        most = value > most ? value : most;
    }
    most = block_most(most);
    double sum = 0.0, total = 0.0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        const real value = ct_load(x[i]);
        sum += (double)exp_below(value - most);
        total += (double)value;
    }
    /* With a target of no class (a negative one is larger than n) the row is NaN. */
    const real logit = target < n ? ct_load(x[target]) : nan;
    ct_softmax_row found;
    found.most = (double)most;
    found.sum = block_sum(sum) + (target < n ? 0.0 : (double)nan);
    found.total = work.smoothing == 0.0 ? 0.0 : block_sum(total);
    found.target = (double)logit;
    if (threadIdx.x == 0) {
        work.losses[row] = ct_softmax_loss(&found, work.smoothing, n);
    }
    if (!work.gradient) {
        return;
    }
    const real factor = (real)(work.scale / found.sum);
    const real share = (real)(work.scale * work.smoothing / (double)n);
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        if (i == target) {
            const double power = (double)exp_below(logit - most);
            ct_store(
                ct_softmax_target_grad(&found, power, work.smoothing, n, work.scale),
                &x[i]);
        }
        else {
            ct_store(softmax_grad(ct_load(x[i]), most, factor, share), &x[i]);
        }
    }
}

CT_KERNEL
cross_entropy_kernel(const ct_cross_entropy __grid_constant__ work)
{
    ct_visit_float(work.dtype, [&](auto tag) {
        for (size_t row = blockIdx.x; row < work.rows; row += gridDim.x) {
            one_row<typename decltype(tag)::type>(work, row);
        }
    });
}

ct_status
ct_cuda_cross_entropy(void *stream, const ct_cross_entropy *work, ct_error *err)
{
    ct_status status = ct_cuda_check_float("cross_entropy", 0, work->dtype, err);
    if (status != CT_OK || work->rows == 0) {
        return status;
    }
    const size_t blocks = work->rows < ct_cuda_max_grid ? work->rows : ct_cuda_max_grid;
    CT_LAUNCH(cross_entropy_kernel, (unsigned)blocks, ct_cuda_block_size, stream,
              *work);
    return ct_cuda_launched("launch the cross entropy", err);
}
