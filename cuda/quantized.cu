/* Quantized values of 8 or 4 bits for other ranks, on a CUDA device. Mirrors
 * csrc/cpu/quantized.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "math/quantized.h"
#include "quant.cuh"

static_assert(CT_QUANTIZED_BLOCK == ct_cuda_block_size, "a thread has one value");

/* The decoded value i, 0 behind the last. */
template <typename Element>
__device__ static float
wanted(const ct_encoding &e, size_t i)
{
    return i < e.values.n
               ? (float)ct_load(((const Element *)e.values.data)[i]) + e.residual[i]
               : 0.0f;
}

/* A block of values: every thread must call, also behind the last value. The first of
 * two values in a byte writes the byte, after reading both and before either residual
 * changes; the second reads its own alone, as the next may be another block's. */
template <typename Element>
__device__ static void
encode(const ct_encoding &e, size_t block)
{
    const size_t i = block * CT_QUANTIZED_BLOCK + threadIdx.x;
    const float x = wanted<Element>(e, i);
    const float next = i % 2 == 0 ? wanted<Element>(e, i + 1) : 0.0f;
    const float most = ct_quantized_most(e.bits);
    const float scale =
        ct_quantized_scale(ct_block_largest(ct_quant_magnitude(x)), most);
    const bool bad = !(scale == scale);
    const float inverse = ct_quant_scale(scale);
    const int8_t nearest = bad ? (int8_t)0 : ct_quantized_nearest(x, inverse, most);

    if (i < e.values.n && e.bits == 8) {
        e.quantized[i] = nearest;
    }
    if (i < e.values.n && e.bits == 4 && i % 2 == 0) {
        const bool alone = bad || i + 1 == e.values.n;
        const int8_t other =
            alone ? (int8_t)0 : ct_quantized_nearest(next, inverse, most);
        e.quantized[i / 2] = ct_quantized_pair(nearest, other);
    }
    if (i < e.values.n) {
        e.residual[i] = bad ? e.residual[i] : x - (float)nearest * scale;
    }
    if (threadIdx.x == 0) {
        e.scales[block] = scale;
    }
}

__device__ static int8_t
quantized_at(const int8_t *quantized, size_t i, int bits)
{
    if (bits == 8) {
        return quantized[i];
    }
    return i % 2 == 0 ? ct_quantized_first(quantized[i / 2])
                      : ct_quantized_second(quantized[i / 2]);
}

template <typename Element>
__device__ static void
decode(const ct_decoding &d, size_t block)
{
    typedef typename ct_tag<Element>::real real;
    const size_t i = block * CT_QUANTIZED_BLOCK + threadIdx.x;
    float sum = 0.0f;

    if (i >= d.values.n) {
        return;
    }
    for (size_t part = 0; part < d.parts; part++) {
        const size_t skip = part * d.part_bytes;
        const float scale =
            *(const float *)(const void *)((const char *)(d.scales + block) + skip);
        sum += (float)quantized_at(d.quantized + skip, i, d.bits) * scale;
    }
    ct_store((real)(sum * d.factor), &((Element *)d.values.data)[i]);
}

CT_KERNEL
encode_kernel(const ct_encoding __grid_constant__ e)
{
    for (size_t b = blockIdx.x; b < ct_quantized_blocks(e.values.n); b += gridDim.x) {
        ct_visit_float(e.values.dtype,
                       [&](auto tag) { encode<typename decltype(tag)::type>(e, b); });
    }
}

CT_KERNEL
decode_kernel(const ct_decoding __grid_constant__ d)
{
    for (size_t b = blockIdx.x; b < ct_quantized_blocks(d.values.n); b += gridDim.x) {
        ct_visit_float(d.values.dtype,
                       [&](auto tag) { decode<typename decltype(tag)::type>(d, b); });
    }
}

ct_status
ct_cuda_encode(void *stream, const ct_encoding *e, ct_error *err)
{
    const ct_status status = ct_cuda_check_float("encode", 0, e->values.dtype, err);
    if (status != CT_OK || e->values.n == 0) {
        return status;
    }
    CT_LAUNCH(encode_kernel, ct_cuda_grid_size(ct_quantized_blocks(e->values.n)),
              ct_cuda_block_size, stream, *e);
    return ct_cuda_launched("launch encode", err);
}

ct_status
ct_cuda_decode(void *stream, const ct_decoding *d, ct_error *err)
{
    const ct_status status = ct_cuda_check_float("decode", 0, d->values.dtype, err);
    if (status != CT_OK || d->values.n == 0) {
        return status;
    }
    CT_LAUNCH(decode_kernel, ct_cuda_grid_size(ct_quantized_blocks(d->values.n)),
              ct_cuda_block_size, stream, *d);
    return ct_cuda_launched("launch decode", err);
}
