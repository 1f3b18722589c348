/* One rule's part of an update where more than a pass over elements is needed: factored
 * moments, trust ratios, Muon's matrices, and parameters of which each rank has a part.
 */
#include "core/optim/run.h"

#include "core/base/alloc.h"
#include "core/optim/kinds.h"
#include "core/optim/muon.h"

#include <math.h>

/* What ranks do together about parameters of which each has a part. Whole parameters
 * are passed over. */

/* The group of spans[i]; NULL where the parameter is whole. */
static inline ct_comm *
ct_optim_comm_borrow(const ct_optim_share *share, size_t i)
{
    return share->params[share->owner[i]].part.comm;
}

/* A part as a rank tells of it. */
typedef struct ct_optim_part {
    uint64_t owner; /* the parameter's number */
    uint64_t begin, n, whole;
} ct_optim_part;

/* All parts of one group, of n parameters. Lies in the room, up to the next call. */
typedef struct ct_optim_parts {
    size_t n;
    const size_t *spans;      /* their numbers in the share */
    const ct_optim_part *all; /* [rank][n] */
} ct_optim_parts;

static inline const ct_optim_part *
ct_optim_part_of(const ct_optim_parts *parts, size_t rank, size_t number)
{
    return &parts->all[rank * parts->n + number];
}

/* Muon's share of an update: momentum, then for each matrix its
 * direction, made orthogonal, then the step. */

/* The three steps of one matrix or part of one, from the momentum on. */

/* The direction of what is here of spans[i], of norm 1 as a whole, at `to`. */
/* Makes the matrix of spans[i] at the beginning of room->matrices orthogonal; *result
 * is where in them it is then. */
/* Steps spans[i] along what is here of such a matrix. */

/* ---- room --------------------------------------------------------------------------
 */

void
ct_optim_room_fini(const ct_device *device, ct_optim_room *room)
{
    device->scratch_release(&room->partial);
    device->scratch_release(&room->sums);
    device->scratch_release(&room->settled);
    device->scratch_release(&room->factors);
    device->scratch_release(&room->factor_sums);
    device->scratch_release(&room->matrices);
    device->scratch_release(&room->exchange);
    ct_free(room->list);
    ct_free(room->places);
    ct_free(room->pairs);
    ct_free(room->described);
    ct_free(room->numbers);
}

ct_status
ct_optim_room_reserve(ct_optim_room *room, size_t n, ct_error *err)
{
    _Static_assert(sizeof(ct_factored) >= 2 * sizeof(ct_span), "two lists of spans");
    ct_status status =
        ct_grow(&room->list, &room->list_capacity, n, sizeof(ct_factored), err);
    if (status == CT_OK) {
        status =
            ct_grow(&room->places, &room->places_capacity, n, sizeof(ct_span), err);
    }
    return status == CT_OK ? ct_grow(&room->pairs, &room->pairs_capacity, n,
                                     2 * sizeof(ct_span), err)
                           : status;
}

static bool
is_adafactor(ct_rule rule)
{
    return rule == CT_RULE_adafactor || rule == CT_RULE_adafactor_momentum;
}

static size_t
matrices_of(const ct_update_span *span)
{
    return ct_update_whole(span) / (span->rows * span->cols);
}

static bool
is_factored(const ct_optim_share *share, size_t i)
{
    const ct_update_span *span = &share->spans[i];
    return ct_update_whole(span) != 0 && share->coefs[span->coef].adafactor.factored;
}

static size_t
factor_elems(const ct_update_span *span)
{
    return matrices_of(span) * (span->rows + span->cols);
}

/* Both factors of one span, those of the columns behind those of the rows. */
static size_t
factor_bytes(const ct_update_span *span)
{
    return factor_elems(span) * ct_dtype_size(ct_update_real(span));
}

/* How much of the device's memory a share takes. */
typedef struct needs {
    size_t factors, factor_sums, matrices; /* in bytes */
} needs;

/* What directions are in: bfloat16 as the original's, but float64 stays. */
static ct_dtype
ct_optim_muon_dtype(const ct_update_span *span)
{
    const ct_dtype real = ct_update_real(span);
    return real == CT_F64 ? CT_F64 : CT_BF16;
}

static ct_orthogonal
orthogonal_of(const ct_optim_share *share, size_t i)
{
    const ct_update_span *span = &share->spans[i];
    const ct_muon_coef *coef = &share->coefs[span->coef].muon;
    return (ct_orthogonal){
        .rows = span->rows,
        .cols = span->cols,
        .dtype = ct_optim_muon_dtype(span),
        .a = coef->a,
        .b = coef->b,
        .c = coef->c,
        .n_steps = coef->n_steps,
    };
}

/* Bytes of room->matrices that spans[i] takes. */
static size_t
ct_optim_muon_bytes(const ct_optim_share *share, size_t i)
{
    const ct_orthogonal o = orthogonal_of(share, i);
    return ct_orthogonal_bytes(&o);
}

static needs
needs_of(const ct_optim_share *share)
{
    needs most = {0};
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (share->update.rule == CT_RULE_muon) {
            const size_t bytes = ct_optim_muon_bytes(share, i);
            most.matrices = bytes > most.matrices ? bytes : most.matrices;
        }
        else if (is_adafactor(share->update.rule) && is_factored(share, i)) {
            most.factors += factor_bytes(span);
            most.factor_sums += factor_elems(span) * sizeof(double);
        }
    }
    return most;
}

static ct_status
reserve(const ct_optim_share *share, ct_error *err)
{
    ct_optim_room *room = share->room;
    const needs most = needs_of(share);
    const size_t sums = CT_MEASURES * share->update.n_spans * sizeof(double);
    const struct {
        ct_scratch *scratch;
        size_t bytes;
    } all[] = {
        {&room->sums,        sums                                             },
        {&room->settled,     share->update.n_spans * sizeof(ct_rule_coef)     },
        {&room->factors,     most.factors                                     },
        {&room->factor_sums, most.factor_sums                                 },
        {&room->matrices,    most.matrices                                    },
        {&room->exchange,    most.factor_sums > sums ? most.factor_sums : sums},
    };
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < sizeof all / sizeof *all; i++) {
        status = share->device->scratch_grow(all[i].scratch, all[i].bytes, err);
    }
    return status;
}

/* Is spans[i] the first of its group, or the first that is whole? */
static bool
ct_optim_is_first(const ct_optim_share *share, size_t i)
{
    const ct_comm *comm = ct_optim_comm_borrow(share, i);
    size_t k = 0;
    while (ct_optim_comm_borrow(share, k) != comm) {
        k++;
    }
    return k == i;
}

enum {
    NUMBERS = sizeof(ct_optim_part) / sizeof(int64_t)
};

/* This rank's parts of one group; how many there are. */
static size_t
describe(const ct_optim_share *share, const ct_comm *comm, ct_optim_part *to,
         size_t *spans)
{
    size_t n = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (ct_optim_comm_borrow(share, i) == comm) {
            to[n] = (ct_optim_part){share->owner[i], span->begin, span->n, span->whole};
            spans[n++] = i;
        }
    }
    return n;
}

/* Room for own parts, all ranks' and the numbers of spans. */
static ct_status
parts_reserve(ct_optim_room *room, size_t ranks, size_t n, ct_error *err)
{
    ct_status status = ct_grow(&room->described, &room->described_capacity,
                               (ranks + 1) * n, sizeof(ct_optim_part), err);
    return status == CT_OK ? ct_grow(&room->numbers, &room->numbers_capacity, n,
                                     sizeof(size_t), err)
                           : status;
}

/* Brings together what the ranks have, a collective of the group. */
static ct_status
ct_optim_parts_gather(const ct_optim_share *share, ct_comm *comm, ct_optim_parts *parts,
                      ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    ct_optim_room *room = share->room;
    ct_status status = parts_reserve(room, ranks, share->update.n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    ct_optim_part *own = room->described, *all = own + share->update.n_spans;
    const size_t n = describe(share, comm, own, room->numbers);
    const ct_span in = {own, n * NUMBERS, CT_I64};
    const ct_span out = {all, ranks * n * NUMBERS, CT_I64};
    *parts = (ct_optim_parts){n, room->numbers, all};
    return comm->ops->all_gather(comm, &out, &in, err);
}

/* One parameter's parts of all ranks. */
static ct_status
check_parts(const ct_optim_parts *parts, size_t number, size_t ranks, ct_error *err)
{
    const ct_optim_part *first = ct_optim_part_of(parts, 0, number);
    const unsigned long long owner = first->owner, whole = first->whole;
    unsigned long long end = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        const ct_optim_part *part = ct_optim_part_of(parts, rank, number);
        if (part->owner != owner || part->whole != whole) {
            return ct_fail(err, CT_EINVAL,
                           "rank %zu has a gradient of parameter %llu of %llu elements "
                           "where rank 0 has one of parameter %llu of %llu: all ranks "
                           "need gradients of the same parameters",
                           rank, (unsigned long long)part->owner,
                           (unsigned long long)part->whole, owner, whole);
        }
        if (part->begin != end && part->n != 0) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %llu: the part of rank %zu begins at element "
                           "%llu, and the ranks before it have %llu: parts have to "
                           "follow each other in rank order",
                           owner, rank, (unsigned long long)part->begin, end);
        }
        end += part->n;
    }
    return end == whole ? CT_OK
                        : ct_fail(err, CT_EINVAL,
                                  "parameter %llu: the parts of all ranks have %llu "
                                  "elements, and it has %llu",
                                  owner, end, whole);
}

static ct_status
check_reach(const ct_optim_share *share, const ct_comm *comm, ct_error *err)
{
    return share->device == &ct_device_cpu || comm->ops->takes_device_memory
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "the group %s of ranks that have a part each cannot reach the "
                         "memory of %s, where the parameters are",
                         comm->ops->name, share->device->name);
}

static ct_status
agree(const ct_optim_share *share, ct_comm *comm, ct_error *err)
{
    ct_optim_parts parts;
    ct_status status = ct_optim_parts_gather(share, comm, &parts, err);
    for (size_t k = 0; status == CT_OK && k < parts.n; k++) {
        status = check_parts(&parts, k, (size_t)comm->world_size, err);
    }
    return status == CT_OK ? check_reach(share, comm, err) : status;
}

/* CT_EINVAL, on all ranks, unless they have parts of the same parameters, which follow
 * each other in rank order and are all of them; and where the group cannot reach the
 * device's memory. Ranks with other numbers of parameters fail as the group's
 * collective does. */
static ct_status
ct_optim_parts_agree(const ct_optim_share *share, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = agree(share, comm, err);
        }
    }
    return status;
}

ct_status
ct_optim_share_prepare(const ct_optim_share *share, ct_error *err)
{
    if (share->update.n_spans == 0 || !ct_rule_is_measured(share->update.rule)) {
        return CT_OK;
    }
    ct_status status = reserve(share, err);
    return status == CT_OK ? ct_optim_parts_agree(share, err) : status;
}

/* ---- LAMB: all gradients together are clipped first --------------------------------
 */

/* A sum of one group in the device's memory becomes that of all its ranks. */
static ct_status
ct_optim_sum_add(const ct_optim_share *share, void *stream, ct_comm *comm, double *sums,
                 size_t n, ct_error *err)
{
    const ct_span span = {sums, n, CT_F64};
    double first; /* to read it is to wait for the stream */
    ct_status status = share->device->read(stream, sums, &first, err);
    return status == CT_OK ? comm->ops->all_reduce(comm, &span, CT_REDUCE_SUM, err)
                           : status;
}

/* The sum of squares of the gradients of one group, or of those that are whole. */
static ct_status
lamb_add(const ct_optim_share *share, void *stream, ct_comm *comm, double *total,
         ct_error *err)
{
    const ct_device *device = share->device;
    ct_span *grads = share->room->list;
    double *const on_device = share->room->sums.data;
    size_t n = 0;
    double sum = 0.0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (ct_optim_comm_borrow(share, i) == comm) {
            grads[n++] = (ct_span){span->grad, span->n, span->grad_dtype};
        }
    }
    ct_status status =
        device->norm(stream, &share->room->partial, 2.0, grads, n, on_device, err);
    if (status == CT_OK && comm != NULL) {
        status = ct_optim_sum_add(share, stream, comm, on_device, 1, err);
    }
    if (status == CT_OK) {
        status = device->read(stream, on_device, &sum, err);
    }
    *total += sum;
    return status;
}

static ct_status
lamb_clip(ct_optim_share *share, void *stream, ct_error *err)
{
    const size_t n = share->update.n_spans;
    double sum = 0.0;
    bool wanted = false;
    ct_status status = CT_OK;
    for (size_t i = 0; i < n; i++) {
        wanted = wanted || share->coefs[share->spans[i].coef].lamb.max_grad_norm > 0.0;
    }
    if (!wanted) {
        return CT_OK;
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        if (ct_optim_is_first(share, i)) {
            status = lamb_add(share, stream, ct_optim_comm_borrow(share, i), &sum, err);
        }
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        ct_lamb_clip(&share->coefs[share->spans[i].coef].lamb, sqrt(sum));
    }
    return status;
}

/* ---- Adafactor ---------------------------------------------------------------------
 */

static ct_factored
factored_of(const ct_optim_share *share, size_t i, char *factors, double *sums)
{
    const ct_update_span *span = &share->spans[i];
    const ct_optim_param *param = &share->params[share->owner[i]];
    const ct_adafactor_coef *coef = &share->coefs[span->coef].adafactor;
    const ct_dtype real = ct_update_real(span);
    return (ct_factored){
        .matrices = matrices_of(span),
        .rows = span->rows,
        .cols = span->cols,
        .begin = span->begin,
        .n = span->n,
        .grad = span->grad,
        .sums = sums,
        .row = param->state[CT_ADAFACTOR_ROW],
        .col = param->state[CT_ADAFACTOR_COL],
        .row_factor = factors,
        .col_factor = factors + matrices_of(span) * span->rows * ct_dtype_size(real),
        .grad_dtype = span->grad_dtype,
        .state_dtype = span->state_dtype,
        .real = real,
        .grad_scale = coef->grad_scale,
        .decay = coef->beta2,
        .eps = coef->eps,
    };
}

/* Lists the parameters that are factored, and where their sums are, span by span. */
static size_t
adafactor_list(ct_optim_share *share, ct_factored *list, ct_span *sums)
{
    char *factors = share->room->factors.data;
    double *at = share->room->factor_sums.data;
    size_t n = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        ct_update_span *span = &share->spans[i];
        sums[i] = (ct_span){at, 0, CT_F64};
        if (is_factored(share, i)) {
            list[n] = factored_of(share, i, factors, at);
            span->row = list[n].row_factor;
            span->col = list[n].col_factor;
            sums[i].n = factor_elems(span);
            factors += factor_bytes(span);
            at += sums[i].n;
            n++;
        }
    }
    return n;
}

/* Those of one group, side by side for one collective. */
static ct_status
add(const ct_optim_share *share, void *stream, ct_comm *comm, const ct_span *sums,
    ct_error *err)
{
    const ct_device *device = share->device;
    double *const exchange = share->room->exchange.data;
    ct_span *apart = share->room->pairs, *packed = apart + share->update.n_spans;
    size_t n = 0, total = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        if (ct_optim_comm_borrow(share, i) == comm && sums[i].n != 0) {
            apart[n] = sums[i];
            packed[n++] = (ct_span){exchange + total, sums[i].n, CT_F64};
            total += sums[i].n;
        }
    }
    if (total == 0) {
        return CT_OK;
    }
    ct_status status = device->copy(stream, packed, apart, n, err);
    if (status == CT_OK) {
        status = ct_optim_sum_add(share, stream, comm, exchange, total, err);
    }
    return status == CT_OK ? device->copy(stream, apart, packed, n, err) : status;
}

/* sums[i], of CT_F64 and maybe empty, becomes what it is on all ranks of the group of
 * spans[i] together. In the device's memory; room->exchange holds as many. */
static ct_status
ct_optim_parts_add(const ct_optim_share *share, void *stream, const ct_span *sums,
                   ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = add(share, stream, comm, sums, err);
        }
    }
    return status;
}

static ct_status
adafactor_factor(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_device *device = share->device;
    ct_factored *list = share->room->list;
    ct_span *sums = share->room->places;
    const size_t n = adafactor_list(share, list, sums);
    ct_status status = device->factor_sums(stream, &share->room->partial, list, n, err);
    if (status == CT_OK) {
        status = ct_optim_parts_add(share, stream, sums, err);
    }
    return status == CT_OK ? device->factor(stream, list, n, err) : status;
}

/* The parameters' root mean squares, out of the settled constants into the state. */
static ct_status
adafactor_keep_rms(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_rule_coef *settled = share->room->settled.data;
    const size_t n = share->update.n_spans;
    ct_span *from = share->room->list, *to = from + n;
    for (size_t i = 0; i < n; i++) {
        const ct_optim_param *param = &share->params[share->owner[i]];
        char *const rms = (char *)&settled[i] + offsetof(ct_adafactor_coef, rms);
        from[i] = (ct_span){rms, ct_update_whole(&share->spans[i]) != 0, CT_F64};
        to[i] = (ct_span){param->state[CT_ADAFACTOR_RMS], from[i].n,
                          ct_update_real(&share->spans[i])};
    }
    return share->device->copy(stream, to, from, n, err);
}

/* ---- any rule ----------------------------------------------------------------------
 */

static ct_status
ct_optim_share_measure(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_device *device = share->device;
    double *const sums = share->room->sums.data;
    ct_rule_coef *const settled = share->room->settled.data;
    ct_span *const places = share->room->places;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        places[i] = (ct_span){sums + CT_MEASURES * i, CT_MEASURES, CT_F64};
        share->spans[i].settled = &settled[i];
    }
    ct_status status =
        device->measure(stream, &share->room->partial, &share->update, sums, err);
    if (status == CT_OK) {
        status = ct_optim_parts_add(share, stream, places, err);
    }
    return status == CT_OK ? device->settle(stream, &share->update, sums, settled, err)
                           : status;
}

static ct_status
measured_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_status status = ct_optim_share_measure(share, stream, err);
    if (status == CT_OK && is_adafactor(share->update.rule)) {
        status = adafactor_keep_rms(share, stream, err);
    }
    return status == CT_OK ? share->device->update(stream, &share->update, err)
                           : status;
}

static ct_status
ct_optim_muon_direction(const ct_optim_share *share, void *stream, size_t i, void *to,
                        ct_error *err)
{
    ct_update_span direction = share->spans[i];
    ct_update update = share->update;
    direction.param = to;
    direction.dtype = ct_optim_muon_dtype(&share->spans[i]);
    direction.copy = direction.ema = NULL;
    direction.rounding = NULL;
    update.spans = &direction;
    update.n_spans = 1;
    return share->device->update(stream, &update, err);
}

static ct_status
ct_optim_muon_orthogonalize(const ct_optim_share *share, void *stream, size_t i,
                            void **result, ct_error *err)
{
    ct_optim_room *room = share->room;
    const ct_orthogonal o = orthogonal_of(share, i);
    return ct_orthogonal_run(share->device, stream, &room->partial, &o,
                             room->matrices.data, result, err);
}

static ct_status
ct_optim_muon_descend(const ct_optim_share *share, void *stream, size_t i,
                      void *direction, ct_error *err)
{
    ct_update_span step = share->spans[i];
    const ct_muon_coef *muon = &share->coefs[step.coef].muon;
    const double factor =
        ct_muon_rate_factor((ct_muon_adjust)muon->adjust, step.rows, step.cols);
    const ct_rule_coef coef = {
        .descend = {.decay = 1.0 - muon->lr * muon->weight_decay,
                    .step_size = muon->lr * factor}
    };
    step.grad = direction;
    step.grad_dtype = ct_optim_muon_dtype(&share->spans[i]);
    step.coef = 0;
    step.settled = NULL;
    const ct_update update = {
        .rule = CT_RULE_descend,
        .coefs = &coef,
        .spans = &step,
        .n_spans = 1,
        .ema_decay = share->update.ema_decay,
    };
    return share->device->update(stream, &update, err);
}

static ct_status
run_whole(const ct_optim_share *share, void *stream, size_t i, ct_error *err)
{
    void *direction = NULL;
    ct_status status =
        ct_optim_muon_direction(share, stream, i, share->room->matrices.data, err);
    if (status == CT_OK) {
        status = ct_optim_muon_orthogonalize(share, stream, i, &direction, err);
    }
    return status == CT_OK ? ct_optim_muon_descend(share, stream, i, direction, err)
                           : status;
}

typedef struct deal {
    ct_optim_share *share;
    void *stream;
    ct_comm *comm;
    ct_dtype dtype;
    ct_optim_parts parts;
    size_t *matrices; /* numbers among the parts, the costliest first */
    size_t n_matrices;
    size_t *loads;     /* elements that rank r sends rank s: [r * ranks + s] */
    size_t first, end; /* the hand: matrices[first] up to matrices[end] */
    size_t slot;       /* elements of a message */
} deal;

static size_t
ranks_of(const deal *d)
{
    return (size_t)d->comm->world_size;
}

static double
cost_of(const deal *d, size_t number)
{
    const ct_update_span *span = &d->share->spans[d->parts.spans[number]];
    const double rows = (double)span->rows, cols = (double)span->cols;
    return rows * cols * (rows < cols ? rows : cols);
}

/* All of the dtype, the costliest first, so that those of a hand cost about as much. */
static void
list_matrices(deal *d)
{
    d->n_matrices = 0;
    for (size_t number = 0; number < d->parts.n; number++) {
        const ct_update_span *span = &d->share->spans[d->parts.spans[number]];
        if (ct_update_whole(span) == 0 || ct_optim_muon_dtype(span) != d->dtype) {
            continue;
        }
        size_t at = d->n_matrices++;
        for (; at > 0 && cost_of(d, d->matrices[at - 1]) < cost_of(d, number); at--) {
            d->matrices[at] = d->matrices[at - 1];
        }
        d->matrices[at] = number;
    }
}

enum {
    HAND_ELEMS = 1 << 22 /* a hand of more than one matrix takes no more to send */
};

static size_t
owner_of(const deal *d, size_t m)
{
    return (m - d->first) % ranks_of(d);
}

static size_t
part_n(const deal *d, size_t rank, size_t m)
{
    return ct_optim_part_of(&d->parts, rank, d->matrices[m])->n;
}

/* Adds matrix m, the next, to the loads; the longest message then. */
static size_t
load(deal *d, size_t m)
{
    const size_t ranks = ranks_of(d), owner = owner_of(d, m);
    size_t longest = d->slot;
    for (size_t rank = 0; rank < ranks; rank++) {
        size_t *const message = &d->loads[rank * ranks + owner];
        *message += part_n(d, rank, m);
        longest = *message > longest ? *message : longest;
    }
    return longest;
}

/* As many matrices from d->end on as may be sent at once. */
static void
next_hand(deal *d)
{
    const size_t ranks = ranks_of(d);
    d->first = d->end;
    d->slot = 0;
    for (size_t i = 0; i < ranks * ranks; i++) {
        d->loads[i] = 0;
    }
    for (size_t m = d->first; m < d->n_matrices; m++) {
        const size_t longest = load(d, m);
        if (m > d->first && longest * ranks > HAND_ELEMS) {
            break;
        }
        d->slot = longest;
        d->end = m + 1;
    }
}

static char *
sent(const deal *d)
{
    return d->share->room->exchange.data;
}

/* Where this rank's part of matrix m is in its message to the owner, and where in the
 * message that comes back. */
static size_t
own_place(const deal *d, size_t m)
{
    const size_t owner = owner_of(d, m);
    size_t at = owner * d->slot;
    for (size_t k = d->first + owner; k < m; k += ranks_of(d)) {
        at += part_n(d, (size_t)d->comm->rank, k);
    }
    return at * ct_dtype_size(d->dtype);
}

static char *
received(const deal *d)
{
    return sent(d) + ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
}

static ct_status
exchange(const deal *d, ct_error *err)
{
    const size_t n = ranks_of(d) * d->slot;
    const ct_span in = {sent(d), n, d->dtype}, out = {received(d), n, d->dtype};
    double first; /* to read it is to wait for the stream */
    ct_status status =
        d->share->device->read(d->stream, d->share->room->sums.data, &first, err);
    return status == CT_OK ? d->comm->ops->all_to_all(d->comm, &out, &in, err) : status;
}

static ct_status
send_directions(const deal *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        const size_t i = d->parts.spans[d->matrices[m]];
        status = ct_optim_muon_direction(d->share, d->stream, i,
                                         sent(d) + own_place(d, m), err);
    }
    return status == CT_OK ? exchange(d, err) : status;
}

/* Brings matrix m, which is this rank's, together from the messages that came, or in
 * pieces into those that go. */
static ct_status
move(const deal *d, size_t m, char *matrix, char *messages, bool together,
     ct_error *err)
{
    const size_t size = ct_dtype_size(d->dtype), ranks = ranks_of(d);
    ct_status status = CT_OK;
    for (size_t rank = 0; status == CT_OK && rank < ranks; rank++) {
        size_t at = rank * d->slot;
        for (size_t k = d->first + owner_of(d, m); k < m; k += ranks) {
            at += part_n(d, rank, k);
        }
        const ct_optim_part *part = ct_optim_part_of(&d->parts, rank, d->matrices[m]);
        const ct_span piece = {messages + at * size, part->n, d->dtype};
        const ct_span place = {matrix + part->begin * size, part->n, d->dtype};
        status = d->share->device->copy(d->stream, together ? &place : &piece,
                                        together ? &piece : &place, 1, err);
    }
    return status;
}

static ct_status
orthogonalize_own(const deal *d, ct_error *err)
{
    void *const matrix = d->share->room->matrices.data;
    ct_status status = CT_OK;
    for (size_t m = d->first + (size_t)d->comm->rank; status == CT_OK && m < d->end;
         m += ranks_of(d)) {
        const size_t i = d->parts.spans[d->matrices[m]];
        void *result = NULL;
        status = move(d, m, matrix, received(d), true, err);
        if (status == CT_OK) {
            status = ct_optim_muon_orthogonalize(d->share, d->stream, i, &result, err);
        }
        if (status == CT_OK) {
            status = move(d, m, result, sent(d), false, err);
        }
    }
    return status == CT_OK ? exchange(d, err) : status;
}

static ct_status
descend(const deal *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        const size_t i = d->parts.spans[d->matrices[m]];
        status = ct_optim_muon_descend(d->share, d->stream, i,
                                       received(d) + own_place(d, m), err);
    }
    return status;
}

static ct_status
play_hand(deal *d, ct_error *err)
{
    const size_t bytes = 2 * ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
    ct_status status =
        d->share->device->scratch_grow(&d->share->room->exchange, bytes, err);
    if (status == CT_OK) {
        status = send_directions(d, err);
    }
    if (status == CT_OK) {
        status = orthogonalize_own(d, err);
    }
    return status == CT_OK ? descend(d, err) : status;
}

static ct_status
deal_dtype(deal *d, ct_dtype dtype, ct_error *err)
{
    ct_status status = CT_OK;
    d->dtype = dtype;
    d->end = 0;
    list_matrices(d);
    while (status == CT_OK && d->end < d->n_matrices) {
        next_hand(d);
        status = play_hand(d, err);
    }
    return status;
}

/* core/optim/run.c: these steps for the matrices of which the ranks of a group
 * have parts. Each rank makes some of them orthogonal, of which it is sent all parts
 * and sends back all. */
static ct_status
ct_optim_muon_deal(ct_optim_share *share, void *stream, ct_comm *comm, ct_error *err)
{
    deal d = {.share = share, .stream = stream, .comm = comm};
    const size_t ranks = ranks_of(&d);
    ct_status status = ct_optim_parts_gather(share, comm, &d.parts, err);
    if (status != CT_OK) {
        return status;
    }
    d.matrices = ct_calloc(d.parts.n + ranks * ranks, sizeof *d.matrices);
    if (d.matrices == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to deal out %zu matrices", d.parts.n);
    }
    d.loads = d.matrices + d.parts.n;
    status = deal_dtype(&d, CT_BF16, err);
    if (status == CT_OK) {
        status = deal_dtype(&d, CT_F64, err);
    }
    ct_free(d.matrices);
    return status;
}

static ct_status
ct_optim_muon_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_status status = ct_optim_share_measure(share, stream, err);
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = ct_optim_muon_deal(share, stream, comm, err);
        }
        else if (comm == NULL && share->spans[i].n != 0) {
            status = run_whole(share, stream, i, err);
        }
    }
    return status;
}

ct_status
ct_optim_share_run(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_rule rule = share->update.rule;
    ct_status status = CT_OK;
    if (!ct_rule_is_measured(rule)) {
        return share->device->update(stream, &share->update, err);
    }
    if (rule == CT_RULE_muon) {
        return ct_optim_muon_run(share, stream, err);
    }
    if (rule == CT_RULE_lamb) {
        status = lamb_clip(share, stream, err);
    }
    else if (is_adafactor(rule)) {
        status = adafactor_factor(share, stream, err);
    }
    return status == CT_OK ? measured_run(share, stream, err) : status;
}

/* Matrices dealt out to the ranks that have parts of them.
 *
 * A hand is a few matrices of one dtype, which go to the ranks in turn. A rank sends
 * each rank one message: its parts of that rank's matrices, one behind the other; and
 * gets them back orthogonal. Messages are as long as the longest. All ranks know where
 * all parts lie, so they deal alike. */
