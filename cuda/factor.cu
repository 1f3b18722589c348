/* Factored second moments on a CUDA device. Mirrors csrc/cpu/factor.c.
 *
 * Three kernels add: a warp a row, a thread a column of a slab of rows, a thread the
 * slabs of a column. The gradient is read twice, along the rows both times. Of two that
 * finish, a thread does a column, a block the rows of a matrix. Each is a single launch
 * for the whole list, or as much of the list as a launch's parameters hold. */
#include "element.cuh"
#include "kernels.h"
#include "reduce.cuh"
#include "vector.cuh"

static const size_t slab_rows = 128;
static const size_t most_slab_sums = 1 << 21; /* 16 MiB, unless a matrix has more */
static const size_t rows_of_block = ct_cuda_block_size / ct_warp_size;

static inline size_t
slabs_of(const ct_factored &f)
{
    return (f.rows - 1) / slab_rows + 1;
}

struct factor_operand : ct_factored {
    double *slab_sums; /* [matrices][slabs][cols] */
    size_t slabs;
    uint32_t blocks; /* of the launch */
};

typedef ct_cuda_batch<factor_operand> factor_batch;

static inline size_t
ct_cuda_operand_chunks(const factor_operand &operand)
{
    return operand.blocks;
}

/* f(operand, block of the operand) for each of the thread block's turns. */
template <typename F>
__device__ static inline void
each_block(const factor_batch &batch, F f)
{
    for (size_t chunk = blockIdx.x; chunk < batch.n_chunks; chunk += gridDim.x) {
        const uint32_t number = ct_cuda_operand_at(batch, chunk);
        f(batch.operands[number],
          chunk - (number == 0 ? 0 : batch.chunk_end[number - 1]));
    }
}

/* The sum of squares of n elements of the list: number `first`, and each `step`
 * further. Elements of other ranks count as 0. Four are loaded before the first is
 * used. */
__device__ static inline double
sum_of_squares(const ct_factored &f, size_t first, size_t step, size_t n)
{
    const double scale = ct_clip_scaled(f.clip, f.grad_scale);
    const auto number = [&](size_t k) { return first + k * step - f.begin; };
    double sum = 0.0;
    ct_visit_float(f.grad_dtype, [&](auto tag) {
        typedef typename decltype(tag)::type element;
        const element *const grad = ct_global((const element *)f.grad);
        /* Before the local part the number is huge. */
        const auto load = [&](size_t i) {
            return i < f.n ? (double)ct_load(grad[i]) * scale : 0.0;
        };
        size_t k = 0;
        for (; k + 4 <= n; k += 4) {
            const double x[4] = {load(number(k)), load(number(k + 1)),
                                 load(number(k + 2)), load(number(k + 3))};
            CT_UNROLL
            for (int a = 0; a < 4; a++) {
                sum += x[a] * x[a];
            }
        }
        for (; k < n; k++) {
            const double x = load(number(k));
            sum += x * x;
        }
    });
    return sum;
}

CT_KERNEL
rows_kernel(const factor_batch __grid_constant__ batch)
{
    const size_t lane = threadIdx.x % ct_warp_size, warp = threadIdx.x / ct_warp_size;
    each_block(batch, [&](const factor_operand &f, size_t block) {
        const size_t row = block * rows_of_block + warp;
        if (row >= f.matrices * f.rows) {
            return; /* the whole warp */
        }
        const size_t n = (f.cols + ct_warp_size - 1 - lane) / ct_warp_size;
        double sum = sum_of_squares(f, row * f.cols + lane, ct_warp_size, n);
        sum = ct_warp_sum(CT_NORM_ONE, sum);
        if (lane == 0) {
            f.sums[row] = sum;
        }
    });
}

CT_KERNEL
columns_kernel(const factor_batch __grid_constant__ batch)
{
    each_block(batch, [&](const factor_operand &f, size_t block) {
        const size_t i = block * ct_cuda_block_size + threadIdx.x;
        const size_t slab = i / f.cols, col = i % f.cols;
        const size_t begin = slab % f.slabs * slab_rows;
        const size_t end = begin + slab_rows < f.rows ? begin + slab_rows : f.rows;
        if (i < f.matrices * f.slabs * f.cols) {
            const size_t first = (slab / f.slabs * f.rows + begin) * f.cols + col;
            f.slab_sums[i] = sum_of_squares(f, first, f.cols, end - begin);
        }
    });
}

CT_KERNEL
fold_columns_kernel(const factor_batch __grid_constant__ batch)
{
    each_block(batch, [&](const factor_operand &f, size_t block) {
        const size_t i = block * ct_cuda_block_size + threadIdx.x;
        const size_t matrix = i / f.cols, col = i % f.cols;
        double sum = 0.0;
        if (i >= f.matrices * f.cols) {
            return;
        }
        for (size_t s = 0; s < f.slabs; s++) {
            sum += f.slab_sums[(matrix * f.slabs + s) * f.cols + col];
        }
        f.sums[f.matrices * f.rows + i] = sum;
    });
}

/* A launch of the kernel for each batch of the list; items(f): how many an operand has,
 * `each` to a block. slab_sums may be NULL where the kernel has none. */
template <typename Items>
static ct_status
enqueue(void *stream, const char *what, decltype(&rows_kernel) kernel,
        const ct_factored *list, size_t n, double *slab_sums, size_t each, Items items,
        ct_error *err)
{
    return ct_cuda_in_batches<factor_operand>(
        n,
        [&](size_t i) {
            const ct_factored &f = list[i];
            const size_t slabs = slabs_of(f);
            const factor_operand operand = {f, slab_sums, slabs,
                                            (uint32_t)((items(f) - 1) / each + 1)};
            slab_sums += slab_sums == NULL ? 0 : f.matrices * slabs * f.cols;
            return operand;
        },
        [&](const factor_batch &batch) {
            CT_LAUNCH(kernel, ct_cuda_grid_size(batch.n_chunks), ct_cuda_block_size,
                      stream, batch);
            return ct_cuda_launched(what, err);
        });
}

static size_t
rows_in(const ct_factored &f)
{
    return f.matrices * f.rows;
}

static size_t
columns_in(const ct_factored &f)
{
    return f.matrices * f.cols;
}

static size_t
slab_columns_in(const ct_factored &f)
{
    return columns_in(f) * slabs_of(f);
}

/* Of a list with room for all its slabs' sums. */
static ct_status
enqueue_sums(void *stream, const ct_factored *list, size_t n, double *slabs,
             ct_error *err)
{
    ct_status status = enqueue(stream, "launch factor_sums, rows", rows_kernel, list, n,
                               NULL, rows_of_block, rows_in, err);
    if (status == CT_OK) {
        status = enqueue(stream, "launch factor_sums, columns", columns_kernel, list, n,
                         slabs, ct_cuda_block_size, slab_columns_in, err);
    }
    return status == CT_OK ? enqueue(stream, "launch factor_sums, columns' slabs",
                                     fold_columns_kernel, list, n, slabs,
                                     ct_cuda_block_size, columns_in, err)
                           : status;
}

/* How many of the n next fit in most_slab_sums, the first in any case. */
static size_t
group_at(const ct_factored *list, size_t n, size_t *sums)
{
    size_t count = 1;
    *sums = slab_columns_in(*list);
    while (count < n && *sums + slab_columns_in(list[count]) <= most_slab_sums) {
        *sums += slab_columns_in(list[count++]);
    }
    return count;
}

ct_status
ct_cuda_factor_sums(void *stream, ct_scratch *scratch, const ct_factored *list,
                    size_t n, ct_error *err)
{
    size_t most = 0, sums;
    ct_status status = ct_factor_check(list, n, err);
    for (size_t i = 0; status == CT_OK && i < n;) {
        i += group_at(list + i, n - i, &sums);
        most = sums > most ? sums : most;
    }
    if (status == CT_OK && n != 0) {
        status = ct_cuda_scratch_grow(scratch, most * sizeof(double), err);
    }
    for (size_t i = 0, count; status == CT_OK && i < n; i += count) {
        count = group_at(list + i, n - i, &sums);
        status = enqueue_sums(stream, list + i, count, (double *)scratch->data, err);
    }
    return status;
}

/* ---- averages and factors -------------------------------------------------------- */

__device__ static inline double
get(ct_dtype dtype, const void *data, size_t i)
{
    return dtype == CT_F64 ? ((const double *)data)[i]
                           : (double)((const float *)data)[i];
}

__device__ static inline void
put(ct_dtype dtype, void *data, size_t i, double value)
{
    if (dtype == CT_F64) {
        ((double *)data)[i] = value;
    }
    else {
        ((float *)data)[i] = (float)value;
    }
}

__device__ static inline void
blend(const ct_factored &f, void *average, size_t i, double mean)
{
    const double old = get(f.state_dtype, average, i);
    put(f.state_dtype, average, i, old * f.decay + (1.0 - f.decay) * (mean + f.eps));
}

CT_KERNEL
finish_columns_kernel(const factor_batch __grid_constant__ batch)
{
    each_block(batch, [&](const factor_operand &f, size_t block) {
        const size_t i = block * ct_cuda_block_size + threadIdx.x;
        if (i >= f.matrices * f.cols || ct_clip_skips(f.clip)) {
            return;
        }
        blend(f, f.col, i, f.sums[f.matrices * f.rows + i] / (double)f.rows);
        put(f.real, f.col_factor, i, 1.0 / sqrt(get(f.state_dtype, f.col, i)));
    });
}

CT_KERNEL
finish_rows_kernel(const factor_batch __grid_constant__ batch)
{
    __shared__ double mean;
    each_block(batch, [&](const factor_operand &f, size_t matrix) {
        const size_t first = matrix * f.rows;
        double sum = 0.0;
        if (ct_clip_skips(f.clip)) {
            return; /* the whole block */
        }
        for (size_t i = threadIdx.x; i < f.rows; i += blockDim.x) {
            blend(f, f.row, first + i, f.sums[first + i] / (double)f.cols);
            sum += get(f.state_dtype, f.row, first + i);
        }
        sum = ct_block_sum(CT_NORM_ONE, sum);
        if (threadIdx.x == 0) {
            mean = sum / (double)f.rows;
        }
        __syncthreads();
        for (size_t i = threadIdx.x; i < f.rows; i += blockDim.x) {
            const double average = get(f.state_dtype, f.row, first + i);
            put(f.real, f.row_factor, first + i, 1.0 / sqrt(average / mean));
        }
        __syncthreads(); /* mean is free for the next matrix */
    });
}

ct_status
ct_cuda_factor(void *stream, const ct_factored *list, size_t n, ct_error *err)
{
    ct_status status = ct_factor_check(list, n, err);
    if (status == CT_OK) {
        status = enqueue(stream, "launch factor, columns", finish_columns_kernel, list,
                         n, NULL, ct_cuda_block_size, columns_in, err);
    }
    return status == CT_OK
               ? enqueue(
                     stream, "launch factor, rows", finish_rows_kernel, list, n, NULL,
                     1, [](const ct_factored &f) { return f.matrices; }, err)
               : status;
}
