/* What happens where workers meet. */
#include "core/bmuf/bmuf.h"

#include "core/bmuf/quantized.h"
#include "core/bmuf/bmuf_pass.h"
#include "core/comm/reduce.h"

#include <string.h>

enum {
    MOST_STREAMED = 8 /* ranks of which each reads the pieces of all */
};

typedef ct_bmuf_batch batch;

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
    return ct_bmuf_fill_shares(
        r->bmuf, r->config == NULL ? CT_RULE_block_share : CT_RULE_block_delta,
        r->comm->world_size, s, err);
}

static ct_status
use_shares(const reduction *r, const batch *s, ct_error *err)
{
    return r->config == NULL ? ct_bmuf_copy_params(r->bmuf, s, true, err)
                             : ct_bmuf_move_model(r->bmuf, r->config, s, err);
}

/* Distances that travel as codes, all in one. */
static ct_status
reduce_coded(const reduction *r, ct_dtype dtype, ct_error *err)
{
    batch s = ct_bmuf_first_batch(r->list, dtype, 0);
    ct_status status = CT_OK;
    if (!ct_bmuf_next_batch(&s, r->bmuf->pieces)) {
        return CT_OK;
    }
    status = ct_bmuf_reserve_shares(r->bmuf, &s, err);
    if (status == CT_OK) {
        status = give_shares(r, &s, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_sum_coded(r->bmuf, r->config, r->comm, &s, err);
    }
    return status == CT_OK ? use_shares(r, &s, err) : status;
}

static ct_status
reduce_batches(const reduction *r, ct_dtype dtype, ct_error *err)
{
    batch s = ct_bmuf_first_batch(r->list, dtype, r->comm->ops->batch_bytes);
    ct_status status = CT_OK;
    while (status == CT_OK && ct_bmuf_next_batch(&s, r->bmuf->pieces)) {
        status = ct_bmuf_reserve_shares(r->bmuf, &s, err);
        if (status == CT_OK) {
            status = give_shares(r, &s, err);
        }
        if (status == CT_OK) {
            const ct_request sum = {
                .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = ct_bmuf_shares(&s)};
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
        t->status = ct_bmuf_reserve_shares(r->bmuf, &t->used, t->err);
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
    const bool is_coded = r->config != NULL && ct_bmuf_is_coded(r->config);
    ct_status status = ct_bmuf_reserve_operands(r->bmuf, r->list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = is_coded  ? reduce_coded(r, (ct_dtype)d, err)
                 : streams ? stream_all(r, (ct_dtype)d, n[d], err)
                           : reduce_batches(r, (ct_dtype)d, err);
    }
    return status;
}

/* ---- what happens ------------------------------------------------------------------
 */

ct_status
ct_bmuf_average(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const reduction r = {.bmuf = b, .comm = comm, .list = list};
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    return status == CT_OK ? reduce_all(&r, n, err) : status;
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
        status = ct_bmuf_check_alike(b, comm, err);
    }
    return status == CT_OK ? reduce_all(&r, b->n, err) : status;
}
