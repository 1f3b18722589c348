/* Writing 8-bit state by the threads of a block. Mirrors part of csrc/cpu/update.c. */
#ifndef CT_CUDA_QUANT_CUH
#define CT_CUDA_QUANT_CUH

#include "launch.cuh"
#include "update.cuh"

static_assert(CT_QUANT_BLOCK == ct_cuda_block_size, "a thread has one element");
static_assert(CT_QUANT_MAP_SIZE == ct_cuda_block_size,
              "a thread has one number of a map");
static_assert(ct_cuda_chunk_elems % CT_QUANT_BLOCK == 0, "a chunk has whole blocks");

__device__ static inline uint32_t
ct_warp_largest(uint32_t value)
{
    for (unsigned step = 16; step > 0; step /= 2) {
        const uint32_t other = __shfl_down_sync(0xffffffffu, value, step);
        value = other > value ? other : value;
    }
    return value;
}

/* The largest value of all threads, in each thread. Every thread must call. */
__device__ static inline uint32_t
ct_block_largest(uint32_t value)
{
    __shared__ uint32_t of_warp[ct_cuda_block_size / 32], largest;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    value = ct_warp_largest(value);
    if (lane == 0) {
        of_warp[warp] = value;
    }
    __syncthreads();
    if (warp == 0) {
        value = ct_warp_largest(lane < ct_cuda_block_size / 32 ? of_warp[lane] : 0);
        if (lane == 0) {
            largest = value;
        }
    }
    __syncthreads();
    return largest;
}

/* What ct_quant_nearest searches in, for state k of an operand. */
__device__ static inline void
ct_fill_middles(float *middles, const ct_cuda_update_operand &operand, int k)
{
    const unsigned i = threadIdx.x;
    if (i + 1 < CT_QUANT_MAP_SIZE) {
        const float *map = ct_global(operand.quant[k].map);
        middles[i] = ct_quant_middle(map[i], map[i + 1]);
    }
}

template <typename Real>
__device__ static inline Real
ct_load_quantized(const ct_cuda_update_operand &operand, int k, size_t i)
{
    const ct_quant &quant = operand.quant[k];
    const uint8_t value = ct_global((const uint8_t *)operand.state[k])[i];
    return (Real)(ct_global(quant.map)[value] *
                  ct_global(quant.absmax)[i / CT_QUANT_BLOCK]);
}

/* Stores element i of state k if inside; every thread must call, with the elements of a
 * single block and after loading from the block. */
template <typename Real>
__device__ static inline void
ct_store_quantized(Real value, const ct_cuda_update_operand &operand, int k, size_t i,
                   bool inside, const float *middles)
{
    const float x = inside ? (float)value : 0.0f;
    const float absmax = ct_quant_absmax(ct_block_largest(ct_quant_magnitude(x)));
    if (inside) {
        const float unit = ct_quant_unit(x, ct_quant_scale(absmax));
        ct_global((uint8_t *)operand.state[k])[i] =
            (uint8_t)ct_quant_nearest(middles, unit);
    }
    if (threadIdx.x == 0) {
        ct_global(operand.quant[k].absmax)[i / CT_QUANT_BLOCK] = absmax;
    }
}

#endif
