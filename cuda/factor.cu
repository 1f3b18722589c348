/* Factored second moments on a CUDA device. Mirrors csrc/cpu/factor.c.
 *
 * Three kernels add: a warp a row, a thread a column of a slab of rows, a thread the
 * slabs of a column. The gradient is read twice, along the rows both times. Of two that
 * finish, a thread does a column, a block the rows of a matrix. */
#include "element.cuh"
#include "kernels.h"
#include "reduce.cuh"

static const size_t slab_rows = 128;
static const size_t rows_of_block = ct_cuda_block_size / ct_warp_size;

static inline size_t
slabs_of(const ct_factored &f)
{
    return (f.rows - 1) / slab_rows + 1;
}

__device__ static inline double
grad_scale_of(const ct_factored &f)
{
    return f.clip == NULL ? f.grad_scale : f.grad_scale * f.clip->coef;
}

/* Of element i of the list, times `scale`; 0 if not local. */
__device__ static inline double
square(const ct_factored &f, double scale, size_t i)
{
    double x = 0.0;
    if (i < f.begin || i - f.begin >= f.n) {
        return x;
    }
    ct_visit_float(f.grad_dtype, [&](auto tag) {
        typedef typename decltype(tag)::type element;
        x = (double)ct_load(((const element *)f.grad)[i - f.begin]) * scale;
    });
    return x * x;
}

CT_KERNEL
rows_kernel(const ct_factored __grid_constant__ f)
{
    const size_t lane = threadIdx.x % ct_warp_size, warp = threadIdx.x / ct_warp_size;
    const size_t n = f.matrices * f.rows, step = gridDim.x * rows_of_block;
    const double scale = grad_scale_of(f);
    for (size_t row = blockIdx.x * rows_of_block + warp; row < n; row += step) {
        double sum = 0.0;
        for (size_t j = lane; j < f.cols; j += ct_warp_size) {
            sum += square(f, scale, row * f.cols + j);
        }
        sum = ct_warp_sum(CT_NORM_ONE, sum);
        if (lane == 0) {
            f.sums[row] = sum;
        }
    }
}

CT_KERNEL
columns_kernel(const ct_factored __grid_constant__ f, size_t slabs, double *sums)
{
    const size_t n = f.matrices * slabs * f.cols;
    const double scale = grad_scale_of(f);
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const size_t slab = i / f.cols, col = i % f.cols;
        const size_t begin = slab % slabs * slab_rows;
        const size_t end = begin + slab_rows < f.rows ? begin + slab_rows : f.rows;
        double sum = 0.0;
        for (size_t row = begin; row < end; row++) {
            sum += square(f, scale, (slab / slabs * f.rows + row) * f.cols + col);
        }
        sums[i] = sum;
    }
}

CT_KERNEL
fold_columns_kernel(const ct_factored __grid_constant__ f, size_t slabs,
                    const double *sums)
{
    const size_t n = f.matrices * f.cols, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const size_t matrix = i / f.cols, col = i % f.cols;
        double sum = 0.0;
        for (size_t s = 0; s < slabs; s++) {
            sum += sums[(matrix * slabs + s) * f.cols + col];
        }
        f.sums[f.matrices * f.rows + i] = sum;
    }
}

/* Blocks for n items, `each` to a block. */
static unsigned
blocks(size_t n, size_t each)
{
    const size_t wanted = (n - 1) / each + 1;
    return wanted < ct_cuda_max_grid ? (unsigned)wanted : ct_cuda_max_grid;
}

static ct_status
enqueue_sums(void *stream, const ct_factored &f, double *sums, ct_error *err)
{
    const size_t slabs = slabs_of(f);
    CT_LAUNCH(rows_kernel, blocks(f.matrices * f.rows, rows_of_block),
              ct_cuda_block_size, stream, f);
    ct_status status = ct_cuda_launched("launch factor_sums, rows", err);
    if (status == CT_OK) {
        CT_LAUNCH(columns_kernel,
                  blocks(f.matrices * slabs * f.cols, ct_cuda_block_size),
                  ct_cuda_block_size, stream, f, slabs, sums);
        status = ct_cuda_launched("launch factor_sums, columns", err);
    }
    if (status == CT_OK) {
        CT_LAUNCH(fold_columns_kernel, blocks(f.matrices * f.cols, ct_cuda_block_size),
                  ct_cuda_block_size, stream, f, slabs, sums);
        status = ct_cuda_launched("launch factor_sums, columns' slabs", err);
    }
    return status;
}

ct_status
ct_cuda_factor_sums(void *stream, ct_scratch *scratch, const ct_factored *list,
                    size_t n, ct_error *err)
{
    size_t most = 0;
    ct_status status = ct_factor_check(list, n, err);
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        const size_t sums = list[i].matrices * slabs_of(list[i]) * list[i].cols;
        most = sums > most ? sums : most;
    }
    if (status == CT_OK && n != 0) {
        status = ct_cuda_scratch_grow(scratch, most * sizeof(double), err);
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        status = enqueue_sums(stream, list[i], (double *)scratch->data, err);
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

__device__ static inline bool
is_skipped(const ct_factored &f)
{
    return f.clip != NULL && f.clip->skip;
}

CT_KERNEL
finish_columns_kernel(const ct_factored __grid_constant__ f)
{
    const size_t n = f.matrices * f.cols, step = (size_t)gridDim.x * blockDim.x;
    const double *sums = f.sums + f.matrices * f.rows;
    if (is_skipped(f)) {
        return;
    }
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        blend(f, f.col, i, sums[i] / (double)f.rows);
        put(f.real, f.col_factor, i, 1.0 / sqrt(get(f.state_dtype, f.col, i)));
    }
}

CT_KERNEL
finish_rows_kernel(const ct_factored __grid_constant__ f)
{
    __shared__ double mean;
    if (is_skipped(f)) {
        return;
    }
    for (size_t matrix = blockIdx.x; matrix < f.matrices; matrix += gridDim.x) {
        const size_t first = matrix * f.rows;
        double sum = 0.0;
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
    }
}

static ct_status
enqueue(void *stream, const ct_factored &f, ct_error *err)
{
    CT_LAUNCH(finish_columns_kernel, blocks(f.matrices * f.cols, ct_cuda_block_size),
              ct_cuda_block_size, stream, f);
    ct_status status = ct_cuda_launched("launch factor, columns", err);
    if (status == CT_OK) {
        CT_LAUNCH(finish_rows_kernel, blocks(f.matrices, 1), ct_cuda_block_size, stream,
                  f);
        status = ct_cuda_launched("launch factor, rows", err);
    }
    return status;
}

ct_status
ct_cuda_factor(void *stream, const ct_factored *list, size_t n, ct_error *err)
{
    ct_status status = ct_factor_check(list, n, err);
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        status = enqueue(stream, list[i], err);
    }
    return status;
}
