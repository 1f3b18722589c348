/* Cross entropy of rows of logits on the CPU. Mirrors cuda/cross_entropy.cu.
 *
 * A row is read three times from the cache: for the largest logit, for the sum of
 * exponentials, and for the gradient. Sums have lanes, folded in order, and no row has
 * two threads: neither the vector length nor the number of threads changes a bit. */

#include "cpu/kernels.h"

#include "core/base/pool.h"
#include "math/softmax.h"

enum {
    LANES = 32
};

#define CT_BODY "cpu/body/cross_entropy.h"
#include "cpu/expand.h"

typedef void row_body(const ct_cross_entropy *work, size_t row);

static row_body *const bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(cross_entropy);

typedef struct rows_job {
    const ct_cross_entropy *work;
    row_body *body;
    size_t group; /* rows of a batch */
} rows_job;

static void
run_rows(void *arg, size_t batch)
{
    const rows_job *job = arg;
    const size_t first = batch * job->group, left = job->work->rows - first;
    const size_t end = first + (left < job->group ? left : job->group);
    for (size_t row = first; row < end; row++) {
        job->body(job->work, row);
    }
}

/* All targets, before a logit is overwritten. */
static ct_status
check_targets(const ct_cross_entropy *work, ct_error *err)
{
    for (size_t row = 0; row < work->rows; row++) {
        const int64_t target = work->targets[row];
        if (target < 0 || (uint64_t)target >= work->classes) {
            return ct_fail(err, CT_EINVAL,
                           "cross_entropy: the target of row %zu is %lld; expected a "
                           "class in [0, %zu)",
                           row, (long long)target, work->classes);
        }
    }
    return CT_OK;
}

ct_status
ct_cpu_cross_entropy(void *stream, const ct_cross_entropy *work, ct_error *err)
{
    (void)stream;
    ct_isa isa;
    ct_status status = ct_isa_get(&isa, err);
    if (status == CT_OK) {
        status = ct_check_float("cross_entropy", 0, work->dtype, err);
    }
    if (status == CT_OK) {
        status = check_targets(work, err);
    }
    if (status == CT_OK && work->rows != 0) {
        const size_t group = CT_BATCH_ELEMS / work->classes + 1;
        rows_job job = {work, bodies[isa][work->dtype], group};
        ct_pool_run(run_rows, &job, (work->rows - 1) / group + 1);
    }
    return status;
}
