/* Blocks of local steps: flat buffers, batches of tensors, the passes over them, and
 * synchronization at the ends of blocks.
 *
 * The global model and the momentum of blocks change only when an average is applied,
 * by the same values on every rank, so all ranks have the same model. A first block
 * proves this by a comparison of checksums. */
#include "core/bmuf/bmuf.h"

#include "core/base/alloc.h"
#include "core/base/check.h"
#include "core/base/crc.h"
#include "core/comm/reduce.h"

#include "math/quantized.h"

#include <math.h>
#include <string.h>

enum {
    MOST_STREAMED = 8 /* ranks; in a stream each rank reads the pieces of all */
};

/* A part of a tensor, and the place in the flat buffers of its dtype. */
typedef struct ct_bmuf_piece {
    ct_span span, copy;
    size_t at;
} piece;

/* Adjacent pieces that are computed in one dtype, and the place of the next batch. */
typedef struct batch {
    const ct_bmuf_list *list;
    ct_dtype dtype;
    size_t most; /* elements in a batch */
    size_t n_pieces, n;
    size_t start;          /* of the batch, in flat buffers */
    void *terms;           /* of the batch, for a sum over the ranks; the caller's */
    size_t tensor, offset; /* of the next piece */
    size_t at;             /* of the next piece, in flat buffers */
} batch;

/* ---- the options ----------------------------------------------------------------- */

ct_status
ct_bmuf_check(const ct_bmuf_config *config, ct_error *err)
{
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        {"block_momentum", config->momentum},
        {"block_lr",       config->lr      },
    };
    ct_status status = CT_OK;
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
    if (config->overlap > 0 &&
        (config->momentum == 0.0 || ct_bmuf_is_quantized(config))) {
        return ct_fail(err, CT_EINVAL,
                       "overlap_steps is %lld, which needs block_momentum above 0 and "
                       "delta_bits 32; got %g and %d",
                       (long long)config->overlap, config->momentum,
                       config->delta_bits);
    }
    if (config->delta_bits != 32 && !ct_bmuf_is_quantized(config)) {
        return ct_fail(err, CT_EINVAL, "delta_bits must be 32, 8 or 4, got %d",
                       config->delta_bits);
    }
    if (ct_bmuf_is_quantized(config) && config->momentum == 0.0) {
        return ct_fail(err, CT_EINVAL,
                       "delta_bits is %d with block_momentum 0, which averages models "
                       "and has no parameter deltas: set block_momentum above 0, or "
                       "delta_bits to 32",
                       config->delta_bits);
    }
    for (int i = 0; status == CT_OK && i < 2; i++) {
        status = ct_check_least(numbers[i].name, numbers[i].value, 0.0, err);
    }
    return status;
}

/* ---- memory ---------------------------------------------------------------------- */

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
    enum {
        FLATS = 5
    };
    ct_bmuf_flat *const flats[FLATS] = {&b->global, &b->momentum, &b->residual,
                                        &b->pending, &b->sums};
    for (int d = 0; d < CT_BMUF_DTYPES; d++) {
        for (int i = 0; i < FLATS; i++) {
            b->device->scratch_release(&flats[i]->memory[d]);
        }
        b->n[d] = 0;
    }
}

void
ct_bmuf_fini(ct_bmuf *b)
{
    release_flats(b);
    b->device->table_release(&b->table);
    b->device->scratch_release(&b->terms);
    b->device->scratch_release(&b->wire);
    free_operands(b);
}

static ct_dtype
dtype_of_blocks(ct_dtype of_parameter)
{
    return of_parameter == CT_F64 ? CT_F64 : CT_F32;
}

static ct_dtype
flat_dtype(const ct_bmuf_flat *flat, ct_dtype dtype)
{
    return flat->is_single ? CT_F32 : dtype;
}

static void *
flat_at(const ct_bmuf_flat *flat, ct_dtype dtype, size_t at)
{
    return (char *)flat->memory[dtype].data +
           at * ct_dtype_size(flat_dtype(flat, dtype));
}

/* Memory for all values of a dtype. */
static ct_status
reserve_flat(ct_bmuf *b, ct_bmuf_flat *flat, int dtype, ct_error *err)
{
    const size_t size = ct_dtype_size(flat_dtype(flat, (ct_dtype)dtype));
    return b->device->scratch_grow(&flat->memory[dtype], b->n[dtype] * size, err);
}

static ct_status
reserve_zeros(ct_bmuf *b, ct_bmuf_flat *flat, int dtype, ct_error *err)
{
    ct_status status = reserve_flat(b, flat, dtype, err);
    const ct_span all = {flat->memory[dtype].data, b->n[dtype],
                         flat_dtype(flat, (ct_dtype)dtype)};
    return status == CT_OK ? b->device->zero(b->stream, &all, 1, err) : status;
}

/* Elements of each dtype; CT_EINVAL for an integer. */
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
        n[dtype_of_blocks(span->dtype)] += span->n;
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

/* ---- batches of a list's tensors ------------------------------------------------- */

/* Batches of at most so many bytes, 0: all in one; empty before next_batch. */
static batch
first_batch(const ct_bmuf_list *list, int dtype, size_t bytes)
{
    return (batch){
        .list = list,
        .dtype = (ct_dtype)dtype,
        .most = bytes == 0 ? SIZE_MAX : bytes / ct_dtype_size((ct_dtype)dtype),
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
add_piece(batch *s, piece *pieces, const ct_bmuf_tensor *t)
{
    const size_t left = t->span.n - s->offset, room = s->most - s->n;
    const size_t n = left < room ? left : room;
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): reserve_operands() failed */
    pieces[s->n_pieces++] = (piece){
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
next_batch(batch *s, piece *pieces)
{
    s->n = s->n_pieces = 0;
    s->start = s->at;
    while (s->tensor < s->list->n && s->n < s->most) {
        const ct_bmuf_tensor *t = &s->list->tensors[s->tensor];
        const bool fits = dtype_of_blocks(t->span.dtype) == s->dtype;
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

static ct_span
terms_of(const batch *s)
{
    return (ct_span){.data = s->terms, .n = s->n, .dtype = s->dtype};
}

static void *
term_at(const batch *s, const piece *p)
{
    return (char *)s->terms + (p->at - s->start) * ct_dtype_size(s->dtype);
}

/* Puts the batch's terms into memory of our own. */
static ct_status
reserve_terms(ct_bmuf *b, batch *s, ct_error *err)
{
    ct_status status =
        b->device->scratch_grow(&b->terms, s->n * ct_dtype_size(s->dtype), err);
    s->terms = b->terms.data;
    return status;
}

/* ---- passes over a batch, whose pieces are in b->pieces -------------------------- */

/* Copies the pieces to `stored`, the values of piece i in dtype, or from there. */
static void
add_copy(ct_bmuf *b, size_t i, void *stored, ct_dtype dtype, bool from_stored)
{
    const ct_span own = b->pieces[i].span, other = {stored, own.n, dtype};
    b->to[i] = from_stored ? own : other;
    b->from[i] = from_stored ? other : own;
}

static ct_status
copy_flat(ct_bmuf *b, const ct_bmuf_flat *flat, const batch *s, bool from_flat,
          ct_error *err)
{
    for (size_t i = 0; i < s->n_pieces; i++) {
        add_copy(b, i, flat_at(flat, s->dtype, b->pieces[i].at),
                 flat_dtype(flat, s->dtype), from_flat);
    }
    return b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
}

/* The parameters to terms or from them; the model's copies follow the parameters. */
static ct_status
copy_terms(ct_bmuf *b, const batch *s, bool from_terms, ct_error *err)
{
    size_t n_copies = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        add_copy(b, i, term_at(s, &b->pieces[i]), s->dtype, from_terms);
    }
    ct_status status = b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
    for (size_t i = 0; from_terms && i < s->n_pieces; i++) {
        if (b->pieces[i].copy.data != NULL) {
            b->to[n_copies] = b->pieces[i].copy;
            b->from[n_copies++] = b->pieces[i].span;
        }
    }
    return status == CT_OK ? b->device->copy(b->stream, b->to, b->from, n_copies, err)
                           : status;
}

static ct_status
run_rule(ct_bmuf *b, ct_rule rule, const ct_rule_coef *coef, size_t n_spans,
         ct_error *err)
{
    const ct_update update = {
        .rule = rule, .coefs = coef, .spans = b->spans, .n_spans = n_spans};
    return b->device->update(b->stream, &b->table, &update, err);
}

/* This rank's terms of an average: by CT_RULE_block_share of the parameters, by
 * CT_RULE_block_delta of the parameter delta. */
static ct_status
fill_terms(ct_bmuf *b, ct_rule rule, int world_size, const batch *s, ct_error *err)
{
    const ct_rule_coef coef = {.block_share = ct_block_share_of(world_size)};
    for (size_t i = 0; i < s->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = p->span.n,
            .grad = p->span.data,
            .param = term_at(s, p),
            .dtype = s->dtype,
            .grad_dtype = p->span.dtype,
            .state_dtype = s->dtype,
        };
        if (rule == CT_RULE_block_delta) {
            b->spans[i].state[0] = flat_at(&b->global, s->dtype, p->at);
        }
    }
    return run_rule(b, rule, &coef, s->n_pieces, err);
}

/* Moves momentum, global model and parameters by the average delta in the terms; with a
 * pending block the parameters keep their own change since the block's end. */
static ct_status
move_model(ct_bmuf *b, const batch *s, ct_error *err)
{
    const ct_bmuf_config *config = &b->config;
    const ct_rule_coef coef = {
        .block_momentum = {.momentum = config->momentum,
                           .lr = config->lr,
                           .reach = config->reach,
                           .look = (int)config->look}
    };
    for (size_t i = 0; i < s->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = p->span.n,
            .grad = term_at(s, p),
            .param = p->span.data,
            .state = {flat_at(&b->global, s->dtype, p->at),
                      flat_at(&b->momentum, s->dtype, p->at),
                      b->is_pending ? flat_at(&b->pending, s->dtype, p->at) : NULL},
            .copy = p->copy.data,
            .dtype = p->span.dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
            .copy_dtype = p->copy.dtype,
        };
    }
    return run_rule(b, b->is_pending ? CT_RULE_block_rejoin : CT_RULE_block_momentum,
                    &coef, s->n_pieces, err);
}

/* ---- the global model and the momentum ------------------------------------------- */

static ct_status
copy_flats(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
           bool from_flat, ct_error *err)
{
    ct_status status = reserve_operands(b, list->n, err);
    if (status == CT_OK) {
        status = check_unchanged(b, list, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = first_batch(list, d, 0);
        while (status == CT_OK && next_batch(&s, b->pieces)) {
            status = copy_flat(b, flat, &s, from_flat, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_save(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *to,
             ct_error *err)
{
    return copy_flats(b, flat, to, true, err);
}

/* A pending average needs memory for the sums, too. */
static ct_status
reserve_pending(ct_bmuf *b, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = reserve_flat(b, &b->pending, d, err);
        if (status == CT_OK) {
            status = reserve_flat(b, &b->sums, d, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_load(ct_bmuf *b, const ct_bmuf_flat *flat, const ct_bmuf_list *from,
             ct_error *err)
{
    const bool pends = flat == &b->pending;
    ct_status status = pends ? reserve_pending(b, err) : CT_OK;
    b->alike = b->alike && flat != &b->global;
    if (status == CT_OK) {
        status = copy_flats(b, flat, from, false, err);
    }
    if (pends) {
        b->is_pending = status == CT_OK;
    }
    return status;
}

ct_status
ct_bmuf_start(ct_bmuf *b, const ct_bmuf_list *list, ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
    if (b->config.momentum == 0.0) {
        release_flats(b);
        return status;
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        b->n[d] = n[d];
        status = reserve_flat(b, &b->global, d, err);
        if (status == CT_OK) {
            status = reserve_zeros(b, &b->momentum, d, err);
        }
        if (status == CT_OK && ct_bmuf_is_quantized(&b->config)) {
            status = reserve_zeros(b, &b->residual, d, err);
        }
    }
    b->alike = false;
    return status == CT_OK ? copy_flats(b, &b->global, list, false, err) : status;
}

/* Continues a checksum over memory of the device, piece by piece on the host. */
static ct_status
sum_memory(const ct_bmuf *b, const char *data, size_t bytes, uint32_t *sum,
           ct_error *err)
{
    enum {
        PIECE = 1 << 20
    };
    char *held = ct_alloc(PIECE);
    ct_status status = CT_OK;
    if (held == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to sum a model up");
    }
    for (size_t at = 0; status == CT_OK && at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        status = b->device->transfer(b->stream, held, data + at, n, err);
        *sum = ct_crc32c(*sum, held, n);
    }
    ct_free(held);
    return status;
}

static ct_status
sum_model(const ct_bmuf *b, int64_t *result, ct_error *err)
{
    uint32_t sum = 0;
    ct_status status = CT_OK;
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = sum_memory(b, b->global.memory[d].data,
                            b->n[d] * ct_dtype_size((ct_dtype)d), &sum, err);
    }
    *result = sum;
    return status;
}

/* The next collective is behind the kernels so far. */
static ct_status
follow(const ct_bmuf *b, ct_comm *comm, ct_status status, ct_error *err)
{
    return status == CT_OK ? ct_comm_follow(comm, b->stream, err) : status;
}

/* Gathers a number of each rank, by way of memory that the group takes. */
static ct_status
gather_numbers(ct_bmuf *b, ct_comm *comm, int64_t own, int64_t *numbers, ct_error *err)
{
    const size_t n = (size_t)comm->world_size;
    ct_status status = b->device->scratch_grow(&b->wire, (n + 1) * sizeof own, err);
    if (status != CT_OK) {
        return status;
    }
    int64_t *there = b->wire.data;
    const ct_span in = {there + n, 1, CT_I64}, out = {there, n, CT_I64};
    status = b->device->transfer(b->stream, in.data, &own, sizeof own, err);
    if (status == CT_OK) {
        status = ct_comm_all_gather(comm, &out, &in, err);
    }
    return status == CT_OK
               ? b->device->transfer(b->stream, numbers, there, n * sizeof own, err)
               : status;
}

/* For the first block after a start or a load: compares checksums of the models. */
static ct_status
check_alike(ct_bmuf *b, ct_comm *comm, ct_error *err)
{
    int64_t own;
    int64_t *sums = ct_calloc((size_t)comm->world_size, sizeof *sums);
    if (sums == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %d sums", comm->world_size);
    }
    ct_status status = sum_model(b, &own, err);
    if (status == CT_OK) {
        status = gather_numbers(b, comm, own, sums, err);
    }
    for (int rank = 1; status == CT_OK && rank < comm->world_size; rank++) {
        if (sums[rank] != sums[0]) {
            status = ct_fail(err, CT_EINVAL,
                             "the block of rank %d began with other parameters than "
                             "that of rank 0: load the same on all ranks, or have "
                             "warmup_iterations, after which all take over rank 0's",
                             rank);
        }
    }
    b->alike = status == CT_OK;
    ct_free(sums);
    return status;
}

static ct_status
check_block(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = check_unchanged(b, list, err);
    return status == CT_OK && !b->alike ? check_alike(b, comm, err) : status;
}

/* ---- sums in quantized values of 8 or 4 bits -------------------------------------
 *
 * Every rank sends the quantized values of each part of the elements to the rank that
 * sums this part, and that rank sends the quantized sum to all: 2 (W - 1) / W times the
 * quantized bytes, as a ring's all_reduce, with the same bits on all ranks. The
 * quantization error is kept as a residual and added to the next block's deltas. One
 * memory serves both passes of a part: the residual of this rank's quantized terms is
 * added to the sum before quantization, and then holds the error of both.
 *
 * Source: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
 * Double-Pass Error-Compensated Compression", 2019, with one memory for both passes;
 * math/quantized.h for the quantized values. */

/* The elements are divided into parts of whole quantization blocks, a part for each
 * rank; the last parts may be shorter or empty. A part is sent as scales, then
 * quantized values. */
typedef struct coding {
    ct_bmuf *bmuf;
    ct_comm *comm;
    int bits;
    size_t part;         /* elements */
    size_t values_begin; /* bytes before a part's quantized values */
    size_t part_bytes;
    ct_span terms;
    float *residual;
    char *sent, *received;
} coding;

static ct_status
lay_out(coding *c, ct_error *err)
{
    const size_t ranks = (size_t)c->comm->world_size;
    const size_t blocks = (ct_quantized_blocks(c->terms.n) + ranks - 1) / ranks;
    c->part = blocks * CT_QUANTIZED_BLOCK;
    c->values_begin = blocks * sizeof(float);
    c->part_bytes = c->values_begin + ct_quantized_bytes(c->part, c->bits);
    const size_t bytes = c->part_bytes * ranks;
    ct_status status = c->bmuf->device->scratch_grow(&c->bmuf->wire, 2 * bytes, err);
    c->sent = c->bmuf->wire.data;
    c->received = c->sent + bytes;
    return status;
}

static ct_span
rank_part(const coding *c, int rank)
{
    const size_t n = c->terms.n, at = (size_t)rank * c->part, begin = at < n ? at : n;
    const size_t left = n - begin;
    return (ct_span){
        .data = (char *)c->terms.data + begin * ct_dtype_size(c->terms.dtype),
        .n = left < c->part ? left : c->part,
        .dtype = c->terms.dtype,
    };
}

/* Quantizes a part, and updates the residual. */
static ct_status
encode_part(const coding *c, int rank, char *to, ct_error *err)
{
    const size_t at = (size_t)rank * c->part;
    const ct_span values = rank_part(c, rank);
    void *scales = to;
    const ct_encoding encoding = {
        .values = values,
        .residual = values.n == 0 ? c->residual : c->residual + at,
        .quantized = (int8_t *)to + c->values_begin,
        .scales = scales,
        .bits = c->bits,
    };
    return values.n == 0 ? CT_OK
                         : c->bmuf->device->encode(c->bmuf->stream, &encoding, err);
}

/* Sums `parts` quantized parts, one behind the other, into the terms. */
static ct_status
decode_part(const coding *c, int rank, const char *from, size_t parts, ct_error *err)
{
    const void *scales = from;
    const ct_decoding decoding = {
        .values = rank_part(c, rank),
        .quantized = (const int8_t *)from + c->values_begin,
        .scales = scales,
        .parts = parts,
        .part_bytes = c->part_bytes,
        .factor = 1.0f,
        .bits = c->bits,
    };
    return decoding.values.n == 0
               ? CT_OK
               : c->bmuf->device->decode(c->bmuf->stream, &decoding, err);
}

/* Sends every part to the summing rank. */
static ct_status
scatter(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->part_bytes;
    const ct_span in = {c->sent, bytes * (size_t)ranks, CT_U8};
    const ct_span out = {c->received, in.n, CT_U8};
    ct_status status = CT_OK;
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = encode_part(c, rank, c->sent + (size_t)rank * bytes, err);
    }
    status = follow(c->bmuf, c->comm, status, err);
    if (status == CT_OK) {
        status = ct_comm_all_to_all(c->comm, &out, &in, err);
    }
    return status == CT_OK
               ? decode_part(c, c->comm->rank, c->received, (size_t)ranks, err)
               : status;
}

/* Sends the quantized sums to all ranks. */
static ct_status
gather(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->part_bytes;
    const ct_span in = {c->sent, bytes, CT_U8};
    const ct_span out = {c->received, bytes * (size_t)ranks, CT_U8};
    ct_status status = encode_part(c, c->comm->rank, c->sent, err);
    status = follow(c->bmuf, c->comm, status, err);
    if (status == CT_OK) {
        status = ct_comm_all_gather(c->comm, &out, &in, err);
    }
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = decode_part(c, rank, c->received + (size_t)rank * bytes, 1, err);
    }
    return status;
}

/* Replaces the terms, one for each element of their dtype, by their sums over the
 * ranks. A value that is not finite makes its quantization block NaN on all ranks. */
static ct_status
sum_quantized(ct_bmuf *b, ct_comm *comm, const ct_span *terms, ct_error *err)
{
    coding c = {
        .bmuf = b,
        .comm = comm,
        .bits = b->config.delta_bits,
        .terms = *terms,
        .residual = b->residual.memory[terms->dtype].data,
    };
    ct_status status = lay_out(&c, err);
    if (status == CT_OK) {
        status = scatter(&c, err);
    }
    return status == CT_OK ? gather(&c, err) : status;
}

/* ---- sums over the ranks, and their use ------------------------------------------ */

typedef struct reduction {
    ct_bmuf *bmuf;
    ct_comm *comm;
    const ct_bmuf_list *list;
    bool averages; /* the tensors become their average; else deltas move the model */
} reduction;

static ct_status
make_terms(const reduction *r, const batch *s, ct_error *err)
{
    return fill_terms(r->bmuf, r->averages ? CT_RULE_block_share : CT_RULE_block_delta,
                      r->comm->world_size, s, err);
}

static ct_status
use_terms(const reduction *r, const batch *s, ct_error *err)
{
    return r->averages ? copy_terms(r->bmuf, s, true, err)
                       : move_model(r->bmuf, s, err);
}

static bool
is_quantized(const reduction *r)
{
    return !r->averages && ct_bmuf_is_quantized(&r->bmuf->config);
}

static ct_status
sum_terms(const reduction *r, const batch *s, ct_error *err)
{
    const ct_span terms = terms_of(s);
    if (is_quantized(r)) {
        return sum_quantized(r->bmuf, r->comm, &terms, err);
    }
    ct_status status = follow(r->bmuf, r->comm, CT_OK, err);
    return status == CT_OK ? ct_comm_all_reduce(r->comm, &terms, CT_REDUCE_SUM, err)
                           : status;
}

/* Batch by batch; quantized values in a single batch. */
static ct_status
reduce_batches(const reduction *r, int dtype, ct_error *err)
{
    batch s =
        first_batch(r->list, dtype, is_quantized(r) ? 0 : r->comm->ops->batch_bytes);
    ct_status status = CT_OK;
    while (status == CT_OK && next_batch(&s, r->bmuf->pieces)) {
        status = reserve_terms(r->bmuf, &s, err);
        if (status == CT_OK) {
            status = make_terms(r, &s, err);
        }
        if (status == CT_OK) {
            status = sum_terms(r, &s, err);
        }
        if (status == CT_OK) {
            status = use_terms(r, &s, err);
        }
    }
    return status;
}

/* A batch may be filled before the last batch is used, so there are two places. */
typedef struct streamed {
    const reduction *reduction;
    batch filled, used;
    ct_status status; /* the first failure of a piece */
    ct_error *err;
} streamed;

/* The other ranks use the piece in any case: after a failure all elements are NaN. */
static void
fill_piece(void *arg, size_t at, size_t n, void *terms)
{
    streamed *t = arg;
    (void)at;
    t->filled.most = n;
    if (t->status == CT_OK && next_batch(&t->filled, t->reduction->bmuf->pieces)) {
        t->filled.terms = terms;
        t->status = make_terms(t->reduction, &t->filled, t->err);
    }
    if (t->status != CT_OK) {
        memset(terms, 0xFF, n * ct_dtype_size(t->filled.dtype));
    }
}

static void
use_piece(void *arg, size_t at, size_t n, const void *const *terms)
{
    streamed *t = arg;
    const reduction *r = t->reduction;
    (void)at;
    t->used.most = n;
    if (t->status == CT_OK && next_batch(&t->used, r->bmuf->pieces)) {
        t->status = reserve_terms(r->bmuf, &t->used, t->err);
    }
    if (t->status == CT_OK) {
        ct_reduce(t->used.terms, terms, (size_t)r->comm->world_size, n, t->used.dtype,
                  CT_REDUCE_SUM);
        t->status = use_terms(r, &t->used, t->err);
    }
}

static ct_status
reduce_stream(const reduction *r, int dtype, size_t n, ct_error *err)
{
    streamed t = {
        .reduction = r,
        .filled = first_batch(r->list, dtype, 0),
        .used = first_batch(r->list, dtype, 0),
        .err = err,
    };
    const ct_stream stream = {.n = n,
                              .dtype = (ct_dtype)dtype,
                              .arg = &t,
                              .fill = fill_piece,
                              .use = use_piece};
    ct_status status = n == 0 ? CT_OK : r->comm->ops->stream(r->comm, &stream, err);
    return status == CT_OK ? t.status : status;
}

static ct_status
reduce_all(const reduction *r, const size_t *n, ct_error *err)
{
    const bool streams = r->comm->ops->stream != NULL &&
                         r->comm->world_size <= MOST_STREAMED && !is_quantized(r);
    ct_status status = reserve_operands(r->bmuf, r->list->n, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = streams ? reduce_stream(r, d, n[d], err) : reduce_batches(r, d, err);
    }
    return status;
}

ct_status
ct_bmuf_average(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const reduction r = {b, comm, list, .averages = true};
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
    return status == CT_OK ? reduce_all(&r, n, err) : status;
}

ct_status
ct_bmuf_synchronize(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const reduction r = {b, comm, list, .averages = false};
    if (b->config.momentum == 0.0) {
        return ct_bmuf_average(b, comm, list, err);
    }
    ct_status status = check_block(b, comm, list, err);
    return status == CT_OK ? reduce_all(&r, b->n, err) : status;
}

/* ---- one rank's model for all ---------------------------------------------------- */

static ct_status
broadcast_batch(ct_bmuf *b, ct_comm *comm, int root, batch *s, ct_error *err)
{
    ct_status status = reserve_terms(b, s, err);
    if (status == CT_OK) {
        status = copy_terms(b, s, false, err);
    }
    status = follow(b, comm, status, err);
    if (status == CT_OK) {
        const ct_span terms = terms_of(s);
        status = ct_comm_broadcast(comm, &terms, root, err);
    }
    return status == CT_OK ? copy_terms(b, s, true, err) : status;
}

static ct_status
broadcast_all(ct_bmuf *b, ct_comm *comm, int root, const ct_bmuf_list *list,
              ct_error *err)
{
    size_t n[CT_BMUF_DTYPES] = {0};
    ct_status status = count_elements(list, n, err);
    if (status == CT_OK) {
        status = reserve_operands(b, list->n, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        batch s = first_batch(list, d, comm->ops->batch_bytes);
        while (status == CT_OK && next_batch(&s, b->pieces)) {
            status = broadcast_batch(b, comm, root, &s, err);
        }
    }
    return status;
}

ct_status
ct_bmuf_take_over(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = broadcast_all(b, comm, 0, list, err);
    if (status == CT_OK) {
        status = ct_bmuf_start(b, list, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* The root keeps the momentum, so the root loads the global model and the others start
 * anew. */
ct_status
ct_bmuf_adopt(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    const int root = b->root;
    ct_status status = broadcast_all(b, comm, root, list, err);
    if (status != CT_OK || b->config.momentum == 0.0) {
        return status;
    }
    status = comm->rank == root ? ct_bmuf_load(b, &b->global, list, err)
                                : ct_bmuf_start(b, list, err);
    status = follow(b, comm, status, err);
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        const ct_span all = {b->momentum.memory[d].data, b->n[d], (ct_dtype)d};
        status = ct_comm_broadcast(comm, &all, root, err);
    }
    b->alike = status == CT_OK;
    return status;
}

/* ---- blocks whose average is applied some updates after their end ---------------- */

/* Begins the sum of the ranks' deltas at the block's end. */
static ct_status
begin_sum(ct_bmuf *b, ct_comm *comm, ct_dtype dtype, ct_error *err)
{
    const ct_rule_coef coef = {.block_share = ct_block_share_of(comm->world_size)};
    const ct_update_span span = {
        .n = b->n[dtype],
        .grad = b->pending.memory[dtype].data,
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
    ct_status status = b->device->update(b->stream, &b->table, &update, err);
    status = follow(b, comm, status, err);
    return status == CT_OK ? ct_comm_start(comm, &sum, &b->work[dtype], err) : status;
}

/* Waits for all in the order of their starts; the first failure is returned. */
static ct_status
wait_for_sums(ct_bmuf *b, ct_comm *comm, int n_begun, ct_error *err)
{
    ct_status status = CT_OK;
    for (int d = 0; d < n_begun; d++) {
        ct_error *reported = status == CT_OK ? err : NULL;
        if (b->n[d] != 0) {
            const ct_status ended = ct_comm_wait(comm, b->work[d], reported);
            status = status == CT_OK ? ended : status;
        }
        b->work[d] = NULL;
    }
    b->is_under_way = false;
    return status;
}

/* Ends collectives without use of the results. */
static void
drop_sums(ct_bmuf *b, ct_comm *comm, int n_begun)
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
        drop_sums(b, comm, d);
    }
    return status;
}

ct_status
ct_bmuf_begin(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = check_block(b, comm, list, err);
    if (status == CT_OK) {
        status = ct_bmuf_load(b, &b->pending, list, err);
    }
    if (status == CT_OK) {
        status = begin_sums(b, comm, err);
    }
    b->is_pending = status == CT_OK;
    return status;
}

static ct_status
apply_sums(ct_bmuf *b, const ct_bmuf_list *list, int dtype, ct_error *err)
{
    batch s = first_batch(list, dtype, 0);
    ct_status status = CT_OK;
    while (status == CT_OK && next_batch(&s, b->pieces)) {
        s.terms = flat_at(&b->sums, s.dtype, s.start);
        status = move_model(b, &s, err);
    }
    return status;
}

ct_status
ct_bmuf_finish(ct_bmuf *b, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    ct_status status = check_unchanged(b, list, err);
    if (status == CT_OK) {
        status = reserve_operands(b, list->n, err);
    }
    if (status == CT_OK && !b->is_under_way) {
        status = begin_sums(b, comm, err);
    }
    if (status == CT_OK) {
        status = wait_for_sums(b, comm, CT_BMUF_DTYPES, err);
    }
    for (int d = 0; status == CT_OK && d < CT_BMUF_DTYPES; d++) {
        status = apply_sums(b, list, d, err);
    }
    b->is_pending = status != CT_OK;
    return status;
}

void
ct_bmuf_abandon(ct_bmuf *b, ct_comm *comm)
{
    if (b->is_under_way) {
        drop_sums(b, comm, CT_BMUF_DTYPES);
    }
    b->is_pending = false;
}
