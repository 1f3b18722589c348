/* Compact state and master weights by vectors of eight elements, and by one element
 * a thread. Mirrors csrc/cpu/body/compact.h. */
#ifndef CT_CUDA_COMPACT_CUH
#define CT_CUDA_COMPACT_CUH

#include "update.cuh"

#include "math/compact.h"

static_assert(ct_cuda_chunk_elems % CT_COMPACT_GROUP == 0, "a chunk has whole groups");

/* The largest value of so many adjacent threads, a power of two, in each of them. Every
 * thread of the warp must call. */
template <unsigned Threads>
__device__ static inline uint32_t
ct_largest_of(uint32_t value)
{
    CT_UNROLL
    for (unsigned step = Threads / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, value, step);
        value = other > value ? other : value;
    }
    return value;
}

/* The scale that the first of so many adjacent threads has read: the same thread writes
 * it, so that no other reads it late. Every thread of the warp must call. */
template <unsigned Threads>
__device__ static inline uint16_t
ct_group_scale(uint16_t scale)
{
    return (uint16_t)__shfl_sync(0xffffffffu, (uint32_t)scale,
                                 threadIdx.x % 32 / Threads * Threads);
}

/* The scale of state k, where a group begins with element i. */
__device__ static inline uint16_t
ct_load_scale(const ct_cuda_update_operand &operand, int k, size_t i)
{
    return i % CT_COMPACT_GROUP == 0
               ? ct_global(operand.quant[k].scales)[i / CT_COMPACT_GROUP]
               : 0;
}

/* ---- one element ----------------------------------------------------------------- */

static_assert(ct_cuda_block_size == 256, "a thread for each value of a byte");

/* ct_compact_part() of every value, in shared memory: a division for each element is
 * slower. Every thread must call. */
__device__ static inline void
ct_fill_parts(float *parts)
{
    parts[threadIdx.x] = ct_compact_part((int8_t)threadIdx.x);
    __syncthreads();
}

/* Reads elements of a group of state k. */
struct ct_compact_reader {
    const float *parts;
    int k;
    float largest, unit;

    __device__ ct_compact_reader(const float *parts_, int k_, uint16_t scale)
        : parts(parts_), k(k_), largest(ct_f32_from_f16(scale)),
          unit(ct_compact_unit(largest))
    {
    }

    __device__ float load(uint8_t value) const
    {
        return k == 0 ? parts[value] * largest : ct_compact_variance(value, unit);
    }
};

/* Writes them, by the largest magnitude. */
struct ct_compact_writer {
    int k;
    uint16_t scale;
    float largest, inverse;

    __device__ ct_compact_writer(int k_, uint32_t magnitude)
        : k(k_), scale(k == 0 ? ct_compact_momentum_scale(magnitude)
                              : ct_compact_root_scale(magnitude)),
          largest(ct_f32_from_f16(scale)), inverse(ct_compact_inverse(largest))
    {
    }

    __device__ uint8_t store(float x) const
    {
        return k == 0 ? (uint8_t)ct_compact_from_momentum(x, largest)
                      : ct_compact_from_variance(x, inverse);
    }

    /* Of the group that begins with element i, if one does. */
    __device__ void store_scale(const ct_cuda_update_operand &operand, size_t i) const
    {
        if (i % CT_COMPACT_GROUP == 0) {
            ct_global(operand.quant[k].scales)[i / CT_COMPACT_GROUP] = scale;
        }
    }
};

__device__ static inline float
ct_load_param(const ct_cuda_update_operand &operand, size_t i)
{
    return operand.correction != NULL
               ? ct_compact_master(ct_global((const uint16_t *)operand.param)[i],
                                   ct_global(operand.correction)[i])
               : ct_load_as<float>(operand.param, operand.dtype, i);
}

/* After the parameter has been stored. */
__device__ static inline void
ct_store_correction(float param, const ct_cuda_update_operand &operand, size_t i)
{
    if (operand.correction != NULL) {
        ct_global(operand.correction)[i] =
            ct_compact_correction(param, ct_global((const uint16_t *)operand.param)[i]);
    }
}

/* ---- a vector of elements -------------------------------------------------------- */

enum {
    CT_COMPACT_ELEMS = 8,                                    /* 16 bytes of bfloat16 */
    CT_COMPACT_THREADS = CT_COMPACT_GROUP / CT_COMPACT_ELEMS /* of a group */
};

/* Two ct_bits of four elements, as few loads as there can be. */
struct ct_compact_bits {
    ct_bits half[2];

    __device__ void load(const void *data, ct_dtype dtype, size_t i)
    {
        if (dtype == CT_F32) {
            half[0] = ct_global((const uint4 *)((const float *)data + i))[0];
            half[1] = ct_global((const uint4 *)((const float *)data + i))[1];
        }
        else {
            const uint4 all = *ct_global((const uint4 *)((const uint16_t *)data + i));
            half[0] = make_uint4(all.x, all.y, 0, 0);
            half[1] = make_uint4(all.z, all.w, 0, 0);
        }
    }

    __device__ void store(void *data, ct_dtype dtype, size_t i) const
    {
        if (dtype == CT_F32) {
            __stwb(ct_global((uint4 *)((float *)data + i)), half[0]);
            __stwb(ct_global((uint4 *)((float *)data + i) + 1), half[1]);
        }
        else {
            __stwb(ct_global((uint4 *)((uint16_t *)data + i)),
                   make_uint4(half[0].x, half[0].y, half[1].x, half[1].y));
        }
    }
};

/* One byte of each element. */
__device__ static inline uint2
ct_load_bytes(const void *data, size_t i)
{
    return *ct_global((const uint2 *)((const uint8_t *)data + i));
}

__device__ static inline uint8_t
ct_byte_of(const uint2 &bytes, unsigned j)
{
    return (uint8_t)((j < 4 ? bytes.x : bytes.y) >> (8 * (j % 4)));
}

__device__ static inline void
ct_store_bytes(const uint8_t (&bytes)[CT_COMPACT_ELEMS], void *data, size_t i)
{
    uint32_t words[2] = {0, 0};
    CT_UNROLL
    for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
        words[j / 4] |= (uint32_t)bytes[j] << (8 * (j % 4));
    }
    __stwb(ct_global((uint2 *)((uint8_t *)data + i)), make_uint2(words[0], words[1]));
}

/* What a vector is computed from. */
template <typename Rule> struct ct_compact_loaded {
    ct_compact_bits grad, param;
    uint2 state[Rule::n_states], correction;
    uint16_t scale[Rule::n_states];

    __device__ void load(const ct_cuda_update_operand &operand, size_t i)
    {
        grad.load(operand.grad, operand.grad_dtype, i);
        param.load(operand.param, operand.dtype, i);
        correction = make_uint2(0, 0);
        if (operand.correction != NULL) {
            correction = ct_load_bytes(operand.correction, i);
        }
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            state[k] = ct_load_bytes(operand.state[k], i);
            scale[k] = ct_load_scale(operand, k, i);
        }
    }
};

/* Its values. */
template <typename Rule> struct ct_compact_values {
    ct_reals<float> grad[2], param[2];
    float state[Rule::n_states][CT_COMPACT_ELEMS];

    __device__
    ct_compact_values(const ct_cuda_update_operand &operand,
                      const ct_compact_loaded<Rule> &from, const float *parts)
    {
        CT_UNROLL
        for (unsigned h = 0; h < 2; h++) {
            grad[h] = ct_widen(from.grad.half[h], operand.grad_dtype, float());
            param[h] = ct_widen(from.param.half[h], operand.dtype, float());
        }
        if (operand.correction != NULL) {
            CT_UNROLL
            for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
                float &x = param[j / 4].of[j % 4]; /* a bfloat16 */
                x = ct_compact_master((uint16_t)(ct_bits_from_f32(x) >> 16),
                                      (int8_t)ct_byte_of(from.correction, j));
            }
        }
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            const ct_compact_reader reader(
                parts, k, ct_group_scale<CT_COMPACT_THREADS>(from.scale[k]));
            CT_UNROLL
            for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
                state[k][j] = reader.load(ct_byte_of(from.state[k], j));
            }
        }
    }

    /* f(grad, param, state) for each element. */
    template <typename F> __device__ void each(F f)
    {
        CT_UNROLL
        for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
            float of_one[CT_RULE_MAX_STATES] = {};
            CT_UNROLL
            for (int k = 0; k < Rule::n_states; k++) {
                of_one[k] = state[k][j];
            }
            f(grad[j / 4].of[j % 4], &param[j / 4].of[j % 4], of_one);
            CT_UNROLL
            for (int k = 0; k < Rule::n_states; k++) {
                state[k][j] = of_one[k];
            }
        }
    }

    /* Every thread of the warp must call. */
    __device__ void store_states(const ct_cuda_update_operand &operand, size_t i) const
    {
        CT_UNROLL
        for (int k = 0; k < Rule::n_states; k++) {
            uint32_t magnitude = 0;
            uint8_t bytes[CT_COMPACT_ELEMS];
            CT_UNROLL
            for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
                const uint32_t of_one = ct_compact_magnitude(state[k][j]);
                magnitude = of_one > magnitude ? of_one : magnitude;
            }
            const ct_compact_writer writer(
                k, ct_largest_of<CT_COMPACT_THREADS>(magnitude));
            CT_UNROLL
            for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
                bytes[j] = writer.store(state[k][j]);
            }
            ct_store_bytes(bytes, operand.state[k], i);
            writer.store_scale(operand, i);
        }
    }

    __device__ void
    store_corrections(const ct_cuda_update_operand &operand, size_t i) const
    {
        uint8_t bytes[CT_COMPACT_ELEMS];
        if (operand.correction == NULL) {
            return;
        }
        CT_UNROLL
        for (unsigned j = 0; j < CT_COMPACT_ELEMS; j++) {
            const float x = param[j / 4].of[j % 4];
            bytes[j] = (uint8_t)ct_compact_correction(x, ct_bf16_from_f32(x));
        }
        ct_store_bytes(bytes, operand.correction, i);
    }
};

#endif
