/* The gradients of a sharded unit: copied from the parameters, missing gradients
 * marked, reduced into the ranks' shards, in full precision or quantized. */
#include "core/fsdp/internal.h"

#include "core/comm/collectives.h"

#include <math.h>

/* ---- gradients ------------------------------------------------------------------- */

ct_status
ct_fsdp_take_grad(ct_fsdp *unit, size_t group, size_t at, const ct_span *grad, bool add,
                  bool wide, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    if (at > g->n || grad->n > g->n - at) {
        return ct_fail(err, CT_EINVAL,
                       "a gradient of %zu elements does not fit at %zu of a group of "
                       "%zu",
                       grad->n, at, g->n);
    }
    ct_status status =
        ct_fsdp_hold_grads(unit, wide ? CT_F32 : unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_device *device = unit->device;
    const ct_span place = ct_span_part(ct_fsdp_grads_of(unit, g), at, grad->n);
    return add ? device->add(unit->stream, &place, grad, 1, 1.0, err)
               : device->copy(unit->stream, &place, grad, 1, err);
}

ct_status
ct_fsdp_clear_grads(ct_fsdp *unit, size_t group, size_t at, size_t n, ct_error *err)
{
    const ct_status status = ct_fsdp_hold_grads(unit, unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_span gap =
        ct_span_part(ct_fsdp_grads_of(unit, &unit->groups[group]), at, n);
    return unit->device->zero(unit->stream, &gap, 1, err);
}

/* ---- missing gradients -----------------------------------------------------------
 *
 * Whether any rank has a gradient of a parameter travels with the gradients, without a
 * message of its own, in the signs of zeros: a sum of nothing but -0 is -0. The
 * elements of a parameter without a gradient are -0. A parameter with a gradient begins
 * with something else in every rank's part. A mistake needs a sum in which all elements
 * that are read underflow to -0. Quantized values have no -0: their senders append a
 * bit for each parameter. */

enum {
    AT_ONCE = 32,  /* spans passed to the device together, on the stack */
    LOOKED_AT = 64 /* elements of a parameter */
};

typedef struct batch {
    ct_span spans[AT_ONCE];
    size_t n;
} batch;

static ct_status
make_missing(const ct_fsdp *unit, batch *b, ct_error *err)
{
    const ct_device *device = unit->device;
    ct_status status = device->zero(unit->stream, b->spans, b->n, err);
    if (status == CT_OK) {
        status =
            device->scale(unit->stream, -1.0, (double)INFINITY, b->spans, b->n, err);
    }
    b->n = 0;
    return status;
}

/* Adds a zero of the device's, made once: -0 + 0 is 0, other values stay. */
static ct_status
make_there(ct_fsdp *unit, batch *b, ct_error *err)
{
    ct_scratch *scratch = &unit->ledger->zero;
    const bool made = scratch->data != NULL;
    ct_span zeros[AT_ONCE];
    ct_status status = unit->device->scratch_grow(scratch, sizeof(float), err);
    for (size_t i = 0; i < b->n; i++) {
        zeros[i] = (ct_span){scratch->data, 1, CT_F32};
    }
    if (status == CT_OK && !made) { /* waits, as other streams use the zero, too */
        const float zero = 0.0F;
        status = unit->device->transfer(unit->stream, scratch->data, &zero, sizeof zero,
                                        err);
    }
    if (status == CT_OK) {
        status = unit->device->add(unit->stream, b->spans, zeros, b->n, 1.0, err);
    }
    b->n = 0;
    return status;
}

/* Marks `flat`, the elements of a group from `from` on, in ranks' parts of `part`
 * elements. Overwrites the places of missing gradients. */
static ct_status
mark(ct_fsdp *unit, const ct_fsdp_presence *presence, const ct_span *flat, size_t from,
     size_t part, ct_error *err)
{
    batch missing = {.n = 0}, there = {.n = 0};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        const ct_fsdp_param *param = &presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, from, flat->n, &at);
        if (!param->there && n != 0) {
            missing.spans[missing.n++] = ct_span_part(*flat, at, n);
        }
        for (size_t end = at + n; status == CT_OK && param->there && at < end;
             at += part - at % part) { /* to the next rank's part */
            there.spans[there.n++] = ct_span_part(*flat, at, 1);
            status = there.n < AT_ONCE ? CT_OK : make_there(unit, &there, err);
        }
        if (status == CT_OK && missing.n == AT_ONCE) {
            status = make_missing(unit, &missing, err);
        }
    }
    if (status == CT_OK && missing.n != 0) {
        status = make_missing(unit, &missing, err);
    }
    return status != CT_OK || there.n == 0 ? status : make_there(unit, &there, err);
}

static bool
is_minus_zero(const void *values, size_t k, ct_dtype dtype)
{
    if (ct_dtype_size(dtype) == sizeof(uint16_t)) { /* BF16 and F16 alike */
        return ((const uint16_t *)values)[k] == 0x8000U;
    }
    const float value = ((const float *)values)[k];
    return value == 0.0F && signbit(value);
}

/* Reads the marks of the parameters with elements in the reduced `shard`, elements of
 * the group from `from` on, of two or four bytes. */
static ct_status
read_marks(const ct_fsdp *unit, ct_fsdp_presence *presence, const ct_span *shard,
           size_t from, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        ct_fsdp_param *param = &presence->params[i];
        float head[LOOKED_AT];
        size_t at, n = ct_fsdp_overlap(param, from, shard->n, &at);
        n = n < LOOKED_AT ? n : LOOKED_AT;
        if (param->there || n == 0) {
            continue;
        }
        const ct_span look = ct_span_part(*shard, at, n);
        status = unit->device->transfer(unit->stream, head, look.data,
                                        ct_fsdp_bytes_of(&look), err);
        for (size_t k = 0; status == CT_OK && !param->there && k < n; k++) {
            param->there = !is_minus_zero(head, k, shard->dtype);
        }
    }
    return status;
}

/* ---- reducing -------------------------------------------------------------------- */

static ct_status
reduce_quantized(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
                 ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
                 ct_error *err)
{
    const ct_fsdp_levels l = ct_fsdp_levels_of(comm);
    const ct_span whole = ct_fsdp_grads_of(unit, g);
    float *residual = unit->residual == NULL ? NULL : unit->residual + g->grad_at;
    const float factor = op == CT_REDUCE_MEAN ? 1.0F / (float)l.machines : 1.0F;
    ct_status status = ct_fsdp_run_within(comm, &l, CT_REDUCE_SCATTER, op, &whole, err);
    for (size_t m = 0; status == CT_OK && l.local > 1 && m < l.machines; m++) {
        const ct_span own = ct_fsdp_part_on(&l, &whole, m);
        status = presence == NULL ? CT_OK
                                  : read_marks(unit, presence, &own,
                                               (m * l.local + l.place) * part->n, err);
    }
    if (status == CT_OK) {
        status = ct_fsdp_exchange_quantized(unit, comm, &whole, residual, presence,
                                            part, factor, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : mark(unit, presence, part, (size_t)comm->rank * part->n, part->n, err);
}

/* Sums over the sharding group, then averages over the replicate group. */
static ct_status
sum_over_ranks(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
               ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
               ct_error *err)
{
    const ct_span whole = ct_fsdp_grads_of(unit, g);
    const ct_request scatter = {
        .what = CT_REDUCE_SCATTER, .op = op, .in = whole, .out = *part};
    const ct_request average = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_MEAN, .in = *part};
    ct_comm *replicate_group = unit->replicate_group;
    if (unit->config.lone_reduce) {
        return CT_OK;
    }
    ct_comm_label(comm, &unit->label, CT_REDUCE_SCATTER);
    ct_status status = unit->config.reduce_bits != 0
                           ? reduce_quantized(unit, comm, g, presence, part, op, err)
                           : ct_comm_enqueue(comm, &scatter, unit->stream, err);
    ct_comm_unlabel(comm);
    unit->label.call += status == CT_OK;
    return status != CT_OK || replicate_group == NULL
               ? status
               : ct_comm_enqueue(replicate_group, &average, unit->stream, err);
}

static ct_status
scale(const ct_fsdp *unit, double factor, const ct_span *span, ct_error *err)
{
    return factor == 1.0 ? CT_OK
                         : unit->device->scale(unit->stream, factor, (double)INFINITY,
                                               span, 1, err);
}

static ct_status
deliver(const ct_fsdp *unit, const ct_span *shard, const ct_span *part, double factor,
        bool add, ct_error *err)
{
    if (add) {
        return unit->device->add(unit->stream, shard, part, 1, factor, err);
    }
    /* Scaled in the wider dtype. */
    const bool narrows = ct_dtype_size(shard->dtype) < ct_dtype_size(part->dtype);
    ct_status status = narrows ? scale(unit, factor, part, err) : CT_OK;
    if (status == CT_OK) {
        status = unit->device->copy(unit->stream, shard, part, 1, err);
    }
    return status == CT_OK && !narrows ? scale(unit, factor, shard, err) : status;
}

/* An average needs no factor: the collective divides in the sum's own precision. */
static bool
is_average(const ct_fsdp *unit, const ct_comm *comm)
{
    return !unit->config.lone_reduce &&
           unit->config.predivide * unit->config.postdivide == (double)comm->world_size;
}

/* here: device memory for this rank's part. */
static ct_status
reduce_group(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
             ct_fsdp_presence *presence, const ct_span *here, bool add, ct_error *err)
{
    const bool average = is_average(unit, comm);
    const ct_span whole = ct_fsdp_grads_of(unit, g);
    ct_span part = ct_span_part(whole, (size_t)comm->rank * here->n, here->n);
    ct_status status =
        presence == NULL ? CT_OK : mark(unit, presence, &whole, 0, here->n, err);
    if (status == CT_OK && !average) {
        status = scale(unit, 1.0 / unit->config.predivide, &whole, err);
    }
    const bool direct = !add && part.dtype == here->dtype && !unit->config.lone_reduce;
    part = direct ? *here : part;
    if (status == CT_OK) {
        status = sum_over_ranks(unit, comm, g, presence, &part,
                                average ? CT_REDUCE_MEAN : CT_REDUCE_SUM, err);
    }
    const double factor = average ? 1.0 : 1.0 / unit->config.postdivide;
    if (status != CT_OK) {
        return status;
    }
    return direct ? scale(unit, factor, here, err)
                  : deliver(unit, here, &part, factor, add, err);
}

static ct_status
reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
       const ct_span *shard, bool add, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    const size_t n = g->n / (size_t)comm->world_size;
    const bool offload = unit->config.offload;
    ct_span here;
    if (shard->n != n || shard->dtype != g->shard) {
        return ct_fail(err, CT_EINVAL,
                       "the gradient of a shard has %zu elements of %s; expected %zu "
                       "of %s",
                       shard->n, ct_dtype_name(shard->dtype), n,
                       ct_dtype_name(g->shard));
    }
    ct_status status = ct_fsdp_hold_grads(unit, unit->config.reduce, err);
    if (status == CT_OK) {
        status = ct_fsdp_place(unit, shard, 2, &here, err);
    }
    if (status == CT_OK) {
        status = reduce_group(unit, comm, g, presence, &here, add && !offload, err);
    }
    if (status == CT_OK && offload) {
        status = ct_fsdp_download(unit, shard, &here, add, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : read_marks(unit, presence, &here, (size_t)comm->rank * n, err);
}

/* Beside the computation: all of the reduction runs on the group's stream. Quantized
 * values pass through memory of the ledger, of one stream: that of the gathers. */
ct_status
ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
               const ct_span *shard, bool add, ct_error *err)
{
    void *const stream = unit->stream;
    const bool offload = unit->config.offload;
    if (comm->stream == NULL || (!offload && unit->config.reduce_bits != 0)) {
        return reduce(unit, comm, group, presence, shard, add, err);
    }
    ct_status status = ct_comm_follow(comm, stream, err);
    if (status == CT_OK) {
        unit->reducing = true;
        unit->stream = unit->grads->stream = comm->stream;
        status = reduce(unit, comm, group, presence, shard, add, err);
        unit->stream = stream;
        if (status != CT_OK) {
            /* The caller drops gradients, of other units as well. */
            const ct_status ignored = ct_comm_precede(comm, stream, NULL);
            (void)ignored;
        }
    }
    return status;
}

ct_status
ct_fsdp_settle(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const bool reducing = unit->reducing;
    unit->reducing = false;
    return reducing ? ct_comm_precede(comm, unit->stream, err) : CT_OK;
}
