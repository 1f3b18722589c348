/* The first two parts of an update by a measured rule on the CPU. Mirrors
 * cuda/measure.cu.
 *
 * Element k of a piece is added to lane k % LANES, the lanes of a piece are folded in
 * index order, then the pieces of a span are: neither the instruction set nor the
 * number of threads changes a bit. */
#include "cpu/partition.h"
#include "cpu/kernels.h"
#include "cpu/update_tile.h"

#include "core/base/pool.h"

enum {
    LANES = 32
};

/* A constant number of elements lets the compiler unroll the loops. */
#if defined(__GNUC__)
#define CT_ALWAYS_INLINE __attribute__((always_inline)) inline
#else
#define CT_ALWAYS_INLINE inline
#endif

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/measure.h"
#include "cpu/expand.h"

typedef void
measure_body(const ct_rule_coef *coef, const ct_operands *at, size_t n, double *lanes);

static measure_body *const rules[CT_RULE_COUNT][CT_ISA_COUNT][CT_F64 + 1] = {
#define CT_MEASURED(rule, constants, n_states)                                         \
    [CT_RULE_##rule] = CT_REAL_BODIES(measure_##rule),
#include "math/measured.def"
#undef CT_MEASURED
};

typedef struct measure_job {
    const ct_update *update;
    ct_isa isa;
    size_t n_states;
    const ct_partition *partition;
    double *partial; /* CT_MEASURES for each piece */
} measure_job;

static void
measure_tile(const measure_job *job, const ct_update_tile *s, double *lanes)
{
    const ct_update *update = job->update;
    ct_operand_tiles tiles;
    const ct_operands at = ct_update_tile_operands(s, &tiles);
    rules[update->rule][s->isa][s->real](&update->coefs[s->span->coef], &at, s->n,
                                         lanes);
    ct_update_tile_write_states(s, &at);
}

static void
measure_piece(const measure_job *job, const ct_piece *piece, double *sums)
{
    const ct_update_span *span = &job->update->spans[piece->span];
    const ct_dtype real = ct_update_real(span);
    const size_t length = ct_update_tile_length(span, real, job->n_states, false);
    double lanes[CT_MEASURES * LANES] = {0.0};
    for (size_t done = 0; done < piece->n; done += length) {
        const size_t left = piece->n - done;
        const ct_update_tile s = {
            .span = span,
            .at = piece->offset + done,
            .n = left < length ? left : length,
            .n_states = job->n_states,
            .real = real,
            .isa = job->isa,
        };
        measure_tile(job, &s, lanes);
    }
    for (size_t m = 0; m < CT_MEASURES; m++) {
        sums[m] = 0.0;
        for (size_t k = 0; k < LANES; k++) {
            sums[m] += lanes[m * LANES + k];
        }
    }
}

static void
run_batch(void *arg, size_t batch)
{
    const measure_job *job = arg;
    ct_piece piece = ct_partition_start(job->partition, batch);
    while (ct_partition_next(job->partition, batch, &piece)) {
        measure_piece(job, &piece,
                      job->partial + CT_MEASURES * ct_partition_number(batch, &piece));
    }
}

ct_status
ct_cpu_measure(void *stream, ct_scratch *scratch, const ct_update *update, double *sums,
               ct_error *err)
{
    (void)stream;
    ct_partition partition;
    measure_job job = {.update = update, .partition = &partition};
    ct_status status = ct_isa_get(&job.isa, err);
    if (status == CT_OK) {
        status = ct_measure_check(update, err);
    }
    if (status != CT_OK || update->n_spans == 0) {
        return status;
    }
    job.n_states = ct_rule_n_states(update->rule);
    ct_partition_init(&partition, &update->spans[0].n, sizeof update->spans[0],
                      update->n_spans);
    const size_t n_partial = CT_MEASURES * (update->n_spans + partition.n_batches);
    status = ct_cpu_scratch_grow(scratch, n_partial * sizeof(double), err);
    if (status == CT_OK) {
        job.partial = scratch->data;
        ct_pool_run(run_batch, &job, partition.n_batches);
        ct_partition_fold(&partition, job.partial, CT_MEASURES, update->n_spans, sums);
    }
    return status;
}

/* The sums of an empty parameter are 0; the settled constants are never used. */
ct_status
ct_cpu_settle(void *stream, const ct_update *update, const double *sums,
              ct_rule_coef *settled, ct_error *err)
{
    (void)stream;
    ct_status status = ct_measure_check(update, err);
    for (size_t i = 0; status == CT_OK && i < update->n_spans; i++) {
        const ct_update_span *span = &update->spans[i];
        settled[i] = update->coefs[span->coef];
        ct_rule_settle(update->rule, &settled[i], sums + CT_MEASURES * i,
                       ct_update_whole(span));
    }
    return status;
}
