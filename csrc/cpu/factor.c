/* Factored second moments on the CPU. Mirrors cuda/factor.cu.
 *
 * A matrix is cut into slabs of rows. Each slab writes sums of its rows and columns;
 * the sums are folded in order after all slabs.
 *
 * Slabs have a fixed length for a shape: the order of adding, and so every bit of the
 * sums, is the same for any number of threads. */

#include "cpu/kernels.h"

#include "core/base/pool.h"

#include <math.h>
#include <string.h>

enum {
    LANES = 16,
    SLAB_ELEMS = 65536,
    MOST_SLABS = 32 /* of a matrix: each needs a row of sums */
};

#define CT_BODY "cpu/body/factor.h"
#include "cpu/expand.h"

typedef double
row_body(const void *data, size_t from, size_t n, double scale, double *columns);

static row_body *const bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(add_row);

typedef struct factor_job {
    const ct_factored *f;
    ct_isa isa;
    size_t slab_rows, slabs; /* of each matrix */
    size_t group;            /* slabs, or matrices, that a batch takes */
    double *columns;         /* sums [matrix][slab][col] */
} factor_job;

static size_t
least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- sums: slabs of rows, then the columns of matrices --------------------------- */

/* The local part of row number `row` of the list. A rank's part of a gradient may begin
 * and end within a row; rows outside sum to 0, and the ranks' sums are added later. */
static double
sum_row(const factor_job *job, size_t row, double *columns)
{
    const ct_factored *f = job->f;
    const size_t first = row * f->cols, end = f->begin + f->n;
    const size_t low = first > f->begin ? first : f->begin;
    const size_t high = least(first + f->cols, end);
    const double scale = ct_clip_scaled(f->clip, f->grad_scale);
    return low < high
               ? bodies[job->isa][f->grad_dtype](f->grad, low - f->begin, high - low,
                                                 scale, columns + (low - first))
               : 0.0;
}

static void
run_slab(const factor_job *job, size_t slab)
{
    const ct_factored *f = job->f;
    const size_t matrix = slab / job->slabs;
    const size_t begin = slab % job->slabs * job->slab_rows;
    const size_t end = least(begin + job->slab_rows, f->rows);
    /* Each slab adds to a row of sums of its own: threads share no memory. */
    double *columns = job->columns + slab * f->cols;
    memset(columns, 0, f->cols * sizeof *columns);
    for (size_t i = begin; i < end; i++) {
        const size_t row = matrix * f->rows + i;
        f->sums[row] = sum_row(job, row, columns);
    }
}

static void
run_slabs(void *arg, size_t batch)
{
    const factor_job *job = arg;
    const size_t end = least((batch + 1) * job->group, job->f->matrices * job->slabs);
    for (size_t slab = batch * job->group; slab < end; slab++) {
        run_slab(job, slab);
    }
}

/* In the order of the slabs, whatever thread summed a slab first. */
static void
fold_columns(void *arg, size_t batch)
{
    const factor_job *job = arg;
    const ct_factored *f = job->f;
    const size_t end = least((batch + 1) * job->group, f->matrices);
    for (size_t matrix = batch * job->group; matrix < end; matrix++) {
        double *sums = f->sums + f->matrices * f->rows + matrix * f->cols;
        const double *slab = job->columns + matrix * job->slabs * f->cols;
        memcpy(sums, slab, f->cols * sizeof *sums);
        for (size_t s = 1; s < job->slabs; s++) {
            slab += f->cols;
            for (size_t j = 0; j < f->cols; j++) {
                sums[j] += slab[j];
            }
        }
    }
}

static size_t
batches(const factor_job *job, size_t n)
{
    return (n - 1) / job->group + 1;
}

/* At least SLAB_ELEMS to a slab, for the cost of a batch, and at most MOST_SLABS of a
 * matrix, for the memory. Short slabs are grouped, so that a batch is worth
 * claiming. */
static size_t
plan_slabs(factor_job *job)
{
    const ct_factored *f = job->f;
    const size_t whole = SLAB_ELEMS / f->cols + 1;
    const size_t share = (f->rows - 1) / MOST_SLABS + 1;
    job->slab_rows = least(whole > share ? whole : share, f->rows);
    job->slabs = (f->rows - 1) / job->slab_rows + 1;
    job->group = SLAB_ELEMS / (job->slab_rows * f->cols) + 1;
    return f->matrices * job->slabs * f->cols * sizeof(double);
}

/* One matrix list after another: the scratch memory is used again. */
static ct_status
sum_one(ct_scratch *scratch, factor_job *job, ct_error *err)
{
    ct_status status = ct_cpu_scratch_grow(scratch, plan_slabs(job), err);
    if (status == CT_OK) {
        job->columns = scratch->data;
        ct_pool_run(run_slabs, job, batches(job, job->f->matrices * job->slabs));
        ct_pool_run(fold_columns, job, batches(job, job->f->matrices));
    }
    return status;
}

ct_status
ct_cpu_factor_sums(void *stream, ct_scratch *scratch, const ct_factored *list, size_t n,
                   ct_error *err)
{
    (void)stream;
    factor_job job;
    ct_status status = ct_isa_get(&job.isa, err);
    if (status == CT_OK) {
        status = ct_factor_check(list, n, err);
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        job.f = &list[i];
        status = sum_one(scratch, &job, err);
    }
    return status;
}

/* ---- averages and factors -------------------------------------------------------- */

static double
get(ct_dtype dtype, const void *data, size_t i)
{
    return dtype == CT_F64 ? ((const double *)data)[i]
                           : (double)((const float *)data)[i];
}

static void
put(ct_dtype dtype, void *data, size_t i, double value)
{
    if (dtype == CT_F64) {
        ((double *)data)[i] = value;
    }
    else {
        ((float *)data)[i] = (float)value;
    }
}

/* eps is added to the squares, and so to their mean, rather than to the average:
 * Shazeer and Stern, "Adafactor", 2018, algorithm 4. */
static void
blend(const ct_factored *f, void *average, size_t i, double mean)
{
    const double old = get(f->state_dtype, average, i);
    put(f->state_dtype, average, i,
        old * f->decay + (1.0 - f->decay) * (mean + f->eps));
}

static void
finish_columns(const ct_factored *f, size_t matrix)
{
    const double *sums = f->sums + f->matrices * f->rows;
    for (size_t j = 0; j < f->cols; j++) {
        const size_t col = matrix * f->cols + j;
        blend(f, f->col, col, sums[col] / (double)f->rows);
        put(f->real, f->col_factor, col, 1.0 / sqrt(get(f->state_dtype, f->col, col)));
    }
}

static void
finish_rows(const ct_factored *f, size_t matrix)
{
    const size_t first = matrix * f->rows, end = first + f->rows;
    double sum = 0.0;
    for (size_t row = first; row < end; row++) {
        blend(f, f->row, row, f->sums[row] / (double)f->cols);
        sum += get(f->state_dtype, f->row, row);
    }
    /* The mean of the new averages, not of this step's sums: the estimate divides by
     * the sum of the row averages (algorithm 4). */
    const double mean = sum / (double)f->rows;
    for (size_t row = first; row < end; row++) {
        const double average = get(f->state_dtype, f->row, row);
        put(f->real, f->row_factor, row, 1.0 / sqrt(average / mean));
    }
}

static void
finish(void *arg, size_t i)
{
    const ct_factored *f = (const ct_factored *)arg + i;
    if (ct_clip_skips(f->clip)) {
        return;
    }
    for (size_t matrix = 0; matrix < f->matrices; matrix++) {
        finish_columns(f, matrix);
        finish_rows(f, matrix);
    }
}

ct_status
ct_cpu_factor(void *stream, const ct_factored *list, size_t n, ct_error *err)
{
    (void)stream;
    ct_status status = ct_factor_check(list, n, err);
    if (status == CT_OK && n != 0) {
        ct_pool_run(finish, (void *)list, n);
    }
    return status;
}
