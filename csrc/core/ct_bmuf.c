#include "core/ct_bmuf.h"

#include "core/ct_alloc.h"
#include "core/ct_bmuf_batch.h"

#include <string.h>

typedef ct_bmuf_batch batch;

/* ---- memory ------------------------------------------------------------------------
 */

void
ct_bmuf_init(ct_bmuf *b, const ct_device *device, void *stream)
{
    *b = (ct_bmuf){.device = device, .stream = stream};
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
reserve_operands(ct_bmuf *b, size_t n, ct_error *err)
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
        b->n[d] = 0;
    }
}

void
ct_bmuf_fini(ct_bmuf *b)
{
    release_flats(b);
    b->device->scratch_release(&b->shares);
    free_operands(b);
}

static ct_status
count_elements(const ct_bmuf_list *list, size_t *n, ct_error *err)
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
check_unchanged(const ct_bmuf *b, const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
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

/* ---- where things are --------------------------------------------------------------
 */

static batch
first_batch(const ct_bmuf_list *list, const ct_comm *comm, int dtype)
{
    return ct_bmuf_first_batch(list, (ct_dtype)dtype,
                               comm == NULL ? 0 : comm->ops->batch_bytes);
}

static void *
flat_at(const ct_bmuf_flat *flat, ct_dtype dtype, size_t at)
{
    return (char *)flat->memory[dtype].data + at * ct_dtype_size(dtype);
}

/* Where the shares of a piece are: a batch's begin with the buffer. */
static void *
share_at(const ct_bmuf *b, const ct_bmuf_piece *piece)
{
    const size_t at = piece->at - b->pieces[0].at;
    return (char *)b->shares.data +
           at * ct_dtype_size(ct_bmuf_dtype(piece->span.dtype));
}

static ct_span
shares_of(const ct_bmuf *b, const batch *s)
{
    return (ct_span){.data = b->shares.data, .n = s->n, .dtype = s->dtype};
}

static ct_status
reserve_shares(ct_bmuf *b, const batch *s, ct_error *err)
{
    return b->device->scratch_grow(&b->shares, s->n * ct_dtype_size(s->dtype), err);
}

/* ---- passes over a batch -----------------------------------------------------------
 */

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
            .param = share_at(b, piece),
            .dtype = s->dtype,
            .grad_dtype = piece->span.dtype,
            .state_dtype = s->dtype,
        };
        if (rule == CT_RULE_block_delta) {
            b->spans[i].state[0] = flat_at(&b->global, s->dtype, piece->at);
        }
    }
    return run_rule(b, rule, &coef, s, err);
}

static ct_status
move_model(ct_bmuf *b, const ct_bmuf_config *config, const batch *s, ct_error *err)
{
    ct_rule_coef coef;
    coef.block_momentum = (ct_block_momentum_coef){
        .momentum = config->momentum, .lr = config->lr, .look = (int)config->look};
    for (size_t i = 0; i < s->n_pieces; i++) {
        const ct_bmuf_piece *piece = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = piece->span.n,
            .grad = share_at(b, piece),
            .param = piece->span.data,
            .state = {flat_at(&b->global, s->dtype, piece->at),
                      flat_at(&b->momentum, s->dtype, piece->at)},
            .copy = piece->copy.data,
            .dtype = piece->span.dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
            .copy_dtype = piece->copy.dtype,
        };
    }
    return run_rule(b, CT_RULE_block_momentum, &coef, s, err);
}

static ct_status
sum_shares(const ct_bmuf *b, ct_comm *comm, const batch *s, ct_error *err)
{
    const ct_request sum = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = shares_of(b, s)};
    return ct_comm_run(comm, &sum, err);
}

/* The parameters of the batch, to shares or from them; copies follow. */
static ct_status
copy_params(ct_bmuf *b, const batch *s, bool from_shares, ct_error *err)
{
    size_t n_copies = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        ct_span share = b->pieces[i].span;
        share.data = share_at(b, &b->pieces[i]);
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

/* ---- what happens ------------------------------------------------------------------
 */

/* Memory for the global model and the momentum, which becomes 0. */
static ct_status
reserve_flats(ct_bmuf *b, const size_t *n, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const size_t bytes = n[d] * ct_dtype_size((ct_dtype)d);
        status = b->device->scratch_grow(&b->global.memory[d], bytes, err);
        if (status == CT_OK) {
            status = b->device->scratch_grow(&b->momentum.memory[d], bytes, err);
        }
        if (status == CT_OK) {
            const ct_span all = {b->momentum.memory[d].data, n[d], (ct_dtype)d};
            status = b->device->zero(b->stream, &all, 1, err);
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
        stored.data = flat_at(flat, s->dtype, b->pieces[i].at);
        stored.dtype = s->dtype;
        b->to[i] = from_flat ? b->pieces[i].span : stored;
        b->from[i] = from_flat ? stored : b->pieces[i].span;
    }
    return b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
}

static ct_status
copy_flats(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
           bool from_flat, ct_error *err)
{
    ct_status status = reserve_operands(b, list->n, err);
    if (status == CT_OK) {
        status = check_unchanged(b, list, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = first_batch(list, NULL, d);
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
    ct_status status = count_elements(list, n, err);
    if (config->momentum == 0.0) {
        release_flats(b);
        return status;
    }
    if (status == CT_OK) {
        status = reserve_flats(b, n, err);
    }
    return status == CT_OK ? copy_flats(b, &b->global, list, false, err) : status;
}

typedef struct block {
    const ct_bmuf_config *config; /* NULL for a plain average */
    ct_comm *comm;
} block;

static ct_status
broadcast_batch(ct_bmuf *b, const block *k, const batch *s, ct_error *err)
{
    const ct_request from_first = {.what = CT_BROADCAST, .in = shares_of(b, s)};
    ct_status status = copy_params(b, s, false, err);
    if (status == CT_OK) {
        status = ct_comm_run(k->comm, &from_first, err);
    }
    return status == CT_OK ? copy_params(b, s, true, err) : status;
}

static ct_status
average_batch(ct_bmuf *b, const block *k, const batch *s, ct_error *err)
{
    ct_status status = fill_shares(b, CT_RULE_block_share, k->comm->world_size, s, err);
    if (status == CT_OK) {
        status = sum_shares(b, k->comm, s, err);
    }
    return status == CT_OK ? copy_params(b, s, true, err) : status;
}

static ct_status
move_batch(ct_bmuf *b, const block *k, const batch *s, ct_error *err)
{
    ct_status status = fill_shares(b, CT_RULE_block_delta, k->comm->world_size, s, err);
    if (status == CT_OK) {
        status = sum_shares(b, k->comm, s, err);
    }
    return status == CT_OK ? move_model(b, k->config, s, err) : status;
}

static ct_status
each_batch(ct_bmuf *b, const block *k, const ct_bmuf_list *list,
           ct_status (*work)(ct_bmuf *b, const block *k, const batch *s, ct_error *err),
           ct_error *err)
{
    ct_status status = reserve_operands(b, list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = first_batch(list, k->comm, d);
        while (status == CT_OK && ct_bmuf_next_batch(&s, b->pieces)) {
            status = reserve_shares(b, &s, err);
            if (status == CT_OK) {
                status = work(b, k, &s, err);
            }
        }
    }
    return status;
}

ct_status
ct_bmuf_average(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const block k = {.comm = comm};
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
    return status == CT_OK ? each_batch(b, &k, list, average_batch, err) : status;
}

ct_status
ct_bmuf_take_over(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
                  const ct_bmuf_list *list, ct_error *err)
{
    const block k = {.config = config, .comm = comm};
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
    if (status == CT_OK) {
        status = each_batch(b, &k, list, broadcast_batch, err);
    }
    return status == CT_OK ? ct_bmuf_start(b, config, list, err) : status;
}

ct_status
ct_bmuf_meet(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
             const ct_bmuf_list *list, ct_error *err)
{
    const block k = {.config = config, .comm = comm};
    if (config->momentum == 0.0) {
        return ct_bmuf_average(b, comm, list, err);
    }
    ct_status status = check_unchanged(b, list, err);
    return status == CT_OK ? each_batch(b, &k, list, move_batch, err) : status;
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
    return copy_flats(b, flat, from, false, err);
}
