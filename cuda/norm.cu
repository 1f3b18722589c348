/* The sum of powers of many spans on a CUDA device. Mirrors csrc/cpu/norm.c.
 *
 * Three fixed levels: a thread adds every 256th element of a chunk, a block folds its
 * threads into the chunk's partial sum, a last block folds the partial sums of all
 * spans or of each span. No atomics, so two runs agree; the order is not the CPU's, and
 * an addend goes through at most chunk / 256 + 8 + partials / 256 + 8 additions in
 * double.
 */
#include "element.cuh"
#include "kernels.h"
#include "reduce.cuh"

template <int Kind, typename Element>
__device__ static double
range_sum(double p, const void *data, const ct_cuda_range &range)
{
    const Element *elements = (const Element *)data;
    double sum = 0.0;
    for (size_t i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
        sum = ct_norm_add((ct_norm_kind)Kind, p, sum, (double)ct_load(elements[i]));
    }
    return sum;
}

/* A span and the address of its separate sum, or NULL. */
struct norm_operand : ct_span {
    size_t number;
};

template <int Kind>
CT_KERNEL
norm_kernel(const ct_cuda_batch<norm_operand> __grid_constant__ batch, double p,
            double *partials)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const ct_cuda_range range = ct_cuda_range_of(batch, chunk);
        const ct_span &span = batch.operands[range.operand];
        double sum = 0.0;
        ct_visit_float(span.dtype, [&](auto tag) {
            sum = range_sum<Kind, typename decltype(tag)::type>(p, span.data, range);
        });
        sum = ct_block_sum((ct_norm_kind)Kind, sum);
        if (threadIdx.x == 0) {
            partials[chunk] = sum;
        }
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
        n_spans, [&](size_t i) { return norm_operand{spans[i], i}; },
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

ct_status
ct_cuda_norm(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
             size_t n_spans, double *sum, ct_error *err)
{
    size_t n_chunks;
    ct_status status = count_chunks(spans, n_spans, &n_chunks, err);
    if (status == CT_OK) {
        status = prepare(stream, scratch, n_chunks, sum, n_chunks == 0, err);
    }
    if (status != CT_OK || n_chunks == 0) {
        return status;
    }
    double *partials = (double *)scratch->data;
    status = enqueue(
        stream, p, partials, spans, n_spans,
        [](const ct_cuda_batch<norm_operand> &, const double *) { return CT_OK; }, err);
    if (status != CT_OK) {
        return status;
    }
    CT_LAUNCH(fold_kernel, 1, ct_cuda_block_size, stream, ct_norm_kind_of(p), partials,
              n_chunks, sum);
    return ct_cuda_launched("launch the norm's last sum", err);
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
