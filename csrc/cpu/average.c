/* Exponential moving averages on the CPU. Mirrors cuda/average.cu. */
#include "cpu/average.h"
#include "cpu/partition.h"
#include "cpu/kernels.h"
#include "cpu/tile.h"

#include "math/ema.h"

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/average.h"
#include "cpu/expand.h"

typedef void average_body(void *average, const void *value, double decay, size_t n);

static average_body *const bodies[CT_ISA_COUNT][CT_F64 + 1] = CT_REAL_BODIES(average);

void
ct_average_elements(ct_isa isa, ct_dtype real, void *average, ct_dtype average_dtype,
                    const void *value, ct_dtype value_dtype, size_t at, size_t n,
                    double decay)
{
    const bool wide = real == CT_F64;
    ct_tile a, x;
    void *to = &a;
    const void *from = &x;
    if (average_dtype == real) {
        to = (char *)average + at * ct_dtype_size(real);
    }
    else {
        ct_tile_load(isa, &a, wide, average_dtype, average, at, n);
    }
    if (value_dtype == real) {
        from = (const char *)value + at * ct_dtype_size(real);
    }
    else {
        ct_tile_load(isa, &x, wide, value_dtype, value, at, n);
    }
    bodies[isa][real](to, from, decay, n);
    if (average_dtype != real) {
        ct_tile_store(isa, &a, wide, average_dtype, average, at, n);
    }
}

typedef struct average_job {
    const ct_span *averages, *values;
    double decay;
    ct_isa isa;
} average_job;

static void
average_piece(const void *arg, const ct_piece *piece)
{
    const average_job *job = arg;
    const ct_span *average = &job->averages[piece->span];
    const ct_span *value = &job->values[piece->span];
    const ct_dtype real = value->dtype == CT_F64 ? CT_F64 : CT_F32;
    for (size_t done = 0; done < piece->n; done += CT_TILE) {
        const size_t left = piece->n - done;
        ct_average_elements(job->isa, real, average->data, average->dtype, value->data,
                            value->dtype, piece->offset + done,
                            left < CT_TILE ? left : CT_TILE, job->decay);
    }
}

ct_status
ct_cpu_average(void *stream, const ct_span *averages, const ct_span *values,
               size_t n_spans, double decay, ct_error *err)
{
    (void)stream;
    if (n_spans == 0) {
        return CT_OK;
    }
    average_job job = {.averages = averages, .values = values, .decay = decay};
    ct_status status = ct_isa_get(&job.isa, err);
    if (status == CT_OK) {
        status = ct_check_pairs("average", averages, values, n_spans, err);
    }
    if (status == CT_OK) {
        ct_for_pieces(&values[0].n, sizeof values[0], n_spans, average_piece, &job);
    }
    return status;
}
