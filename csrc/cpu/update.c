/* The update on the CPU. Mirrors cuda/update.cu.
 *
 * A piece of a span is worked on a few elements at a time. Arrays of the type that the
 * rule computes in are handed to it where they are; others pass through tiles in the
 * first-level cache, so that a rule need not be compiled for every mixture of dtypes.
 * It is for bfloat16 throughout, which then keeps up with memory. */
#include "cpu/average.h"
#include "cpu/cuts.h"
#include "cpu/dither.h"
#include "cpu/kernels.h"
#include "cpu/tile.h"

#include "core/ct_pool.h"

#include <string.h>

/* Elements to work on, of the type that the rule computes in. */
typedef struct operands {
    void *grad, *param;
    void *state[CT_RULE_MAX_STATES];
} operands;

#define CT_NO_F16
#define CT_BODY "cpu/update_body.h"
#include "cpu/expand.h"

typedef void rule_body(const ct_rule_coef *coef, const operands *at, size_t n);

static rule_body *const rules[CT_RULE_COUNT][CT_ISA_COUNT][CT_BF16 + 1] = {
#define CT_RULE(rule, constants, n_states)                                             \
    [CT_RULE_##rule] = CT_BODIES_NO_F16(update_##rule),
#include "math/ct_rules.def"
#undef CT_RULE
};

enum {
    DIRECT = 4096 /* elements at a time where nothing has to be converted */
};

typedef struct update_job {
    const ct_update *update;
    ct_isa isa;
    size_t n_states;
    const ct_cuts *cuts;
} update_job;

/* n elements from `at` on of one span. */
typedef struct stretch {
    const update_job *job;
    const ct_update_span *span;
    size_t at, n;
    ct_dtype real; /* what the rule is handed: F32, F64, or BF16 throughout */
} stretch;

/* ---- one array of a stretch -------------------------------------------------------
 */

static void *
element(void *data, ct_dtype dtype, size_t at)
{
    return (char *)data + at * ct_dtype_size(dtype);
}

/* The elements as the rule wants them: where they are, or in the tile. */
static void *
borrow(const stretch *s, void *data, ct_dtype dtype, ct_tile *tile)
{
    if (dtype == s->real) {
        return element(data, dtype, s->at);
    }
    ct_tile_load(s->job->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    return tile;
}

static void
put(const stretch *s, const ct_tile *tile, void *data, ct_dtype dtype)
{
    const ct_rounding *rounding = s->span->rounding;
    if (rounding != NULL && dtype == CT_BF16) {
        ct_dither(s->job->isa, s->real, tile, (uint16_t *)data + s->at, rounding,
                  s->span->first + s->at, s->n);
    }
    else {
        ct_tile_store(s->job->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* Writes back what borrow() gave and the rule has changed. */
static void
give_back(const stretch *s, const void *from, void *data, ct_dtype dtype)
{
    if (dtype != s->real) {
        ct_tile_store(s->job->isa, from, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* ---- a stretch --------------------------------------------------------------------
 */

/* Of what the model computes with, as it is stored. */
static void
average(const stretch *s)
{
    const ct_update_span *span = s->span;
    const bool copied = span->copy != NULL;
    ct_average_elements(s->job->isa, s->real, span->ema, span->ema_dtype,
                        copied ? span->copy : span->param,
                        copied ? span->copy_dtype : span->dtype, s->at, s->n,
                        s->job->update->ema_decay);
}

static void
copy(const stretch *s, const void *param)
{
    const ct_update_span *span = s->span;
    ct_tile tile;
    if (span->copy_dtype == s->real) {
        memcpy(element(span->copy, s->real, s->at), param,
               s->n * ct_dtype_size(s->real));
        return;
    }
    memcpy(&tile, param, s->n * ct_dtype_size(s->real));
    put(s, &tile, span->copy, span->copy_dtype);
}

static void
update_stretch(const stretch *s)
{
    const ct_update *update = s->job->update;
    const ct_update_span *span = s->span;
    ct_tile grad, param, state[CT_RULE_MAX_STATES];
    operands at = {
        .grad = borrow(s, span->grad, span->grad_dtype, &grad),
        .param = borrow(s, span->param, span->dtype, &param),
    };
    for (size_t k = 0; k < s->job->n_states; k++) {
        at.state[k] = borrow(s, span->state[k], span->state_dtype, &state[k]);
    }
    rules[update->rule][s->job->isa][s->real](&update->coefs[span->coef], &at, s->n);
    for (size_t k = 0; k < s->job->n_states; k++) {
        give_back(s, at.state[k], span->state[k], span->state_dtype);
    }
    if (span->dtype != s->real) {
        put(s, at.param, span->param, span->dtype);
    }
    if (span->copy != NULL) {
        copy(s, at.param);
    }
    if (span->ema != NULL) {
        average(s);
    }
    if (update->zero_grads) {
        memset(element(span->grad, span->grad_dtype, s->at), 0,
               s->n * ct_dtype_size(span->grad_dtype));
    }
}

static ct_dtype
choose_type(const ct_update_span *span, size_t n_states)
{
    const bool alike = span->grad_dtype == span->dtype &&
                       (n_states == 0 || span->state_dtype == span->dtype);
    const bool alone =
        span->copy == NULL && span->ema == NULL && span->rounding == NULL;
    if (span->dtype == CT_BF16 && alike && alone) {
        return CT_BF16;
    }
    return span->dtype == CT_F64 ? CT_F64 : CT_F32;
}

/* How many elements to take at a time: more than a tile where no tile is needed. */
static size_t
stretch_length(const ct_update_span *span, ct_dtype real, size_t n_states)
{
    const bool direct = span->dtype == real && span->grad_dtype == real &&
                        (n_states == 0 || span->state_dtype == real) &&
                        (span->copy == NULL || span->copy_dtype == real) &&
                        (span->ema == NULL || span->ema_dtype == real);
    return direct ? DIRECT : CT_TILE;
}

static void
run_batch(void *arg, size_t batch)
{
    const update_job *job = arg;
    ct_piece piece = ct_cuts_start(job->cuts, batch);
    while (ct_cuts_next(job->cuts, batch, &piece)) {
        const ct_update_span *span = &job->update->spans[piece.span];
        const ct_dtype real = choose_type(span, job->n_states);
        const size_t length = stretch_length(span, real, job->n_states);
        for (size_t done = 0; done < piece.n; done += length) {
            const size_t left = piece.n - done;
            update_stretch(&(stretch){job, span, piece.offset + done,
                                      left < length ? left : length, real});
        }
    }
}

ct_status
ct_cpu_update(void *stream, const ct_update *update, ct_error *err)
{
    (void)stream; /* the CPU is done when the call returns */
    ct_cuts cuts;
    update_job job = {.update = update, .cuts = &cuts};
    ct_status status = ct_isa_get(&job.isa, err);
    if (status == CT_OK) {
        status = ct_update_check(update, err);
    }
    if (status != CT_OK || update->n_spans == 0) {
        return status;
    }
    job.n_states = ct_rule_n_states(update->rule);
    ct_cuts_init(&cuts, &update->spans[0].n, sizeof update->spans[0], update->n_spans);
    ct_pool_run(run_batch, &job, cuts.n_batches);
    return CT_OK;
}
