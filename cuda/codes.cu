/* Codes of 8 bits for other ranks, on a CUDA device. Mirrors csrc/cpu/codes.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "math/ct_codes_math.h"
#include "quant.cuh"

static_assert(CT_CODES_BLOCK == ct_cuda_block_size, "a thread has one value");

/* A block of values: every thread comes, also those behind the last value. */
template <typename Element>
__device__ static void
encode(const ct_encoding &e, size_t block)
{
    const size_t i = block * CT_CODES_BLOCK + threadIdx.x;
    const bool inside = i < e.values.n;
    const float x =
        inside ? (float)ct_load(((const Element *)e.values.data)[i]) + e.residual[i]
               : 0.0f;
    const float scale = ct_codes_scale(ct_block_largest(ct_quant_magnitude(x)));
    const bool bad = !(scale == scale);

    if (inside) {
        const int8_t code =
            bad ? (int8_t)0 : ct_codes_nearest(x, ct_quant_scale(scale));
        e.codes[i] = code;
        e.residual[i] = bad ? e.residual[i] : x - (float)code * scale;
    }
    if (threadIdx.x == 0) {
        e.scales[block] = scale;
    }
}

template <typename Element>
__device__ static void
decode(const ct_decoding &d, size_t block)
{
    typedef typename ct_tag<Element>::real real;
    const size_t i = block * CT_CODES_BLOCK + threadIdx.x;
    float sum = 0.0f;

    if (i >= d.values.n) {
        return;
    }
    for (size_t part = 0; part < d.parts; part++) {
        const size_t skip = part * d.part_bytes;
        const float scale =
            *(const float *)(const void *)((const char *)(d.scales + block) + skip);
        sum += (float)d.codes[skip + i] * scale;
    }
    ct_store((real)(sum * d.factor), &((Element *)d.values.data)[i]);
}

CT_KERNEL
encode_kernel(const ct_encoding __grid_constant__ e)
{
    for (size_t b = blockIdx.x; b < ct_codes_blocks(e.values.n); b += gridDim.x) {
        ct_visit_float(e.values.dtype,
                       [&](auto tag) { encode<typename decltype(tag)::type>(e, b); });
    }
}

CT_KERNEL
decode_kernel(const ct_decoding __grid_constant__ d)
{
    for (size_t b = blockIdx.x; b < ct_codes_blocks(d.values.n); b += gridDim.x) {
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
    CT_LAUNCH(encode_kernel, ct_cuda_grid_size(ct_codes_blocks(e->values.n)),
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
    CT_LAUNCH(decode_kernel, ct_cuda_grid_size(ct_codes_blocks(d->values.n)),
              ct_cuda_block_size, stream, *d);
    return ct_cuda_launched("launch decode", err);
}
