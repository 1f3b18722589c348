/* Sums over the threads of a block, in one order. */
#ifndef CT_CUDA_REDUCE_CUH
#define CT_CUDA_REDUCE_CUH

#include "launch.cuh"
#include "math/norm.h"

static const unsigned ct_warp_size = 32;
static const unsigned ct_n_warps = ct_cuda_block_size / ct_warp_size;

__device__ static inline double
ct_warp_sum(ct_norm_kind kind, double sum)
{
    for (unsigned step = ct_warp_size / 2; step > 0; step /= 2) {
        sum = ct_norm_merge(kind, sum, __shfl_down_sync(0xffffffffu, sum, step));
    }
    return sum;
}

/* The sum over the block, in thread 0 alone. Every thread of the block has to come. */
__device__ static inline double
ct_block_sum(ct_norm_kind kind, double sum)
{
    __shared__ double of_warp[ct_n_warps];
    const unsigned lane = threadIdx.x % ct_warp_size, warp = threadIdx.x / ct_warp_size;

    sum = ct_warp_sum(kind, sum);
    if (lane == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        sum = ct_warp_sum(kind, lane < ct_n_warps ? of_warp[lane] : 0.0);
    }
    __syncthreads(); /* of_warp is free for the next chunk */
    return sum;
}

/* n elements of a list, `stride` apart, added by all threads of a block; the sum is
 * thread 0's. */
__device__ static inline double
ct_list_sum(ct_norm_kind kind, const double *list, size_t n, size_t stride)
{
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        sum = ct_norm_merge(kind, sum, list[i * stride]);
    }
    return ct_block_sum(kind, sum);
}

#endif
