/* Blocks of local steps: batches of tensors, the passes over them, the averages at the
 * ends of blocks, and how ranks come to hold one global model.
 *
 * The global model and the block momentum change when an average is taken, and alike
 * on every rank. */
#include "core/bmuf/bmuf.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/bmuf/quantized.h"
#include "core/comm/reduce.h"
#include "core/optim/hyper.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Passes over a batch of a list's tensors, whose pieces are in bmuf->pieces. */

typedef ct_bmuf_batch batch;

static inline ct_span
ct_bmuf_shares(const ct_bmuf_batch *b)
{
    return (ct_span){.data = b->shares, .n = b->n, .dtype = b->dtype};
}

/* ---- memory ------------------------------------------------------------------------
 */

void
ct_bmuf_init(ct_bmuf *b, const ct_device *device, void *stream)
{
    *b = (ct_bmuf){.device = device, .stream = stream, .residual = {.is_single = true}};
}

static void
free_operands(ct_bmuf *b)
{
    ct_free(b->pieces);
    ct_free(b->spans);
    ct_free(b->to);
    ct_free(b->from);
    b->pieces = NULL;
    b->spans = NULL;
    b->to = b->from = NULL;
    b->room = 0;
}

/* A batch has at most one piece of each tensor. */
static ct_status
ct_bmuf_reserve_operands(ct_bmuf *b, size_t n, ct_error *err)
{
    if (n <= b->room) {
        return CT_OK;
    }
    free_operands(b);
    b->pieces = ct_calloc(n, sizeof *b->pieces);
    b->spans = ct_calloc(n, sizeof *b->spans);
    b->to = ct_calloc(n, sizeof *b->to);
    b->from = ct_calloc(n, sizeof *b->from);
    if (b->pieces == NULL || b->spans == NULL || b->to == NULL || b->from == NULL) {
        free_operands(b);
        return ct_fail(err, CT_ENOMEM, "no memory for %zu parameters", n);
    }
    b->room = n;
    return CT_OK;
}

static void
release_flats(ct_bmuf *b)
{
    for (int d = 0; d < CT_BMUF_DTYPES; d++) {
        b->device->scratch_release(&b->global.memory[d]);
        b->device->scratch_release(&b->momentum.memory[d]);
        b->device->scratch_release(&b->residual.memory[d]);
        b->device->scratch_release(&b->left.memory[d]);
        b->device->scratch_release(&b->sums.memory[d]);
        b->n[d] = 0;
    }
}

void
ct_bmuf_fini(ct_bmuf *b)
{
    release_flats(b);
    b->device->scratch_release(&b->shares);
    b->device->scratch_release(&b->wire);
    free_operands(b);
}

/* core/bmuf/bmuf.c: elements of each dtype, CT_EINVAL for an integer; and whether they
 * are as many as when the block began. */
static ct_status
ct_bmuf_count(const ct_bmuf_list *list, size_t *n, ct_error *err)
{
    for (size_t i = 0; i < list->n; i++) {
        const ct_span *span = &list->tensors[i].span;
        if (!ct_dtype_is_float(span->dtype)) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %zu is %s; only float dtypes can be averaged", i,
                           ct_dtype_name(span->dtype));
        }
        n[ct_bmuf_dtype(span->dtype)] += span->n;
    }
    return CT_OK;
}

static ct_status
ct_bmuf_check_unchanged(const ct_bmuf *b, const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        if (n[d] != b->n[d]) {
            status = ct_fail(err, CT_EINVAL,
                             "the parameters have %zu elements of %s and had %zu when "
                             "the block began",
                             n[d], ct_dtype_name((ct_dtype)d), b->n[d]);
        }
    }
    return status;
}

/* ---- the global model and the momentum ----------------------------------------------
 */

/* Memory for all values of a dtype, which become 0. */
static ct_status
reserve_zeros(ct_bmuf *b, ct_bmuf_flat *flat, ct_dtype dtype, size_t n, ct_error *err)
{
    const ct_dtype of = ct_bmuf_flat_dtype(flat, dtype);
    ct_status status =
        b->device->scratch_grow(&flat->memory[dtype], n * ct_dtype_size(of), err);
    const ct_span all = {flat->memory[dtype].data, n, of};
    return status == CT_OK ? b->device->zero(b->stream, &all, 1, err) : status;
}

/* Memory for the global model, for the momentum and, where it is needed, for what codes
 * miss, which become 0. */
static ct_status
reserve_flats(ct_bmuf *b, const ct_bmuf_config *config, const size_t *n, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const size_t bytes = n[d] * ct_dtype_size((ct_dtype)d);
        status = b->device->scratch_grow(&b->global.memory[d], bytes, err);
        if (status == CT_OK) {
            status = reserve_zeros(b, &b->momentum, (ct_dtype)d, n[d], err);
        }
        if (status == CT_OK && ct_bmuf_is_coded(config)) {
            status = reserve_zeros(b, &b->residual, (ct_dtype)d, n[d], err);
        }
        b->n[d] = n[d];
    }
    return status;
}

/* The global model, or the momentum, of a batch from spans or to them. */
static ct_status
copy_flat(ct_bmuf *b, const ct_bmuf_flat *flat, const batch *s, bool from_flat,
          ct_error *err)
{
    for (size_t i = 0; i < s->n_pieces; i++) {
        ct_span stored = b->pieces[i].span;
        stored.data = ct_bmuf_flat_at(flat, s->dtype, b->pieces[i].at);
        stored.dtype = ct_bmuf_flat_dtype(flat, s->dtype);
        b->to[i] = from_flat ? b->pieces[i].span : stored;
        b->from[i] = from_flat ? stored : b->pieces[i].span;
    }
    return b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
}

/* Batches of at most so many bytes, 0: all in one; empty until it is moved on. */
static ct_bmuf_batch
ct_bmuf_first_batch(const ct_bmuf_list *list, ct_dtype dtype, size_t bytes)
{
    return (ct_bmuf_batch){
        .list = list,
        .dtype = dtype,
        .most = bytes == 0 ? SIZE_MAX : bytes / ct_dtype_size(dtype),
    };
}

static ct_span
part_of(const ct_span *span, size_t at, size_t n)
{
    const size_t bytes = at * ct_dtype_size(span->dtype);
    return (ct_span){.data = span->data == NULL ? NULL : (char *)span->data + bytes,
                     .n = n,
                     .dtype = span->dtype};
}

static void
add_piece(ct_bmuf_batch *s, ct_bmuf_piece *pieces, const ct_bmuf_tensor *t)
{
    const size_t left = t->span.n - s->offset, room = s->most - s->n;
    const size_t n = left < room ? left : room;
    pieces[s->n_pieces++] = (ct_bmuf_piece){
        .span = part_of(&t->span, s->offset, n),
        .copy = part_of(&t->copy, s->offset, n),
        .at = s->at,
    };
    s->n += n;
    s->at += n;
    s->offset += n;
}

/* Takes the next pieces, at most list->n; false when there are none. */
static bool
ct_bmuf_next_batch(ct_bmuf_batch *s, ct_bmuf_piece *pieces)
{
    s->n = s->n_pieces = 0;
    s->start = s->at;
    while (s->tensor < s->list->n && s->n < s->most) {
        const ct_bmuf_tensor *t = &s->list->tensors[s->tensor];
        const bool fits = ct_bmuf_dtype(t->span.dtype) == s->dtype;
        if (fits && s->offset < t->span.n) {
            add_piece(s, pieces, t);
        }
        if (!fits || s->offset == t->span.n) {
            s->tensor++;
            s->offset = 0;
        }
    }
    return s->n != 0;
}

static ct_status
copy_flats(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
           bool from_flat, ct_error *err)
{
    ct_status status = ct_bmuf_reserve_operands(b, list->n, err);
    if (status == CT_OK) {
        status = ct_bmuf_check_unchanged(b, list, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = ct_bmuf_first_batch(list, (ct_dtype)d, 0);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = copy_flat(b, flat, &s, from_flat, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_start(ct_bmuf *b, const ct_bmuf_config *config, const ct_bmuf_list *list,
              ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (config->momentum == 0.0) {
        release_flats(b);
        return status;
    }
    if (status == CT_OK) {
        status = reserve_flats(b, config, n, err);
    }
    b->alike = false;
    return status == CT_OK ? copy_flats(b, &b->global, list, false, err) : status;
}

ct_status
ct_bmuf_save(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *to,
             ct_error *err)
{
    return copy_flats(b, flat, to, true, err);
}

ct_status
ct_bmuf_load(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *from,
             ct_error *err)
{
    b->alike = b->alike && flat != &b->global;
    return copy_flats(b, flat, from, false, err);
}

/* When workers meet, and the ranges of the options. */

ct_status
ct_bmuf_check(const ct_bmuf_config *config, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"block_momentum", config->momentum, 0.0, HUGE_VAL},
        {"block_lr",       config->lr,       0.0, HUGE_VAL},
    };
    if (config->sync_iter < 1) {
        return ct_fail(err, CT_EINVAL, "global_sync_iter must be at least 1, got %lld",
                       (long long)config->sync_iter);
    }
    if (config->warmup < 0) {
        return ct_fail(err, CT_EINVAL, "warmup_iterations must be at least 0, got %lld",
                       (long long)config->warmup);
    }
    for (int i = 0; i < 2; i++) {
        if (isinf(numbers[i].value)) {
            return ct_fail(err, CT_EINVAL, "%s must be finite, got %g", numbers[i].name,
                           numbers[i].value);
        }
    }
    if (config->overlap < 0 || config->overlap >= config->sync_iter) {
        return ct_fail(err, CT_EINVAL,
                       "overlap_steps must be at least 0 and below global_sync_iter, "
                       "which is %lld; got %lld",
                       (long long)config->sync_iter, (long long)config->overlap);
    }
    if (config->overlap > 0 && (config->momentum == 0.0 || ct_bmuf_is_coded(config))) {
        return ct_fail(err, CT_EINVAL,
                       "overlap_steps is %lld, which needs block_momentum above 0 and "
                       "delta_bits 32; got %g and %d",
                       (long long)config->overlap, config->momentum,
                       config->delta_bits);
    }
    if (config->delta_bits != 32 && !ct_bmuf_is_coded(config)) {
        return ct_fail(err, CT_EINVAL, "delta_bits must be 32, 8 or 4, got %d",
                       config->delta_bits);
    }
    if (ct_bmuf_is_coded(config) && config->momentum == 0.0) {
        return ct_fail(err, CT_EINVAL,
                       "delta_bits is %d with block_momentum 0, which averages models "
                       "and knows no distances: set block_momentum above 0, or "
                       "delta_bits to 32",
                       config->delta_bits);
    }
    return ct_hyper_check(numbers, 2, err);
}

ct_bmuf_event
ct_bmuf_after(const ct_bmuf_config *config, int64_t num_updates)
{
    if (num_updates == config->warmup) {
        return CT_BMUF_WARMUP_END;
    }
    return num_updates > config->warmup && num_updates % config->sync_iter == 0
               ? CT_BMUF_BLOCK_END
               : CT_BMUF_NOTHING;
}

static void *
share_at(const batch *s, const ct_bmuf_piece *piece)
{
    return (char *)s->shares + (piece->at - s->start) * ct_dtype_size(s->dtype);
}

/* The batch's shares are in memory of our own. */
static ct_status
ct_bmuf_reserve_shares(ct_bmuf *b, batch *s, ct_error *err)
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

/* The batch's shares of an average over the ranks: by CT_RULE_block_share of the
 * parameters, by CT_RULE_block_delta of their distance from the global model. */
static ct_status
ct_bmuf_fill_shares(ct_bmuf *b, ct_rule rule, int world_size, const batch *s,
                    ct_error *err)
{
    ct_rule_coef coef;
    coef.block_share = ct_block_share_of(world_size);
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

/* Momentum, global model and parameters by the average distance in the shares; of a
 * block that is away the parameters keep what they have learnt since. */
static ct_status
ct_bmuf_move_model(ct_bmuf *b, const ct_bmuf_config *config, const batch *s,
                   ct_error *err)
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
                      ct_bmuf_flat_at(&b->momentum, s->dtype, piece->at),
                      b->is_away ? ct_bmuf_flat_at(&b->left, s->dtype, piece->at)
                                 : NULL},
            .copy = piece->copy.data,
            .dtype = piece->span.dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
            .copy_dtype = piece->copy.dtype,
        };
    }
    return run_rule(b, b->is_away ? CT_RULE_block_rejoin : CT_RULE_block_momentum,
                    &coef, s, err);
}

/* The parameters of the batch, to shares or from them; copies follow. */
static ct_status
ct_bmuf_copy_params(ct_bmuf *b, const batch *s, bool from_shares, ct_error *err)
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

/* What happens where workers meet. */

enum {
    MOST_STREAMED = 8 /* ranks of which each reads the pieces of all */
};

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

/* Distances that travel quantized, all in one. */
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
ct_bmuf_check_alike(ct_bmuf *b, ct_comm *comm, ct_error *err)
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
ct_bmuf_synchronize(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
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

/* How ranks come to have one global model, and know it. */

static ct_status
broadcast_batch(ct_bmuf *b, ct_comm *comm, int root, const batch *s, ct_error *err)
{
    const ct_request from_root = {
        .what = CT_BROADCAST, .root = root, .in = ct_bmuf_shares(s)};
    ct_status status = ct_bmuf_copy_params(b, s, false, err);
    if (status == CT_OK) {
        status = ct_comm_run(comm, &from_root, err);
    }
    return status == CT_OK ? ct_bmuf_copy_params(b, s, true, err) : status;
}

static ct_status
broadcast_all(ct_bmuf *b, ct_comm *comm, int root, const ct_bmuf_list *list,
              ct_error *err)
{
    ct_status status = ct_bmuf_reserve_operands(b, list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = ct_bmuf_first_batch(list, (ct_dtype)d, comm->ops->batch_bytes);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = ct_bmuf_reserve_shares(b, &s, err);
            if (status == CT_OK) {
                status = broadcast_batch(b, comm, root, &s, err);
            }
        }
    }
    return status;
}

ct_status
ct_bmuf_take_over(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
                  const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (status == CT_OK) {
        status = broadcast_all(b, comm, 0, list, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_start(b, config, list, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* ---- a new group --------------------------------------------------------------------
 */

static ct_status
broadcast_momentum(ct_bmuf *b, ct_comm *comm, int root, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const ct_request from_root = {
            .what = CT_BROADCAST,
            .root = root,
            .in = {b->momentum.memory[d].data, b->n[d], (ct_dtype)d}
        };
        status = ct_comm_run(comm, &from_root, err);
    }
    return status;
}

/* The root's momentum stays, that of the others begins to be overwritten with it. */
ct_status
ct_bmuf_adopt(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm, int root,
              const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = ct_bmuf_count(list, n, err);
    if (status == CT_OK) {
        status = broadcast_all(b, comm, root, list, err);
    }
    if (status != CT_OK || config->momentum == 0.0) {
        return status;
    }
    status = comm->rank == root ? ct_bmuf_load(b, &b->global, list, err)
                                : ct_bmuf_start(b, config, list, err);
    if (status == CT_OK) {
        status = broadcast_momentum(b, comm, root, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* Blocks whose average is taken some updates after they have ended. */

static ct_status
reserve(ct_bmuf *b, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const size_t bytes = b->n[d] * ct_dtype_size((ct_dtype)d);
        status = b->device->scratch_grow(&b->left.memory[d], bytes, err);
        if (status == CT_OK) {
            status = b->device->scratch_grow(&b->sums.memory[d], bytes, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_load_left(ct_bmuf *b, const ct_bmuf_list *from, ct_error *err)
{
    ct_status status = reserve(b, err);
    if (status == CT_OK) {
        status = ct_bmuf_load(b, &b->left, from, err);
    }
    b->is_away = status == CT_OK;
    return status;
}

/* Shares of the distance that the parameters had when the ranks met, on their way. */
static ct_status
begin_sum(ct_bmuf *b, ct_comm *comm, ct_dtype dtype, ct_error *err)
{
    const ct_rule_coef coef = {.block_share = ct_block_share_of(comm->world_size)};
    const ct_update_span span = {
        .n = b->n[dtype],
        .grad = b->left.memory[dtype].data,
        .param = b->sums.memory[dtype].data,
        .state = {b->global.memory[dtype].data},
        .dtype = dtype,
        .grad_dtype = dtype,
        .state_dtype = dtype,
    };
    const ct_update update = {
        .rule = CT_RULE_block_delta, .coefs = &coef, .spans = &span, .n_spans = 1};
    const ct_request sum = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = {span.param, span.n, dtype}
    };
    ct_status status = b->device->update(b->stream, &update, err);
    return status == CT_OK ? ct_comm_start(comm, &sum, &b->work[dtype], err) : status;
}

/* Waits for all, in the order in which they began; the first failure counts. */
static ct_status
wait_for_sums(ct_bmuf *b, ct_comm *comm, int n_begun, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; d < n_begun; d++) {
        ct_error *told = status == CT_OK ? err : NULL;
        if (b->n[d] != 0) {
            const ct_status ended = ct_comm_wait(comm, b->work[d], told);
            status = status == CT_OK ? ended : status;
        }
        b->work[d] = NULL;
    }
    b->is_under_way = false;
    return status;
}

/* Nobody wants to know how they ended. */
static void
forget_sums(ct_bmuf *b, ct_comm *comm, int n_begun)
{
    const ct_status ignored = wait_for_sums(b, comm, n_begun, NULL);
    (void)ignored;
}

static ct_status
begin_sums(ct_bmuf *b, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    int d = 0;
    while (status == CT_OK && d < CT_BMUF_DTYPES) {
        status = b->n[d] == 0 ? CT_OK : begin_sum(b, comm, (ct_dtype)d, err);
        d += status == CT_OK;
    }
    b->is_under_way = status == CT_OK;
    if (status != CT_OK) {
        forget_sums(b, comm, d);
    }
    return status;
}

ct_status
ct_bmuf_begin(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = ct_bmuf_check_unchanged(b, list, err);
    if (status == CT_OK && !b->alike) {
        status = ct_bmuf_check_alike(b, comm, err);
    }
    if (status == CT_OK) {
        status = ct_bmuf_load_left(b, list, err);
    }
    if (status == CT_OK) {
        status = begin_sums(b, comm, err);
    }
    b->is_away = status == CT_OK;
    return status;
}

static ct_status
rejoin(ct_bmuf *b, const ct_bmuf_config *config, const ct_bmuf_list *list,
       ct_dtype dtype, ct_error *err)
{
    batch s = ct_bmuf_first_batch(list, dtype, 0);
    ct_status status = CT_OK;
    while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
        s.shares = ct_bmuf_flat_at(&b->sums, dtype, s.start);
        status = ct_bmuf_move_model(b, config, &s, err);
    }
    return status;
}

ct_status
ct_bmuf_finish(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
               const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = ct_bmuf_check_unchanged(b, list, err);
    if (status == CT_OK) {
        status = ct_bmuf_reserve_operands(b, list->n, err);
    }
    if (status == CT_OK && !b->is_under_way) {
        status = begin_sums(b, comm, err);
    }
    if (status == CT_OK) {
        status = wait_for_sums(b, comm, CT_BMUF_DTYPES, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = rejoin(b, config, list, (ct_dtype)d, err);
    }
    b->is_away = status != CT_OK;
    return status;
}

void
ct_bmuf_abandon(ct_bmuf *b, ct_comm *comm)
{
    if (b->is_under_way) {
        forget_sums(b, comm, CT_BMUF_DTYPES);
    }
    b->is_away = false;
}
