/* The update on the CPU, a tile of a span at a time. Mirrors cuda/update.cu.
 *
 * Rules are compiled for float and double, and for bfloat16 in every array, to keep up
 * with memory. */
#include "cpu/average.h"
#include "cpu/partition.h"
#include "cpu/dither.h"
#include "cpu/kernels.h"
#include "cpu/update_tile.h"

#include "core/base/pool.h"

#include <string.h>

#define CT_NO_F16
#define CT_BODY "cpu/body/update.h"
#include "cpu/expand.h"

typedef void rule_body(const ct_rule_coef *coef, const ct_operands *at, size_t n);

static rule_body *const rules[CT_RULE_COUNT][CT_ISA_COUNT][CT_BF16 + 1] = {
#define CT_RULE(rule, constants, n_states)                                             \
    [CT_RULE_##rule] = CT_BODIES_NO_F16(update_##rule),
#include "math/rules.def"
#undef CT_RULE
};

/* ---- a tile ---------------------------------------------------------------------- */

static void
put(const ct_update_tile *s, const ct_tile *tile, void *data, ct_dtype dtype)
{
    const ct_rounding *rounding = s->span->rounding;
    if (rounding != NULL && dtype == CT_BF16) {
        ct_dither(s->isa, s->real, tile, (uint16_t *)data + s->at, rounding,
                  s->span->first + s->at, s->n);
    }
    else {
        ct_tile_store(s->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* Averages the model's weights as stored: the copy, or without a copy the parameter. */
static void
average(const ct_update_tile *s, double decay)
{
    const ct_update_span *span = s->span;
    const bool copied = span->copy != NULL;
    ct_average_elements(s->isa, s->real, span->ema, span->ema_dtype,
                        copied ? span->copy : span->param,
                        copied ? span->copy_dtype : span->dtype, s->at, s->n, decay);
}

static void
copy(const ct_update_tile *s, const void *param)
{
    const ct_update_span *span = s->span;
    ct_tile tile;
    if (span->copy_dtype == s->real) {
        memcpy(ct_update_tile_element(s, span->copy, s->real), param,
               s->n * ct_dtype_size(s->real));
        return;
    }
    memcpy(&tile, param, s->n * ct_dtype_size(s->real));
    put(s, &tile, span->copy, span->copy_dtype);
}

static void
update_tile(const ct_update *update, const ct_update_tile *s)
{
    const ct_update_span *span = s->span;
    ct_operand_tiles tiles;
    const ct_operands at = ct_update_tile_operands(s, &tiles);
    const ct_rule_coef *coef =
        span->settled != NULL ? span->settled : &update->coefs[span->coef];
    rules[update->rule][s->isa][s->real](coef, &at, s->n);
    ct_update_tile_write_states(s, &at);
    if (span->dtype != s->real) {
        put(s, at.param, span->param, span->dtype);
    }
    if (span->copy != NULL) {
        copy(s, at.param);
    }
    if (span->ema != NULL) {
        average(s, update->ema_decay);
    }
    if (update->zero_grads) {
        memset(ct_update_tile_element(s, span->grad, span->grad_dtype), 0,
               s->n * ct_dtype_size(span->grad_dtype));
    }
}

/* What the rule is handed: F32, F64, or BF16 throughout. */
static ct_dtype
choose_type(const ct_update_span *span, size_t n_states)
{
    const bool alike = span->grad_dtype == span->dtype &&
                       (n_states == 0 || span->state_dtype == span->dtype);
    const bool alone = span->copy == NULL && span->ema == NULL &&
                       span->rounding == NULL && span->row == NULL;
    return span->dtype == CT_BF16 && alike && alone ? CT_BF16 : ct_update_real(span);
}

typedef struct update_job {
    const ct_update *update;
    ct_isa isa;
    size_t n_states;
    const ct_partition *partition;
    ct_quant_searches searches; /* for the maps of the first quantized state */
} update_job;

_Static_assert(CT_PARTITION_ALIGN % CT_QUANT_BLOCK == 0, "no block is in two batches");

static bool
is_quantized(const update_job *job, const ct_update_span *span)
{
    return job->n_states != 0 && span->state_dtype == CT_U8;
}

/* The shared tables or, for a span with other maps, `own`. */
static const ct_quant_searches *
searches_for(const update_job *job, const ct_update_span *span, ct_quant_searches *own)
{
    if (!is_quantized(job, span)) {
        return NULL;
    }
    if (ct_quant_fits(&job->searches, span, job->n_states)) {
        return &job->searches;
    }
    ct_quant_prepare(own, span, job->n_states);
    return own;
}

static void
prepare_searches(update_job *job)
{
    const ct_update *update = job->update;
    ct_quant_searches_init(&job->searches);
    size_t i = 0;
    while (i < update->n_spans &&
           !(is_quantized(job, &update->spans[i]) && update->spans[i].n != 0)) {
        i++;
    }
    if (i < update->n_spans) {
        ct_quant_prepare(&job->searches, &update->spans[i], job->n_states);
    }
}

static void
run_batch(void *arg, size_t batch)
{
    const update_job *job = arg;
    ct_piece piece = ct_partition_start(job->partition, batch);
    ct_quant_searches own;
    ct_quant_searches_init(&own);
    while (ct_partition_next(job->partition, batch, &piece)) {
        const ct_update_span *span = &job->update->spans[piece.span];
        const ct_dtype real = choose_type(span, job->n_states);
        const size_t length =
            ct_update_tile_length(span, real, job->n_states, job->update->zero_grads);
        const ct_quant_searches *searches = searches_for(job, span, &own);
        for (size_t done = 0; done < piece.n; done += length) {
            const size_t left = piece.n - done;
            const ct_update_tile s = {
                .span = span,
                .at = piece.offset + done,
                .n = left < length ? left : length,
                .n_states = job->n_states,
                .real = real,
                .isa = job->isa,
                .searches = searches,
            };
            update_tile(job->update, &s);
        }
    }
}

ct_status
ct_cpu_update(void *stream, const ct_update *update, ct_error *err)
{
    (void)stream; /* the CPU is done when the call returns */
    ct_partition partition;
    update_job job;
    job.update = update;
    job.partition = &partition;
    ct_status status = ct_isa_get(&job.isa, err);
    if (status == CT_OK) {
        status = ct_update_check(update, err);
    }
    if (status != CT_OK || update->n_spans == 0) {
        return status;
    }
    job.n_states = ct_rule_n_states(update->rule);
    prepare_searches(&job);
    ct_partition_init(&partition, &update->spans[0].n, sizeof update->spans[0],
                      update->n_spans);
    ct_pool_run(run_batch, &job, partition.n_batches);
    return CT_OK;
}
