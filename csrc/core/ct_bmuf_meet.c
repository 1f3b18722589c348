/* What happens where workers meet. */
#include "core/ct_bmuf.h"

#include "core/ct_alloc.h"
#include "core/ct_bmuf_batch.h"
#include "core/ct_crc32c.h"
#include "core/ct_reduce.h"

#include <string.h>

enum {
    MOST_STREAMED = 8 /* ranks of which each reads the pieces of all */
};

typedef ct_bmuf_batch batch;

/* ---- passes over a batch -----------------------------------------------------------
 */

static void *
share_at(const batch *s, const ct_bmuf_piece *piece)
{
    return (char *)s->shares + (piece->at - s->start) * ct_dtype_size(s->dtype);
}

static ct_span
shares_of(const batch *s)
{
    return (ct_span){.data = s->shares, .n = s->n, .dtype = s->dtype};
}

/* The batch's shares are in memory of our own. */
static ct_status
reserve_shares(ct_bmuf *b, batch *s, ct_error *err)
{
    ct_status status =
        b->device->scratch_grow(&b->shares, s->n * ct_dtype_size(s->dtype), err);
    s->shares = b->shares.data;
    return status;
}

static ct_status
run_rule(ct_bmuf *b, ct_rule rule, const ct_rule_coef *coef, const batch *s,
         ct_error *err)
{
    const ct_update update = {
        .rule = rule, .coefs = coef, .spans = b->spans, .n_spans = s->n_pieces};
    return b->device->update(b->stream, &update, err);
}

static ct_status
fill_shares(ct_bmuf *b, ct_rule rule, int world_size, const batch *s, ct_error *err)
{
    ct_rule_coef coef;
    coef.block_share.world_size = world_size;
    for (size_t i = 0; i < s->n_pieces; i++) {
        const ct_bmuf_piece *piece = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = piece->span.n,
            .grad = piece->span.data,
            .param = share_at(s, piece),
            .dtype = s->dtype,
            .grad_dtype = piece->span.dtype,
            .state_dtype = s->dtype,
        };
        if (rule == CT_RULE_block_delta) {
            b->spans[i].state[0] = ct_bmuf_flat_at(&b->global, s->dtype, piece->at);
        }
    }
    return run_rule(b, rule, &coef, s, err);
}

static ct_status
move_model(ct_bmuf *b, const ct_bmuf_config *config, const batch *s, ct_error *err)
{
    ct_rule_coef coef;
    coef.block_momentum = (ct_block_momentum_coef){
        .momentum = config->momentum,
        .lr = config->lr,
        .reach = config->reach,
        .look = (int)config->look,
    };
    for (size_t i = 0; i < s->n_pieces; i++) {
        const ct_bmuf_piece *piece = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = piece->span.n,
            .grad = share_at(s, piece),
            .param = piece->span.data,
            .state = {ct_bmuf_flat_at(&b->global, s->dtype, piece->at),
                      ct_bmuf_flat_at(&b->momentum, s->dtype, piece->at)},
            .copy = piece->copy.data,
            .dtype = piece->span.dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
            .copy_dtype = piece->copy.dtype,
        };
    }
    return run_rule(b, CT_RULE_block_momentum, &coef, s, err);
}

/* The parameters of the batch, to shares or from them; copies follow. */
static ct_status
copy_params(ct_bmuf *b, const batch *s, bool from_shares, ct_error *err)
{
    size_t n_copies = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        ct_span share = b->pieces[i].span;
        share.data = share_at(s, &b->pieces[i]);
        share.dtype = s->dtype;
        b->to[i] = from_shares ? b->pieces[i].span : share;
        b->from[i] = from_shares ? share : b->pieces[i].span;
    }
    ct_status status = b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
    for (size_t i = 0; from_shares && i < s->n_pieces; i++) {
        if (b->pieces[i].copy.data != NULL) {
            b->to[n_copies] = b->pieces[i].copy;
            b->from[n_copies++] = b->pieces[i].span;
        }
    }
    return status == CT_OK ? b->device->copy(b->stream, b->to, b->from, n_copies, err)
                           : status;
}

/* ---- a reduction: shares of all ranks, summed, and what becomes of them -------------
 */

typedef struct reduction {
    ct_bmuf *bmuf;
    ct_comm *comm;
    const ct_bmuf_list *list;
    const ct_bmuf_config *config; /* NULL: the tensors become their average */
} reduction;

static ct_status
give_shares(const reduction *r, const batch *s, ct_error *err)
{
    return fill_shares(r->bmuf,
                       r->config == NULL ? CT_RULE_block_share : CT_RULE_block_delta,
                       r->comm->world_size, s, err);
}

static ct_status
use_shares(const reduction *r, const batch *s, ct_error *err)
{
    return r->config == NULL ? copy_params(r->bmuf, s, true, err)
                             : move_model(r->bmuf, r->config, s, err);
}

static ct_status
reduce_batches(const reduction *r, ct_dtype dtype, ct_error *err)
{
    batch s = ct_bmuf_first_batch(r->list, dtype, r->comm->ops->batch_bytes);
    ct_status status = CT_OK;
    while (status == CT_OK && ct_bmuf_next_batch(&s, r->bmuf->pieces)) {
        status = reserve_shares(r->bmuf, &s, err);
        if (status == CT_OK) {
            status = give_shares(r, &s, err);
        }
        if (status == CT_OK) {
            const ct_request sum = {
                .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = shares_of(&s)};
            status = ct_comm_run(r->comm, &sum, err);
        }
        if (status == CT_OK) {
            status = use_shares(r, &s, err);
        }
    }
    return status;
}

/* What is filled is ahead of what is used. */
typedef struct streamed {
    const reduction *reduction;
    batch filled, used;
    ct_status status; /* the first failure of a piece */
    ct_error *err;
} streamed;

/* Other ranks take the piece in any case: one that failed is NaN in each element. */
static void
fill_piece(void *arg, size_t at, size_t n, void *piece)
{
    streamed *t = arg;
    (void)at;
    t->filled.most = n;
    if (t->status == CT_OK &&
        ct_bmuf_next_batch(&t->filled, t->reduction->bmuf->pieces)) {
        t->filled.shares = piece;
        t->status = give_shares(t->reduction, &t->filled, t->err);
    }
    if (t->status != CT_OK) {
        memset(piece, 0xFF, n * ct_dtype_size(t->filled.dtype));
    }
}

static void
use_piece(void *arg, size_t at, size_t n, const void *const *pieces)
{
    streamed *t = arg;
    const reduction *r = t->reduction;
    (void)at;
    t->used.most = n;
    if (t->status == CT_OK && ct_bmuf_next_batch(&t->used, r->bmuf->pieces)) {
        t->status = reserve_shares(r->bmuf, &t->used, t->err);
    }
    if (t->status == CT_OK) {
        ct_reduce(t->used.shares, pieces, (size_t)r->comm->world_size, n, t->used.dtype,
                  CT_REDUCE_SUM);
        t->status = use_shares(r, &t->used, t->err);
    }
}

static ct_status
stream_all(const reduction *r, ct_dtype dtype, size_t n, ct_error *err)
{
    streamed t = {
        .reduction = r,
        .filled = ct_bmuf_first_batch(r->list, dtype, 0),
        .used = ct_bmuf_first_batch(r->list, dtype, 0),
        .err = err,
    };
    const ct_stream stream = {
        .n = n, .dtype = dtype, .arg = &t, .fill = fill_piece, .use = use_piece};
    ct_status status = n == 0 ? CT_OK : r->comm->ops->stream(r->comm, &stream, err);
    return status == CT_OK ? t.status : status;
}

static ct_status
reduce_all(const reduction *r, const size_t *n, ct_error *err)
{
    const bool streams =
        r->comm->ops->stream != NULL && r->comm->world_size <= MOST_STREAMED;
    ct_status status = ct_bmuf_reserve_operands(r->bmuf, r->list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = streams ? stream_all(r, (ct_dtype)d, n[d], err)
                         : reduce_batches(r, (ct_dtype)d, err);
    }
    return status;
}

/* ---- what happens ------------------------------------------------------------------
 */

static ct_status
broadcast_batch(ct_bmuf *b, ct_comm *comm, const batch *s, ct_error *err)
{
    const ct_request from_first = {.what = CT_BROADCAST, .in = shares_of(s)};
    ct_status status = copy_params(b, s, false, err);
    if (status == CT_OK) {
        status = ct_comm_run(comm, &from_first, err);
    }
    return status == CT_OK ? copy_params(b, s, true, err) : status;
}

static ct_status
broadcast_all(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = ct_bmuf_reserve_operands(b, list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = ct_bmuf_first_batch(list, (ct_dtype)d, comm->ops->batch_bytes);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = reserve_shares(b, &s, err);
            if (status == CT_OK) {
                status = broadcast_batch(b, comm, &s, err);
            }
        }
    }
    return status;
}

ct_status
ct_bmuf_average(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const reduction r = {.bmuf = b, .comm = comm, .list = list};
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    return status == CT_OK ? reduce_all(&r, n, err) : status;
}

ct_status
ct_bmuf_take_over(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
                  const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (status == CT_OK) {
        status = broadcast_all(b, comm, list, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_start(b, config, list, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* ---- whether all go on from the same ------------------------------------------------
 */

static int64_t
sum_model(const ct_bmuf *b)
{
    uint32_t sum = 0;
    for (int d = 0; d < CT_BMUF_DTYPES; d++) {
        sum = ct_crc32c(sum, b->global.memory[d].data,
                        b->n[d] * ct_dtype_size((ct_dtype)d));
    }
    return sum;
}

static ct_status
compare_sums(const int64_t *sums, int world_size, ct_error *err)
{
    for (int rank = 1; rank < world_size; rank++) {
        if (sums[rank] != sums[0]) {
            return ct_fail(err, CT_EINVAL,
                           "the block of rank %d began with other parameters than that "
                           "of rank 0: load the same on all ranks, or have "
                           "warmup_iterations, after which all take over rank 0's",
                           rank);
        }
    }
    return CT_OK;
}

/* The first block after a start or a load; the sums are compared, not the models. */
static ct_status
check_alike(ct_bmuf *b, ct_comm *comm, ct_error *err)
{
    int64_t own = sum_model(b);
    int64_t *sums = ct_calloc((size_t)comm->world_size, sizeof *sums);
    if (sums == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %d sums", comm->world_size);
    }
    const ct_request gather = {
        .what = CT_ALL_GATHER,
        .in = {&own, 1,                        CT_I64},
        .out = {sums, (size_t)comm->world_size, CT_I64}
    };
    ct_status status = ct_comm_run(comm, &gather, err);
    if (status == CT_OK) {
        status = compare_sums(sums, comm->world_size, err);
    }
    b->alike = status == CT_OK;
    ct_free(sums);
    return status;
}

ct_status
ct_bmuf_meet(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
             const ct_bmuf_list *list, ct_error *err)
{
    const reduction r = {.bmuf = b, .comm = comm, .list = list, .config = config};
    if (config->momentum == 0.0) {
        return ct_bmuf_average(b, comm, list, err);
    }
    ct_status status = ct_bmuf_check_unchanged(b, list, err);
    if (status == CT_OK && !b->alike) {
        status = check_alike(b, comm, err);
    }
    return status == CT_OK ? reduce_all(&r, b->n, err) : status;
}
