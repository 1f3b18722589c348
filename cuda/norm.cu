/* The sum of powers of many spans on a CUDA device. Mirrors csrc/cpu/norm.c.
 *
 * Three fixed levels: a thread adds its elements of a chunk, a block folds its threads
 * into the chunk's partial sum, a last block folds the partial sums of all spans or of
 * each span. No atomics, so two runs agree; the order is not the CPU's.
 *
 * Many GPUs are 64 times slower in double than in float. The squares, the
 * magnitudes and the largest of a chunk of floats are therefore added in pairs of
 * floats; only a chunk whose sum is too small or too large for that, most often 0, is
 * read again and added in double. With S for a chunk's sum and u = 2^-24, a thread adds
 * 8 elements to each of 4 pairs: before addition i the rests are below (i + 1) u S, and
 * two roundings follow, 88 u^2 S in all. Ten merges follow, with rests below
 * (9 + i) u S: 290 u^2 S. So a chunk's sum is off by less than 2^-39 of it.
 */
#include "element.cuh"
#include "kernels.h"
#include "reduce.cuh"
#include "vector.cuh"

/* Are the sums of this kind over such elements made of pairs of floats? */
template <int Kind, typename Element> struct in_floats {
    static const bool value =
        sizeof(typename ct_tag<Element>::real) == 4 &&
        (Kind == CT_NORM_TWO || Kind == CT_NORM_ONE || Kind == CT_NORM_MAX);
};

/* Calls add(x, j) for a thread's elements of a chunk: vector t of each row of vectors
 * of 16 bytes is thread t's, at whatever address, and x is number j of its vector.
 * Elements behind the last are 0. */
template <typename Element, typename Add>
__device__ static inline void
each_element(const void *data, const ct_cuda_range &range, Add add)
{
    const unsigned n = 16 / sizeof(Element), ahead = 4;
    const size_t row = ct_row<n>::elems;
    const bool aligned = (uintptr_t)data % 16 == 0;
    const Element *elements = (const Element *)data;

    for (size_t i = range.begin + n * threadIdx.x; i < range.end; i += ahead * row) {
        ct_vector<Element, n> x[ahead] = {};
        if (aligned && i + (ahead - 1) * row + n <= range.end) {
            ct_load_rows(x, elements + i);
        }
        else {
            CT_UNROLL
            for (unsigned k = 0; k < ahead * n; k++) {
                const size_t at = i + k / n * row + k % n;
                if (at < range.end) {
                    x[k / n].of[k % n] = elements[at];
                }
            }
        }
        CT_UNROLL
        for (unsigned k = 0; k < ahead * n; k++) {
            add(ct_load(x[k / n].of[k % n]), k % n);
        }
    }
}

/* ---- a chunk in double ----------------------------------------------------------- */

/* The sum over the block, in thread 0 alone. */
template <int Kind, typename Element>
__device__ static double
sum_in_double(double p, const void *data, const ct_cuda_range &range)
{
    double sum = 0.0;
    each_element<Element>(data, range, [&](auto x, unsigned) {
        if (x != 0) { /* zeros take no operation in double */
            sum = ct_norm_add((ct_norm_kind)Kind, p, sum, (double)x);
        }
    });
    return ct_block_sum((ct_norm_kind)Kind, sum);
}

/* ---- a chunk in floats ----------------------------------------------------------- */

template <int Kind>
__device__ static inline ct_norm_pair
warp_pair(ct_norm_pair sum)
{
    CT_UNROLL
    for (unsigned step = ct_warp_size / 2; step > 0; step /= 2) {
        ct_norm_pair other;
        other.high = __shfl_down_sync(0xffffffffu, sum.high, step);
        other.low = __shfl_down_sync(0xffffffffu, sum.low, step);
        sum = ct_norm_pair_merge((ct_norm_kind)Kind, sum, other);
    }
    return sum;
}

template <int Kind, typename Element>
__device__ static inline ct_norm_pair
thread_pair(const void *data, const ct_cuda_range &range)
{
    const ct_norm_kind kind = (ct_norm_kind)Kind;
    ct_norm_pair sums[4] = {};
    each_element<Element>(data, range, [&](float x, unsigned j) {
        sums[j % 4] = ct_norm_pair_add(kind, sums[j % 4], x);
    });
    return ct_norm_pair_merge(kind, ct_norm_pair_merge(kind, sums[0], sums[1]),
                              ct_norm_pair_merge(kind, sums[2], sums[3]));
}

/* The sum over the block, in each thread; every thread has to come. */
template <int Kind>
__device__ static inline ct_norm_pair
block_pair(ct_norm_pair sum)
{
    __shared__ ct_norm_pair of_warp[ct_n_warps], all;
    const unsigned lane = threadIdx.x % ct_warp_size, warp = threadIdx.x / ct_warp_size;

    sum = warp_pair<Kind>(sum);
    if (lane == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        sum = warp_pair<Kind>(lane < ct_n_warps ? of_warp[lane] : ct_norm_pair());
        if (lane == 0) {
            all = sum;
        }
    }
    __syncthreads();
    return all;
}

/* The sum over the block, in thread 0 alone. */
template <int Kind, typename Element>
__device__ static double
sum_in_floats(double p, const void *data, const ct_cuda_range &range)
{
    const ct_norm_pair sum = block_pair<Kind>(thread_pair<Kind, Element>(data, range));
    if (ct_norm_pair_is_exact((ct_norm_kind)Kind, sum)) {
        return (double)sum.high + (double)sum.low;
    }
    return sum_in_double<Kind, Element>(p, data, range);
}

/* A span and its number. Short, so that a launch takes a thousand. */
struct norm_operand {
    void *data;
    uint64_t n : 56, dtype : 8;
    uint32_t number;
};

template <int Kind>
CT_KERNEL
norm_kernel(const ct_cuda_batch<norm_operand> __grid_constant__ batch, double p,
            double *partials)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const norm_operand &span = batch.operands[range.operand];
        ct_visit_float((ct_dtype)span.dtype, [&](auto tag) {
            typedef typename decltype(tag)::type element;
            double sum;
            if constexpr (in_floats<Kind, element>::value) {
                sum = sum_in_floats<Kind, element>(p, span.data, range);
            }
            else {
                sum = sum_in_double<Kind, element>(p, span.data, range);
            }
            if (threadIdx.x == 0) {
                partials[chunk] = sum;
            }
        });
    }
}

CT_KERNEL
fold_kernel(ct_norm_kind kind, const double *partials, size_t n, double *total)
{
    const double sum = ct_list_sum(kind, partials, n, 1);
    if (threadIdx.x == 0) {
        *total = sum;
    }
}

CT_KERNEL
clip_kernel(const ct_clip_request request, ct_norm_kind kind, const double *partials,
            size_t n, ct_clip_outcome *outcome)
{
    const double sum = ct_list_sum(kind, partials, n, 1);
    if (threadIdx.x == 0) {
        ct_clip_decide_outcome(&request, kind, sum, sum, outcome);
    }
}

CT_KERNEL
decide_kernel(const ct_clip_request request, ct_norm_kind kind, const double *sum,
              const double *all, ct_clip_outcome *outcome)
{
    ct_clip_decide_outcome(&request, kind, *sum, *all, outcome);
}

/* Folds each operand's partial sums, a block for each operand. */
CT_KERNEL
fold_each_kernel(const ct_cuda_batch<norm_operand> __grid_constant__ batch,
                 ct_norm_kind kind, const double *partials, double *sums)
{
    for (uint32_t i = blockIdx.x; i < batch.n_operands; i += gridDim.x) {
        const uint32_t begin = i == 0 ? 0 : batch.chunk_end[i - 1];
        const double sum =
            ct_list_sum(kind, partials + begin, batch.chunk_end[i] - begin, 1);
        if (threadIdx.x == 0) {
            sums[batch.operands[i].number] = sum;
        }
    }
}

static ct_status
count_chunks(const ct_span *spans, size_t n_spans, size_t *n_chunks, ct_error *err)
{
    *n_chunks = 0;
    for (size_t i = 0; i < n_spans; i++) {
        ct_status status = ct_cuda_check_float("norm", i, spans[i].dtype, err);
        if (status != CT_OK) {
            return status;
        }
        *n_chunks += ct_cuda_chunks_of(spans[i].n);
    }
    return CT_OK;
}

/* Launches the kernel of a kind, so that elements need no choice. */
static void
launch(void *stream, double p, const ct_cuda_batch<norm_operand> &batch,
       double *partials)
{
    const unsigned grid = ct_cuda_grid_size(batch.n_chunks);
    const unsigned block = ct_cuda_block_size;
    switch (ct_norm_kind_of(p)) {
    case CT_NORM_TWO:
        CT_LAUNCH(norm_kernel<CT_NORM_TWO>, grid, block, stream, batch, p, partials);
        break;
    case CT_NORM_ONE:
        CT_LAUNCH(norm_kernel<CT_NORM_ONE>, grid, block, stream, batch, p, partials);
        break;
    case CT_NORM_MAX:
        CT_LAUNCH(norm_kernel<CT_NORM_MAX>, grid, block, stream, batch, p, partials);
        break;
    case CT_NORM_WHOLE:
        CT_LAUNCH(norm_kernel<CT_NORM_WHOLE>, grid, block, stream, batch, p, partials);
        break;
    default:
        CT_LAUNCH(norm_kernel<CT_NORM_POWER>, grid, block, stream, batch, p, partials);
    }
}

/* Enqueues the partial sums; then(batch, partials) after those of each launch. */
template <typename Then>
static ct_status
enqueue(void *stream, double p, double *partials, const ct_span *spans, size_t n_spans,
        Then then, ct_error *err)
{
    double *next = partials;
    return ct_cuda_in_batches<norm_operand>(
        n_spans,
        [&](size_t i) {
            return norm_operand{spans[i].data, spans[i].n, (uint64_t)spans[i].dtype,
                                (uint32_t)i};
        },
        [&](const ct_cuda_batch<norm_operand> &batch) {
            launch(stream, p, batch, next);
            ct_status status = ct_cuda_launched("launch the norm", err);
            if (status == CT_OK) {
                status = then(batch, next);
            }
            next += batch.n_chunks;
            return status;
        });
}

/* Grows the scratch for the partial sums and sets `n` doubles at `sums` to 0. */
static ct_status
prepare(void *stream, ct_scratch *scratch, size_t n_chunks, double *sums, size_t n,
        ct_error *err)
{
    ct_status status = n == 0 ? CT_OK
                              : ct_cuda_check(cudaMemsetAsync(sums, 0, n * sizeof *sums,
                                                              (cudaStream_t)stream),
                                              "clear the norm", err);
    return status == CT_OK && n_chunks != 0
               ? ct_cuda_scratch_grow(scratch, n_chunks * sizeof(double), err)
               : status;
}

/* The chunks' sums, in the scratch; without a chunk, *sum becomes 0. */
static ct_status
partial_sums(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
             size_t n_spans, size_t *n_chunks, double *sum, ct_error *err)
{
    ct_status status = count_chunks(spans, n_spans, n_chunks, err);
    if (status == CT_OK) {
        const bool empty = *n_chunks == 0 && sum != NULL;
        status = prepare(stream, scratch, *n_chunks, sum, empty, err);
    }
    return status == CT_OK ? enqueue(
                                 stream, p, (double *)scratch->data, spans, n_spans,
                                 [](const ct_cuda_batch<norm_operand> &,
                                    const double *) { return CT_OK; },
                                 err)
                           : status;
}

ct_status
ct_cuda_norm(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
             size_t n_spans, double *sum, ct_error *err)
{
    size_t n_chunks;
    ct_status status =
        partial_sums(stream, scratch, p, spans, n_spans, &n_chunks, sum, err);
    if (status != CT_OK || n_chunks == 0) {
        return status;
    }
    CT_LAUNCH(fold_kernel, 1, ct_cuda_block_size, stream, ct_norm_kind_of(p),
              (const double *)scratch->data, n_chunks, sum);
    return ct_cuda_launched("launch the norm's last sum", err);
}

ct_status
ct_cuda_clip(void *stream, ct_scratch *scratch, const ct_clip_request *request,
             const ct_span *spans, size_t n_spans, ct_clip_outcome *outcome,
             ct_error *err)
{
    size_t n_chunks;
    const double p = request->norm_type;
    ct_status status =
        partial_sums(stream, scratch, p, spans, n_spans, &n_chunks, NULL, err);
    if (status != CT_OK) {
        return status;
    }
    CT_LAUNCH(clip_kernel, 1, ct_cuda_block_size, stream, *request, ct_norm_kind_of(p),
              (const double *)scratch->data, n_chunks, outcome);
    return ct_cuda_launched("launch the factor of clipping", err);
}

ct_status
ct_cuda_decide(void *stream, const ct_clip_request *request, const double *sum,
               const double *all, ct_clip_outcome *outcome, ct_error *err)
{
    CT_LAUNCH(decide_kernel, 1, 1, stream, *request,
              ct_norm_kind_of(request->norm_type), sum, all, outcome);
    return ct_cuda_launched("launch the factor of clipping", err);
}

ct_status
ct_cuda_norms(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
              size_t n_spans, double *sums, ct_error *err)
{
    size_t n_chunks;
    ct_status status = count_chunks(spans, n_spans, &n_chunks, err);
    if (status == CT_OK) {
        status = prepare(stream, scratch, n_chunks, sums, n_spans, err);
    }
    if (status != CT_OK || n_chunks == 0) {
        return status;
    }
    return enqueue(
        stream, p, (double *)scratch->data, spans, n_spans,
        [&](const ct_cuda_batch<norm_operand> &batch, const double *partials) {
            CT_LAUNCH(fold_each_kernel, ct_cuda_grid_size(batch.n_operands),
                      ct_cuda_block_size, stream, batch, ct_norm_kind_of(p), partials,
                      sums);
            return ct_cuda_launched("launch the norms' last sums", err);
        },
        err);
}
