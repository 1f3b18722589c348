/* The update by one rule, where the rule looks at a whole parameter: factored moments,
 * norms of parameters, Muon's matrices, and parameters of which each rank has a part.
 *
 * An update by a measured rule has three parts: `measure` sums over each span, ranks
 * add the sums of their parts, `settle` completes the constants on the device, and
 * `update` works with these. All that may fail is done by ct_rule_run_prepare, before
 * any state changes. */
#include "core/optim/run.h"

#include "core/base/alloc.h"
#include "core/optim/muon.h"

#include <math.h>

/* ---- buffers --------------------------------------------------------------------- */

void
ct_run_buffers_release(const ct_device *device, ct_run_buffers *b)
{
    enum {
        SCRATCH = 7
    };
    ct_scratch *const scratch[SCRATCH] = {
        &b->partial,     &b->sums,     &b->settled,  &b->factors,
        &b->factor_sums, &b->matrices, &b->exchange,
    };
    for (int i = 0; i < SCRATCH; i++) {
        device->scratch_release(scratch[i]);
    }
    for (size_t rule = 0; rule < CT_RULE_COUNT; rule++) {
        device->table_release(&b->tables[rule]);
    }
}

void
ct_run_buffers_fini(const ct_device *device, ct_run_buffers *b)
{
    ct_run_buffers_release(device, b);
    ct_free(b->list);
    ct_free(b->places);
    ct_free(b->pairs);
    ct_free(b->described);
    ct_free(b->numbers);
}

ct_status
ct_run_buffers_reserve(ct_run_buffers *b, size_t n, ct_error *err)
{
    _Static_assert(sizeof(ct_factored) >= 2 * sizeof(ct_span), "two lists of spans");
    ct_status status =
        ct_grow(&b->list, &b->list_capacity, n, sizeof(ct_factored), err);
    if (status == CT_OK) {
        status = ct_grow(&b->places, &b->places_capacity, n, sizeof(ct_span), err);
    }
    return status == CT_OK
               ? ct_grow(&b->pairs, &b->pairs_capacity, n, 2 * sizeof(ct_span), err)
               : status;
}

/* ---- parts of ranks -------------------------------------------------------------- */

/* A part as a rank describes it to the others. */
typedef struct part {
    uint64_t owner; /* the parameter's number */
    uint64_t begin, n, whole;
} part;

enum {
    NUMBERS = sizeof(part) / sizeof(int64_t)
};

/* All parts of one group of ranks, of n parameters; in the buffers up to the next call.
 */
typedef struct group_parts {
    size_t n;
    const size_t *spans; /* their numbers in the run */
    const part *all;     /* [rank][n] */
} group_parts;

static const part *
part_of(const group_parts *parts, size_t rank, size_t number)
{
    return &parts->all[rank * parts->n + number];
}

/* The group of spans[i]; NULL where the parameter is whole. */
static ct_comm *
comm_borrow(const ct_rule_run *run, size_t i)
{
    return run->params[run->owner[i]].part.comm;
}

/* Is spans[i] the first of its group, or the first that is whole? */
static bool
is_first(const ct_rule_run *run, size_t i)
{
    size_t k = 0;
    while (comm_borrow(run, k) != comm_borrow(run, i)) {
        k++;
    }
    return k == i;
}

/* Lists this rank's parts of one group; returns their number. */
static size_t
describe(const ct_rule_run *run, const ct_comm *comm, part *to, size_t *spans)
{
    size_t n = 0;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        const ct_update_span *span = &run->spans[i];
        if (comm_borrow(run, i) == comm) {
            to[n] = (part){run->owner[i], span->begin, span->n, span->whole};
            spans[n++] = i;
        }
    }
    return n;
}

/* The ranks of spans[i], as a group for numbers of the hosts. */
static ct_comm *
hosts_borrow(const ct_rule_run *run, size_t i)
{
    ct_comm *hosts = run->params[run->owner[i]].part.of_hosts;
    return hosts != NULL ? hosts : comm_borrow(run, i);
}

/* Gathers the parts of all ranks of the group of spans[first], a collective. */
static ct_status
gather_parts(const ct_rule_run *run, size_t first, group_parts *parts, ct_error *err)
{
    const ct_comm *comm = comm_borrow(run, first);
    const size_t ranks = (size_t)comm->world_size, most = run->update.n_spans;
    ct_run_buffers *b = run->buffers;
    ct_status status = ct_grow(&b->described, &b->described_capacity,
                               (ranks + 1) * most, sizeof(part), err);
    if (status == CT_OK) {
        status = ct_grow(&b->numbers, &b->numbers_capacity, most, sizeof(size_t), err);
    }
    if (status != CT_OK) {
        return status;
    }
    part *own = b->described, *all = own + most;
    const size_t n = describe(run, comm, own, b->numbers);
    const ct_span in = {own, n * NUMBERS, CT_I64};
    const ct_span out = {all, ranks * n * NUMBERS, CT_I64};
    *parts = (group_parts){n, b->numbers, all};
    return ct_comm_all_gather(hosts_borrow(run, first), &out, &in, err);
}

/* One parameter's parts of all ranks. */
static ct_status
check_parts(const group_parts *parts, size_t number, size_t ranks, ct_error *err)
{
    const part *first = part_of(parts, 0, number);
    const unsigned long long owner = first->owner, whole = first->whole;
    unsigned long long end = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        const part *p = part_of(parts, rank, number);
        if (p->owner != owner || p->whole != whole) {
            return ct_fail(err, CT_EINVAL,
                           "rank %zu has a gradient of parameter %llu of %llu elements "
                           "where rank 0 has one of parameter %llu of %llu: all ranks "
                           "need gradients of the same parameters",
                           rank, (unsigned long long)p->owner,
                           (unsigned long long)p->whole, owner, whole);
        }
        if (p->begin != end && p->n != 0) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %llu: the part of rank %zu begins at element "
                           "%llu, and the ranks before it have %llu: parts have to "
                           "follow each other in rank order",
                           owner, rank, (unsigned long long)p->begin, end);
        }
        end += p->n;
    }
    return end == whole ? CT_OK
                        : ct_fail(err, CT_EINVAL,
                                  "parameter %llu: the parts of all ranks have %llu "
                                  "elements, and it has %llu",
                                  owner, end, whole);
}

static ct_status
check_group(const ct_rule_run *run, size_t first, ct_error *err)
{
    const ct_comm *comm = comm_borrow(run, first);
    group_parts parts;
    ct_status status = gather_parts(run, first, &parts, err);
    for (size_t k = 0; status == CT_OK && k < parts.n; k++) {
        status = check_parts(&parts, k, (size_t)comm->world_size, err);
    }
    if (status == CT_OK && run->device != &ct_device_cpu &&
        !comm->ops->takes_device_memory) {
        status = ct_fail(err, CT_EINVAL,
                         "the group %s of ranks that have a part each cannot reach the "
                         "memory of %s, where the parameters are",
                         comm->ops->name, run->device->name);
    }
    return status;
}

/* CT_EINVAL, on all ranks, unless the ranks have parts of the same parameters that make
 * up each parameter in rank order, and the group can reach the device's memory. Ranks
 * with other numbers of parameters fail as the group's collective does. */
static ct_status
check_groups(const ct_rule_run *run, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < run->update.n_spans; i++) {
        if (comm_borrow(run, i) != NULL && is_first(run, i)) {
            status = check_group(run, i, err);
        }
    }
    return status;
}

/* Runs a collective of the device's memory between the work on the stream so far and
 * later work there. Unless the group orders that itself, the host waits for the stream,
 * by reading a double. */
static ct_status
collect(const ct_rule_run *run, void *stream, ct_comm *comm, const ct_request *request,
        ct_error *err)
{
    double unused;
    ct_status status =
        comm->ops->follow != NULL
            ? CT_OK
            : run->device->read(stream, run->buffers->sums.data, &unused, err);
    return status == CT_OK ? ct_comm_enqueue(comm, request, stream, err) : status;
}

/* n sums of one group in the device's memory become the sums over all its ranks. */
static ct_status
reduce(const ct_rule_run *run, void *stream, ct_comm *comm, double *sums, size_t n,
       ct_error *err)
{
    const ct_request add = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = {sums, n, CT_F64}
    };
    return collect(run, stream, comm, &add, err);
}

/* The sums of one group, side by side for one collective. */
static ct_status
reduce_group(const ct_rule_run *run, void *stream, ct_comm *comm, const ct_span *sums,
             ct_error *err)
{
    const ct_device *device = run->device;
    double *const exchange = run->buffers->exchange.data;
    ct_span *apart = run->buffers->pairs, *packed = apart + run->update.n_spans;
    size_t n = 0, total = 0;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        if (comm_borrow(run, i) == comm && sums[i].n != 0) {
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
        status = reduce(run, stream, comm, exchange, total, err);
    }
    return status == CT_OK ? device->copy(stream, apart, packed, n, err) : status;
}

/* sums[i], of CT_F64 and maybe empty, in the device's memory, becomes the sum over all
 * ranks of the group of spans[i]; buffers->exchange holds as many. */
static ct_status
reduce_parts(const ct_rule_run *run, void *stream, const ct_span *sums, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < run->update.n_spans; i++) {
        ct_comm *comm = comm_borrow(run, i);
        if (comm != NULL && is_first(run, i)) {
            status = reduce_group(run, stream, comm, sums, err);
        }
    }
    return status;
}

static ct_status
apply(const ct_rule_run *run, void *stream, const ct_update *update, ct_error *err)
{
    ct_update_table *const table = &run->buffers->tables[update->rule];
    return run->device->update(stream, table, update, err);
}

/* ---- any measured rule ----------------------------------------------------------- */

static ct_status
measure(ct_rule_run *run, void *stream, ct_error *err)
{
    const ct_device *device = run->device;
    double *const sums = run->buffers->sums.data;
    ct_rule_coef *const settled = run->buffers->settled.data;
    ct_span *const places = run->buffers->places;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        places[i] = (ct_span){sums + CT_MEASURES * i, CT_MEASURES, CT_F64};
        run->spans[i].settled = &settled[i];
    }
    ct_status status =
        device->measure(stream, &run->buffers->partial, &run->update, sums, err);
    if (status == CT_OK) {
        status = reduce_parts(run, stream, places, err);
    }
    return status == CT_OK ? device->settle(stream, &run->update, sums, settled, err)
                           : status;
}

/* ---- LAMB: all gradients together are clipped first ------------------------------ */

/* Adds the squares of the gradients of one group, or of the whole parameters. */
static ct_status
lamb_add(const ct_rule_run *run, void *stream, ct_comm *comm, double *total,
         ct_error *err)
{
    const ct_device *device = run->device;
    ct_span *grads = run->buffers->list;
    double *const on_device = run->buffers->sums.data;
    size_t n = 0;
    double sum = 0.0;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        const ct_update_span *span = &run->spans[i];
        if (comm_borrow(run, i) == comm) {
            grads[n++] = (ct_span){span->grad, span->n, span->grad_dtype};
        }
    }
    ct_status status =
        device->norm(stream, &run->buffers->partial, 2.0, grads, n, on_device, err);
    if (status == CT_OK && comm != NULL) {
        status = reduce(run, stream, comm, on_device, 1, err);
    }
    if (status == CT_OK) {
        status = device->read(stream, on_device, &sum, err);
    }
    *total += sum;
    return status;
}

/* Clips by max_grad_norm, once. */
static void
clip_coef(ct_lamb_coef *coef, double norm)
{
    const double scaled = norm * fabs(coef->grad_scale);
    if (coef->max_grad_norm > 0.0 && scaled > coef->max_grad_norm) {
        coef->grad_scale *= coef->max_grad_norm / scaled;
    }
    coef->max_grad_norm = 0.0;
}

static ct_status
lamb_clip(ct_rule_run *run, void *stream, ct_error *err)
{
    const size_t n = run->update.n_spans;
    double sum = 0.0;
    bool wanted = false;
    ct_status status = CT_OK;
    for (size_t i = 0; i < n; i++) {
        wanted = wanted || run->coefs[run->spans[i].coef].lamb.max_grad_norm > 0.0;
    }
    for (size_t i = 0; wanted && status == CT_OK && i < n; i++) {
        if (is_first(run, i)) {
            status = lamb_add(run, stream, comm_borrow(run, i), &sum, err);
        }
    }
    for (size_t i = 0; wanted && status == CT_OK && i < n; i++) {
        clip_coef(&run->coefs[run->spans[i].coef].lamb, sqrt(sum));
    }
    return status;
}

/* ---- Adafactor ------------------------------------------------------------------- */

static bool
is_adafactor(ct_rule rule)
{
    return rule == CT_RULE_adafactor || rule == CT_RULE_adafactor_momentum;
}

static bool
is_factored(const ct_rule_run *run, size_t i)
{
    const ct_update_span *span = &run->spans[i];
    return ct_update_whole(span) != 0 && run->coefs[span->coef].adafactor.factored;
}

static size_t
matrices_of(const ct_update_span *span)
{
    return ct_update_whole(span) / (span->rows * span->cols);
}

static size_t
factor_elems(const ct_update_span *span)
{
    return matrices_of(span) * (span->rows + span->cols);
}

/* Both factors of one span, the columns' behind the rows'. */
static size_t
factor_bytes(const ct_update_span *span)
{
    return factor_elems(span) * ct_dtype_size(ct_update_real(span));
}

static ct_factored
factored_of(const ct_rule_run *run, size_t i, char *factors, double *sums)
{
    const ct_update_span *span = &run->spans[i];
    const ct_optim_param *param = &run->params[run->owner[i]];
    const ct_adafactor_coef *coef = &run->coefs[span->coef].adafactor;
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
        .clip = run->update.clip,
    };
}

/* Lists the factored parameters, and span by span the place of the sums. */
static size_t
adafactor_list(ct_rule_run *run, ct_factored *list, ct_span *sums)
{
    char *factors = run->buffers->factors.data;
    double *at = run->buffers->factor_sums.data;
    size_t n = 0;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        ct_update_span *span = &run->spans[i];
        sums[i] = (ct_span){at, 0, CT_F64};
        span->rms = ct_update_whole(span) != 0
                        ? run->params[run->owner[i]].state[CT_ADAFACTOR_RMS]
                        : NULL;
        if (is_factored(run, i)) {
            list[n] = factored_of(run, i, factors, at);
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

static ct_status
adafactor_factor(ct_rule_run *run, void *stream, ct_error *err)
{
    const ct_device *device = run->device;
    ct_factored *list = run->buffers->list;
    ct_span *sums = run->buffers->places;
    const size_t n = adafactor_list(run, list, sums);
    ct_status status =
        device->factor_sums(stream, &run->buffers->partial, list, n, err);
    if (status == CT_OK) {
        status = reduce_parts(run, stream, sums, err);
    }
    return status == CT_OK ? device->factor(stream, list, n, err) : status;
}

/* ---- Muon: momentum, orthogonal direction, step ---------------------------------- */

/* The dtype of directions: bfloat16 as the original's, but float64 stays. */
static ct_dtype
muon_dtype(const ct_update_span *span)
{
    return ct_update_real(span) == CT_F64 ? CT_F64 : CT_BF16;
}

static ct_orthogonal
orthogonal_of(const ct_rule_run *run, size_t i)
{
    const ct_update_span *span = &run->spans[i];
    const ct_muon_coef *coef = &run->coefs[span->coef].muon;
    return (ct_orthogonal){
        .rows = span->rows,
        .cols = span->cols,
        .dtype = muon_dtype(span),
        .a = coef->a,
        .b = coef->b,
        .c = coef->c,
        .n_steps = coef->n_steps,
    };
}

/* Brings the momentum of spans[i] up to date and writes the direction to `to`. */
static ct_status
muon_direction(const ct_rule_run *run, void *stream, size_t i, void *to, ct_error *err)
{
    ct_update_span direction = run->spans[i];
    ct_update update = run->update;
    direction.param = to;
    direction.dtype = muon_dtype(&run->spans[i]);
    direction.copy = direction.ema = NULL;
    direction.rounding = NULL;
    update.spans = &direction;
    update.n_spans = 1;
    return apply(run, stream, &update, err);
}

/* Where the direction of spans[i] as a whole matrix has to be. */
static void *
muon_waiting(const ct_rule_run *run, size_t i)
{
    const ct_orthogonal o = orthogonal_of(run, i);
    return ct_orthogonal_waiting(&o, run->buffers->matrices.data);
}

/* Divides the matrix by the norm of the whole matrix in memory here, not by a sum over
 * ranks: the bits do not depend on how ranks divide the matrix. */
static ct_status
muon_normalize(const ct_rule_run *run, void *stream, size_t i, ct_error *err)
{
    const ct_device *device = run->device;
    ct_run_buffers *b = run->buffers;
    ct_rule_coef *const settled = b->settled.data;
    ct_update_span span = {
        .n = ct_update_whole(&run->spans[i]),
        .grad = muon_waiting(run, i),
        .param = b->matrices.data,
        .dtype = muon_dtype(&run->spans[i]),
        .grad_dtype = muon_dtype(&run->spans[i]),
        .coef = run->spans[i].coef,
    };
    const ct_update update = {
        .rule = CT_RULE_muon_normalize,
        .coefs = run->coefs,
        .spans = &span,
        .n_spans = 1,
    };
    ct_status status = device->measure(stream, &b->partial, &update, b->sums.data, err);
    if (status == CT_OK) {
        status = device->settle(stream, &update, b->sums.data, settled, err);
    }
    span.settled = settled;
    return status == CT_OK ? apply(run, stream, &update, err) : status;
}

/* Makes the matrix of spans[i], whose direction waits, orthogonal; *result is the place
 * of the outcome in buffers->matrices. */
static ct_status
muon_orthogonalize(const ct_rule_run *run, void *stream, size_t i, void **result,
                   ct_error *err)
{
    ct_run_buffers *b = run->buffers;
    const ct_orthogonal o = orthogonal_of(run, i);
    ct_status status = muon_normalize(run, stream, i, err);
    return status == CT_OK ? ct_orthogonal_run(run->device, stream, &b->partial, &o,
                                               b->matrices.data, result, err)
                           : status;
}

/* Steps spans[i] along its orthogonal direction. */
static ct_status
muon_descend(const ct_rule_run *run, void *stream, size_t i, void *direction,
             ct_error *err)
{
    ct_update_span step = run->spans[i];
    const ct_muon_coef *muon = &run->coefs[step.coef].muon;
    const double factor =
        ct_muon_lr_factor((ct_muon_adjust)muon->adjust, step.rows, step.cols);
    const ct_rule_coef coef = {
        .descend = {.decay = 1.0 - muon->lr * muon->weight_decay,
                    .step_size = muon->lr * factor}
    };
    step.grad = direction;
    step.grad_dtype = muon_dtype(&run->spans[i]);
    step.coef = 0;
    step.settled = NULL;
    const ct_update update = {
        .rule = CT_RULE_descend,
        .coefs = &coef,
        .spans = &step,
        .n_spans = 1,
        .ema_decay = run->update.ema_decay,
        .clip = run->update.clip,
    };
    return apply(run, stream, &update, err);
}

static ct_status
muon_whole(const ct_rule_run *run, void *stream, size_t i, ct_error *err)
{
    void *direction = NULL;
    ct_status status = muon_direction(run, stream, i, muon_waiting(run, i), err);
    if (status == CT_OK) {
        status = muon_orthogonalize(run, stream, i, &direction, err);
    }
    return status == CT_OK ? muon_descend(run, stream, i, direction, err) : status;
}

/* ---- Muon's matrices distributed over the ranks that have parts of them ------------
 *
 * A batch is a few matrices of one dtype, assigned to the ranks in turn. A rank sends
 * each rank one message, its parts of that rank's matrices, one behind the other, and
 * gets the orthogonal parts back. Messages are as long as the longest. All ranks know
 * the places of all parts, so all assign alike. */

enum {
    BATCH_ELEMS = 1 << 22 /* most elements to send, in a batch of several matrices */
};

typedef struct distribution {
    ct_rule_run *run;
    void *stream;
    ct_comm *comm;
    ct_dtype dtype;
    group_parts parts;
    size_t *matrices; /* numbers among the parts, the costliest first */
    size_t n_matrices;
    size_t *loads;     /* elements from rank r to rank s: [r * ranks + s] */
    size_t first, end; /* the batch: matrices[first] up to matrices[end] */
    size_t slot;       /* elements of a message */
} distribution;

static size_t
ranks_of(const distribution *d)
{
    return (size_t)d->comm->world_size;
}

/* The number in the run of matrix m's span. */
static size_t
span_number(const distribution *d, size_t m)
{
    return d->parts.spans[d->matrices[m]];
}

static double
cost_of(const distribution *d, size_t number)
{
    const ct_update_span *span = &d->run->spans[d->parts.spans[number]];
    const double rows = (double)span->rows, cols = (double)span->cols;
    return rows * cols * (rows < cols ? rows : cols);
}

/* All of the dtype, the costliest first, so that a batch's matrices cost about as much.
 */
static void
list_matrices(distribution *d)
{
    d->n_matrices = 0;
    for (size_t number = 0; number < d->parts.n; number++) {
        const ct_update_span *span = &d->run->spans[d->parts.spans[number]];
        if (ct_update_whole(span) == 0 || muon_dtype(span) != d->dtype) {
            continue;
        }
        size_t at = d->n_matrices++;
        for (; at > 0 && cost_of(d, d->matrices[at - 1]) < cost_of(d, number); at--) {
            d->matrices[at] = d->matrices[at - 1];
        }
        d->matrices[at] = number;
    }
}

static size_t
owner_of(const distribution *d, size_t m)
{
    return (m - d->first) % ranks_of(d);
}

static size_t
part_n(const distribution *d, size_t rank, size_t m)
{
    return part_of(&d->parts, rank, d->matrices[m])->n;
}

/* Adds matrix m, the next, to the loads; returns the longest message then. */
static size_t
load(distribution *d, size_t m)
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
next_batch(distribution *d)
{
    const size_t ranks = ranks_of(d);
    d->first = d->end;
    d->slot = 0;
    for (size_t i = 0; i < ranks * ranks; i++) {
        d->loads[i] = 0;
    }
    for (size_t m = d->first; m < d->n_matrices; m++) {
        const size_t longest = load(d, m);
        if (m > d->first && longest * ranks > BATCH_ELEMS) {
            break;
        }
        d->slot = longest;
        d->end = m + 1;
    }
}

static char *
sent(const distribution *d)
{
    return d->run->buffers->exchange.data;
}

static char *
received(const distribution *d)
{
    return sent(d) + ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
}

/* Elements before the rank's part of matrix m in the message between the rank and the
 * matrix's owner. */
static size_t
offset_in_message(const distribution *d, size_t rank, size_t m)
{
    size_t at = 0;
    for (size_t k = d->first + owner_of(d, m); k < m; k += ranks_of(d)) {
        at += part_n(d, rank, k);
    }
    return at;
}

/* The place of this rank's part of matrix m in the messages to and from the owner. */
static size_t
own_place(const distribution *d, size_t m)
{
    const size_t at =
        owner_of(d, m) * d->slot + offset_in_message(d, (size_t)d->comm->rank, m);
    return at * ct_dtype_size(d->dtype);
}

static ct_status
exchange(const distribution *d, ct_error *err)
{
    const size_t n = ranks_of(d) * d->slot;
    const ct_request swap = {
        .what = CT_ALL_TO_ALL,
        .in = {sent(d),     n, d->dtype},
        .out = {received(d), n, d->dtype}
    };
    return collect(d->run, d->stream, d->comm, &swap, err);
}

static ct_status
send_directions(const distribution *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        status = muon_direction(d->run, d->stream, span_number(d, m),
                                sent(d) + own_place(d, m), err);
    }
    return status == CT_OK ? exchange(d, err) : status;
}

/* Copies the parts of matrix m, this rank's own, from the received messages into the
 * matrix, or from the matrix into the messages to send. */
static ct_status
move(const distribution *d, size_t m, char *matrix, char *messages, bool together,
     ct_error *err)
{
    const size_t size = ct_dtype_size(d->dtype);
    ct_status status = CT_OK;
    for (size_t rank = 0; status == CT_OK && rank < ranks_of(d); rank++) {
        const size_t at = rank * d->slot + offset_in_message(d, rank, m);
        const part *p = part_of(&d->parts, rank, d->matrices[m]);
        const ct_span piece = {messages + at * size, p->n, d->dtype};
        const ct_span place = {matrix + p->begin * size, p->n, d->dtype};
        status = d->run->device->copy(d->stream, together ? &place : &piece,
                                      together ? &piece : &place, 1, err);
    }
    return status;
}

static ct_status
orthogonalize_own(const distribution *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first + (size_t)d->comm->rank; status == CT_OK && m < d->end;
         m += ranks_of(d)) {
        const size_t i = span_number(d, m);
        void *result = NULL;
        status = move(d, m, muon_waiting(d->run, i), received(d), true, err);
        if (status == CT_OK) {
            status = muon_orthogonalize(d->run, d->stream, i, &result, err);
        }
        if (status == CT_OK) {
            status = move(d, m, result, sent(d), false, err);
        }
    }
    return status == CT_OK ? exchange(d, err) : status;
}

static ct_status
run_batch(distribution *d, ct_error *err)
{
    const size_t bytes = 2 * ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
    ct_status status =
        d->run->device->scratch_grow(&d->run->buffers->exchange, bytes, err);
    if (status == CT_OK) {
        status = send_directions(d, err);
    }
    if (status == CT_OK) {
        status = orthogonalize_own(d, err);
    }
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        status = muon_descend(d->run, d->stream, span_number(d, m),
                              received(d) + own_place(d, m), err);
    }
    return status;
}

static ct_status
run_dtype(distribution *d, ct_dtype dtype, ct_error *err)
{
    ct_status status = CT_OK;
    d->dtype = dtype;
    d->end = 0;
    list_matrices(d);
    while (status == CT_OK && d->end < d->n_matrices) {
        next_batch(d);
        status = run_batch(d, err);
    }
    return status;
}

static ct_status
muon_distributed(ct_rule_run *run, void *stream, size_t first, ct_error *err)
{
    distribution d = {.run = run, .stream = stream, .comm = comm_borrow(run, first)};
    const size_t ranks = ranks_of(&d);
    ct_status status = gather_parts(run, first, &d.parts, err);
    if (status != CT_OK) {
        return status;
    }
    d.matrices = ct_calloc(d.parts.n + ranks * ranks, sizeof *d.matrices);
    if (d.matrices == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to distribute %zu matrices",
                       d.parts.n);
    }
    d.loads = d.matrices + d.parts.n;
    status = run_dtype(&d, CT_BF16, err);
    if (status == CT_OK) {
        status = run_dtype(&d, CT_F64, err);
    }
    ct_free(d.matrices);
    return status;
}

static ct_status
muon_run(ct_rule_run *run, void *stream, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < run->update.n_spans; i++) {
        const ct_comm *comm = comm_borrow(run, i);
        if (comm != NULL && is_first(run, i)) {
            status = muon_distributed(run, stream, i, err);
        }
        else if (comm == NULL && run->spans[i].n != 0) {
            status = muon_whole(run, stream, i, err);
        }
    }
    return status;
}

/* ---- any rule -------------------------------------------------------------------- */

static ct_status
reserve(const ct_rule_run *run, ct_error *err)
{
    ct_run_buffers *b = run->buffers;
    const size_t n = run->update.n_spans, sums = CT_MEASURES * n * sizeof(double);
    size_t factors = 0, factor_sums = 0, matrices = 0;
    for (size_t i = 0; i < n; i++) {
        if (run->update.rule == CT_RULE_muon) {
            const ct_orthogonal o = orthogonal_of(run, i);
            const size_t bytes = ct_orthogonal_bytes(&o);
            matrices = bytes > matrices ? bytes : matrices;
        }
        else if (is_adafactor(run->update.rule) && is_factored(run, i)) {
            factors += factor_bytes(&run->spans[i]);
            factor_sums += factor_elems(&run->spans[i]) * sizeof(double);
        }
    }
    const struct {
        ct_scratch *scratch;
        size_t bytes;
    } all[] = {
        {&b->sums,        sums                                   },
        {&b->settled,     n * sizeof(ct_rule_coef)               },
        {&b->factors,     factors                                },
        {&b->factor_sums, factor_sums                            },
        {&b->matrices,    matrices                               },
        {&b->exchange,    factor_sums > sums ? factor_sums : sums},
    };
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < sizeof all / sizeof *all; i++) {
        status = run->device->scratch_grow(all[i].scratch, all[i].bytes, err);
    }
    return status;
}

ct_status
ct_rule_run_prepare(const ct_rule_run *run, ct_error *err)
{
    const size_t n = run->update.n_spans;
    if (n == 0) {
        return CT_OK;
    }
    ct_status status =
        run->device->table_reserve(&run->buffers->tables[run->update.rule], n, err);
    if (status != CT_OK || !ct_rule_is_of_whole(run->update.rule)) {
        return status;
    }
    status = reserve(run, err);
    return status == CT_OK ? check_groups(run, err) : status;
}

ct_status
ct_rule_run_update(ct_rule_run *run, void *stream, ct_error *err)
{
    const ct_rule rule = run->update.rule;
    ct_status status = CT_OK;
    if (rule == CT_RULE_muon) {
        return muon_run(run, stream, err);
    }
    if (rule == CT_RULE_lamb) {
        status = lamb_clip(run, stream, err);
    }
    else if (is_adafactor(rule)) {
        status = adafactor_factor(run, stream, err);
    }
    if (status == CT_OK && ct_rule_is_measured(rule)) {
        status = measure(run, stream, err);
    }
    return status == CT_OK ? apply(run, stream, &run->update, err) : status;
}
