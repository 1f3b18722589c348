/* Kernels that take elements one by one, on a CUDA device: copies and conversions,
 * zeros, scaling, averages and sums. Mirrors csrc/cpu/elementwise.c. */
#include "element.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "math/scale.h"
#include "vector.cuh"

/* What a kernel of two lists works on: a span and the values for it. */
struct pair_operand : ct_span {
    ct_span value;
};

/* f(element, value) for each pair of a range. */
template <typename F>
__device__ static inline void
visit_pair(const pair_operand &operand, const ct_cuda_range &range, F f)
{
    ct_visit_float(operand.dtype, [&](auto to) {
        ct_visit_float(operand.value.dtype, [&](auto from) {
            ct_map((typename decltype(to)::type *)operand.data,
                   (const typename decltype(from)::type *)operand.value.data, range, f);
        });
    });
}

/* ---- copies and conversions ------------------------------------------------------ */

struct copy_operand {
    void *to;
    const void *from;
    size_t n;
    ct_dtype to_dtype, from_dtype;
    unsigned raw_size; /* bytes of an element copied unchanged, else 0 */
};

template <typename Raw>
__device__ static void
copy_raw(const copy_operand &operand, const ct_cuda_range &range)
{
    ct_map((Raw *)operand.to, (const Raw *)operand.from, range,
           [](Raw &to, Raw from) { to = from; });
}

__device__ static void
copy_range(const copy_operand &operand, const ct_cuda_range &range)
{
    switch (operand.raw_size) {
    case 1:
        copy_raw<uint8_t>(operand, range);
        return;
    case 2:
        copy_raw<uint16_t>(operand, range);
        return;
    case 4:
        copy_raw<uint32_t>(operand, range);
        return;
    case 8:
        copy_raw<uint64_t>(operand, range);
        return;
    default:
        break;
    }
    ct_visit_float(operand.to_dtype, [&](auto to) {
        ct_visit_float(operand.from_dtype, [&](auto from) {
            typedef typename decltype(to)::type to_type;
            typedef typename decltype(from)::type from_type;
            ct_map((to_type *)operand.to, (const from_type *)operand.from, range,
                   [](to_type &y, from_type x) { ct_store(ct_load(x), &y); });
        });
    });
}

CT_KERNEL
copy_kernel(const ct_cuda_batch<copy_operand> __grid_constant__ batch)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        copy_range(batch.operands[range.operand], range);
    }
}

static ct_status
check_pair(size_t i, const ct_span &to, const ct_span &from, ct_error *err)
{
    if (to.n != from.n) {
        return ct_fail(err, CT_EINVAL,
                       "copy: span %zu has %zu elements to fill from %zu", i, to.n,
                       from.n);
    }
    if (to.dtype == from.dtype) {
        return CT_OK;
    }
    ct_status status = ct_cuda_check_float("copy", i, to.dtype, err);
    return status == CT_OK ? ct_cuda_check_float("copy", i, from.dtype, err) : status;
}

static copy_operand
operand_of(const ct_span &to, const ct_span &from)
{
    const bool raw = to.dtype == from.dtype;
    const unsigned size = raw ? (unsigned)ct_dtype_size(to.dtype) : 0;
    return {to.data, from.data, to.n, to.dtype, from.dtype, size};
}

ct_status
ct_cuda_copy(void *stream, const ct_span *to, const ct_span *from, size_t n_spans,
             ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = check_pair(i, to[i], from[i], err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<copy_operand>(
        n_spans, [&](size_t i) { return operand_of(to[i], from[i]); },
        [&](const ct_cuda_batch<copy_operand> &batch) {
            CT_LAUNCH(copy_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch);
            return ct_cuda_launched("launch copy", err);
        });
}

/* ---- zeros ----------------------------------------------------------------------- */

/* Lengths are in units of 16 bytes if address and length allow, else in bytes. */
struct zero_operand {
    void *data;
    size_t n;
    bool wide;
};

CT_KERNEL
zero_kernel(const ct_cuda_batch<zero_operand> __grid_constant__ batch)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range r = ct_cuda_range_of(batch, chunk);
        const zero_operand &to = batch.operands[r.operand];
        for (size_t i = r.begin + threadIdx.x; i < r.end; i += blockDim.x) {
            if (to.wide) {
                ((uint4 *)to.data)[i] = make_uint4(0, 0, 0, 0);
            }
            else {
                ((unsigned char *)to.data)[i] = 0;
            }
        }
    }
}

/* Operand 2 * i is the part of span i that goes by 16 bytes, 2 * i + 1 the rest. */
static zero_operand
operand_of(const ct_span *spans, size_t half)
{
    const ct_span &span = spans[half / 2];
    const size_t bytes = span.n * ct_dtype_size(span.dtype);
    const bool aligned = (uintptr_t)span.data % sizeof(uint4) == 0;
    const size_t wide = aligned ? bytes / sizeof(uint4) : 0;
    if (half % 2 == 0) {
        return {span.data, wide, true};
    }
    const size_t done = wide * sizeof(uint4);
    return {(unsigned char *)span.data + done, bytes - done, false};
}

ct_status
ct_cuda_zero(void *stream, const ct_span *spans, size_t n_spans, ct_error *err)
{
    return ct_cuda_in_batches<zero_operand>(
        2 * n_spans, [&](size_t half) { return operand_of(spans, half); },
        [&](const ct_cuda_batch<zero_operand> &batch) {
            CT_LAUNCH(zero_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch);
            return ct_cuda_launched("launch zero", err);
        });
}

/* ---- a factor, within a limit ---------------------------------------------------- */

__device__ static inline float
apply(float x, float factor, float limit)
{
    return ct_scale_apply_f32(x, factor, limit);
}

__device__ static inline double
apply(double x, double factor, double limit)
{
    return ct_scale_apply_f64(x, factor, limit);
}

template <typename Element>
__device__ static void
scale(void *data, const ct_cuda_range &range, double factor, double limit)
{
    typedef typename ct_tag<Element>::real real;
    const real f = (real)factor, most = (real)limit;
    ct_map((Element *)data, (const Element *)data, range,
           [&](Element &to, Element x) { ct_store(apply(ct_load(x), f, most), &to); });
}

CT_KERNEL
scale_kernel(const ct_cuda_batch<ct_span> __grid_constant__ batch, double factor,
             double limit)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const ct_span &span = batch.operands[range.operand];
        ct_visit_float(span.dtype, [&](auto tag) {
            scale<typename decltype(tag)::type>(span.data, range, factor, limit);
        });
    }
}

ct_status
ct_cuda_scale(void *stream, double factor, double limit, const ct_span *spans,
              size_t n_spans, ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = ct_cuda_check_float("scale", i, spans[i].dtype, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return ct_cuda_in_batches<ct_span>(
        n_spans, [&](size_t i) { return spans[i]; },
        [&](const ct_cuda_batch<ct_span> &batch) {
            CT_LAUNCH(scale_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch, factor, limit);
            return ct_cuda_launched("launch scale", err);
        });
}

/* ---- exponential moving averages ------------------------------------------------- */

CT_KERNEL
average_kernel(const ct_cuda_batch<pair_operand> __grid_constant__ batch,
               const ct_ema_coef coef)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        visit_pair(batch.operands[range.operand], range, [&](auto &average, auto x) {
            const auto value = ct_load(x);
            typedef decltype(ct_load(x)) real;
            ct_store(ct_average_of(coef, (real)ct_load(average), value), &average);
        });
    }
}

ct_status
ct_cuda_average(void *stream, const ct_span *averages, const ct_span *values,
                size_t n_spans, double decay, ct_error *err)
{
    ct_status status = ct_check_pairs("average", averages, values, n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_ema_coef coef = ct_ema_coef_of(decay);
    return ct_cuda_in_batches<pair_operand>(
        n_spans, [&](size_t i) { return pair_operand{averages[i], values[i]}; },
        [&](const ct_cuda_batch<pair_operand> &batch) {
            CT_LAUNCH(average_kernel, ct_cuda_grid_size(batch.n_chunks),
                      ct_cuda_block_size, stream, batch, coef);
            return ct_cuda_launched("launch average", err);
        });
}

/* ---- sums of pairs --------------------------------------------------------------- */

/* Each step is rounded to the sum's dtype, as the CPU's tile is. */
template <typename Sum, typename Value>
__device__ static inline void
add(Sum &sum, Value value, double factor)
{
    typedef typename ct_tag<Sum>::real real;
    Sum added;
    ct_store(ct_load(value), &added);
    ct_store(apply(ct_load(added), (real)factor, (real)INFINITY), &added);
    ct_store(ct_load(sum) + ct_load(added), &sum);
}

CT_KERNEL
add_kernel(const ct_cuda_batch<pair_operand> __grid_constant__ batch, double factor)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        visit_pair(batch.operands[range.operand], range,
                   [&](auto &sum, auto value) { add(sum, value, factor); });
    }
}

ct_status
ct_cuda_add(void *stream, const ct_span *sums, const ct_span *values, size_t n_spans,
            double factor, ct_error *err)
{
    ct_status status = ct_check_pairs("add", sums, values, n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    return ct_cuda_in_batches<pair_operand>(
        n_spans, [&](size_t i) { return pair_operand{sums[i], values[i]}; },
        [&](const ct_cuda_batch<pair_operand> &batch) {
            CT_LAUNCH(add_kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch, factor);
            return ct_cuda_launched("launch add", err);
        });
}
