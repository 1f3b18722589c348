#include "core/fsdp/unit.h"

#include "core/base/alloc.h"
#include "core/fsdp/fsdp_codes.h"
#include "core/fsdp/fsdp_offload.h"
#include "core/fsdp/fsdp_prefetch.h"
#include "core/fsdp/fsdp_presence.h"
#include "core/comm/history.h"

#include <math.h>

enum {
    ALIGNED_ELEMS = 32 /* a group begins on a cache line whatever the dtype */
};

/* ---- layout ------------------------------------------------------------------------
 */

static size_t
padded(size_t n)
{
    return (n + ALIGNED_ELEMS - 1) / ALIGNED_ELEMS * ALIGNED_ELEMS;
}

ct_status
ct_fsdp_init(ct_fsdp *unit, const ct_device *device, const size_t *sizes,
             const bool *trainable, size_t n_groups, int world_size, ct_error *err)
{
    *unit = (ct_fsdp){.device = device};
    for (size_t i = 0; i < n_groups; i++) {
        if (sizes[i] % (size_t)world_size != 0) {
            return ct_fail(err, CT_EINVAL,
                           "group %zu has %zu elements; expected a multiple of the %d "
                           "ranks that share it",
                           i, sizes[i], world_size);
        }
    }
    ct_fsdp_group *groups = ct_calloc(n_groups + 1, sizeof *groups);
    if (groups == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a unit of %zu groups", n_groups);
    }
    size_t at = 0, grad_at = 0;
    for (size_t i = 0; i < n_groups; i++) {
        groups[i] = (ct_fsdp_group){sizes[i], at, grad_at, trainable[i], NULL};
        at += padded(sizes[i]);
        grad_at += trainable[i] ? padded(sizes[i]) : 0;
    }
    groups[n_groups] =
        (ct_fsdp_group){0, at, grad_at, false, NULL}; /* where the last end */
    unit->groups = groups;
    unit->n_groups = n_groups;
    return CT_OK;
}

void
ct_fsdp_fini(ct_fsdp *unit)
{
    ct_free(unit->groups);
    *unit = (ct_fsdp){.groups = NULL};
}

size_t
ct_fsdp_full_bytes(const ct_fsdp *unit, ct_dtype compute)
{
    return unit->groups[unit->n_groups].at * ct_dtype_size(compute);
}

size_t
ct_fsdp_grad_bytes(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(CT_F32);
}

/* ---- the account -------------------------------------------------------------------
 */

static size_t
grad_live(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(unit->grad_dtype);
}

static size_t
live(const ct_fsdp *unit)
{
    return (unit->gathered || unit->begun ? unit->full->bytes : 0) +
           (unit->holds_grads ? grad_live(unit) : 0);
}

static void
enter(ct_fsdp_ledger *ledger, size_t bytes)
{
    ledger->live += bytes;
    if (ledger->live > ledger->peak) {
        ledger->peak = ledger->live;
    }
}

void
ct_fsdp_move_account(ct_fsdp *unit, ct_fsdp_ledger *ledger)
{
    const size_t bytes = live(unit);
    unit->ledger->live -= bytes;
    unit->ledger->begun -= unit->begun;
    unit->ledger = ledger;
    unit->ledger->begun += unit->begun;
    enter(ledger, bytes);
}

/* ---- gathering ---------------------------------------------------------------------
 */

static ct_span
full_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->full->data, 0, unit->config.compute};
    return ct_span_part(all, g->at, g->n);
}

/* This rank's part is put in its place, then the others' come around it: that begins
 * only, where the unit's gather does. */
static ct_status
gather_group(ct_fsdp *unit, ct_comm *comm, ct_fsdp_group *g, const ct_span *shard,
             ct_error *err)
{
    const size_t n = g->n / (size_t)comm->world_size;
    const ct_span full = full_of(unit, g);
    const ct_span own = ct_span_part(full, (size_t)comm->rank * n, n);
    if (shard->n != n || shard->dtype != CT_F32) {
        return ct_fail(err, CT_EINVAL,
                       "a shard has %zu elements of %s; expected %zu of float32: it "
                       "must not be cast or resized",
                       shard->n, ct_dtype_name(shard->dtype), n);
    }
    ct_span here;
    ct_status status = ct_fsdp_bring_up(unit, shard, &here, err);
    if (status != CT_OK) {
        return status;
    }
    if (unit->config.gather_bits != 0 && !unit->config.lone_gather) {
        const ct_fsdp_coder coder = {unit->device, unit->stream, comm,
                                     unit->config.gather_bits};
        return ct_fsdp_gather_codes(&coder, &full, &here, err);
    }
    const ct_request request = {.what = CT_ALL_GATHER, .in = own, .out = full};
    status = unit->device->copy(unit->stream, &own, &here, 1, err);
    if (status != CT_OK || unit->config.lone_gather) {
        return status;
    }
    status = ct_comm_follow(comm, unit->stream, err);
    if (status != CT_OK) {
        return status;
    }
    return unit->begun ? ct_comm_start(comm, &request, &g->work, err)
                       : ct_comm_run(comm, &request, err);
}

static ct_status
gather_groups(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    unit->full->stream = unit->stream;
    ct_status status =
        ct_mapping_obtain(unit->full, unit->full->bytes, &unit->ledger->spares, err);
    ct_comm_label(comm, &unit->label, CT_ALL_GATHER);
    for (size_t i = 0; status == CT_OK && i < unit->n_groups; i++) {
        status = gather_group(unit, comm, &unit->groups[i], &shards[i], err);
    }
    ct_comm_unlabel(comm);
    unit->label.call += status == CT_OK;
    return status;
}

ct_status
ct_fsdp_gather(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    if (unit->gathered) {
        return CT_OK;
    }
    if (unit->begun) {
        return ct_fsdp_end_gather(unit, comm, err);
    }
    const ct_status status = gather_groups(unit, comm, shards, err);
    if (status != CT_OK) {
        ct_mapping_release(unit->full, &unit->ledger->spares);
        return status;
    }
    unit->gathered = true;
    enter(unit->ledger, unit->full->bytes);
    return CT_OK;
}

ct_status
ct_fsdp_begin_gather(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    if (unit->gathered || unit->begun) {
        return CT_OK;
    }
    if (unit->config.gather_bits != 0) {
        return ct_fail(err, CT_EINVAL,
                       "a unit whose parameters travel as codes of %d bits cannot be "
                       "gathered ahead; gather it when it is needed",
                       unit->config.gather_bits);
    }
    unit->begun = true;
    unit->ledger->begun++;
    enter(unit->ledger, unit->full->bytes);
    const ct_status status = gather_groups(unit, comm, shards, err);
    if (status != CT_OK) {
        ct_fsdp_cancel_gather(unit, comm);
    }
    return status;
}

void
ct_fsdp_release(ct_fsdp *unit)
{
    if (unit->gathered) {
        ct_mapping_release(unit->full, &unit->ledger->spares);
        unit->gathered = false;
        unit->ledger->live -= unit->full->bytes;
    }
}

/* ---- gradients ---------------------------------------------------------------------
 */

static ct_span
grads_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->grads->data, 0, unit->grad_dtype};
    return ct_span_part(all, g->grad_at, g->n);
}

static ct_status
hold_grads(ct_fsdp *unit, ct_dtype dtype, ct_error *err)
{
    if (unit->holds_grads) {
        return CT_OK;
    }
    unit->grad_dtype = dtype;
    unit->grads->stream = unit->stream;
    const ct_status status =
        ct_mapping_obtain(unit->grads, grad_live(unit), &unit->ledger->spares, err);
    if (status == CT_OK) {
        unit->holds_grads = true;
        enter(unit->ledger, grad_live(unit));
    }
    return status;
}

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
    ct_status status = hold_grads(unit, wide ? CT_F32 : unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_device *device = unit->device;
    const ct_span place = ct_span_part(grads_of(unit, g), at, grad->n);
    return add ? device->add(unit->stream, &place, grad, 1, 1.0, err)
               : device->copy(unit->stream, &place, grad, 1, err);
}

static ct_status
reduce_as_codes(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
                ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
                ct_error *err)
{
    const ct_fsdp_coder coder = {unit->device, unit->stream, comm,
                                 unit->config.reduce_bits};
    const ct_span whole = grads_of(unit, g);
    float *residual = unit->residual == NULL ? NULL : unit->residual + g->grad_at;
    const float factor = op == CT_REDUCE_MEAN ? 1.0F / (float)comm->world_size : 1.0F;
    const ct_status status =
        ct_fsdp_reduce_codes(&coder, part, &whole, residual, presence, factor, err);
    return status != CT_OK || presence == NULL
               ? status
               : ct_fsdp_mark(unit, presence, part, (size_t)comm->rank * part->n,
                              part->n, err);
}

/* The sum of all ranks' parts of a group; of the replicas' sums the average. */
static ct_status
sum_over_ranks(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
               ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
               ct_error *err)
{
    const ct_span whole = grads_of(unit, g);
    if (unit->config.lone_reduce) {
        return CT_OK;
    }
    ct_status status = ct_comm_follow(comm, unit->stream, err);
    if (status == CT_OK) {
        ct_comm_label(comm, &unit->label, CT_REDUCE_SCATTER);
        status = unit->config.reduce_bits != 0
                     ? reduce_as_codes(unit, comm, g, presence, part, op, err)
                     : comm->ops->reduce_scatter(comm, part, &whole, op, err);
        ct_comm_unlabel(comm);
        unit->label.call += status == CT_OK;
    }
    ct_comm *replicas = unit->replicas;
    if (status == CT_OK && replicas != NULL) {
        status = ct_comm_follow(replicas, unit->stream, err);
    }
    return status != CT_OK || replicas == NULL
               ? status
               : replicas->ops->all_reduce(replicas, part, CT_REDUCE_MEAN, err);
}

static ct_status
scale(const ct_fsdp *unit, double factor, const ct_span *span, ct_error *err)
{
    return factor == 1.0 ? CT_OK
                         : unit->device->scale(unit->stream, factor, (double)INFINITY,
                                               span, 1, err);
}

/* Into the shard's gradient: from what is reduced, with the factor that is left. */
static ct_status
deliver(const ct_fsdp *unit, const ct_span *shard, const ct_span *part, double factor,
        bool add, ct_error *err)
{
    if (add) {
        return unit->device->add(unit->stream, shard, part, 1, factor, err);
    }
    const ct_status status = unit->device->copy(unit->stream, shard, part, 1, err);
    return status == CT_OK ? scale(unit, factor, shard, err) : status;
}

/* The average needs no factor: it is taken in the sum's own precision. */
static bool
is_average(const ct_fsdp *unit, const ct_comm *comm)
{
    return !unit->config.lone_reduce &&
           unit->config.predivide * unit->config.postdivide == (double)comm->world_size;
}

/* Into `here`, memory of the device for this rank's part. */
static ct_status
reduce_group(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
             ct_fsdp_presence *presence, const ct_span *here, bool add, ct_error *err)
{
    const bool average = is_average(unit, comm);
    const ct_span whole = grads_of(unit, g);
    ct_span part = ct_span_part(whole, (size_t)comm->rank * here->n, here->n);
    ct_status status = presence == NULL
                           ? CT_OK
                           : ct_fsdp_mark(unit, presence, &whole, 0, here->n, err);
    if (status == CT_OK && !average) {
        status = scale(unit, 1.0 / unit->config.predivide, &whole, err);
    }
    const bool direct = !add && part.dtype == CT_F32 && !unit->config.lone_reduce;
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

ct_status
ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
               const ct_span *shard, bool add, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    const size_t n = g->n / (size_t)comm->world_size;
    ct_span here;
    if (shard->n != n || shard->dtype != CT_F32) {
        return ct_fail(err, CT_EINVAL,
                       "the gradient of a shard has %zu elements of %s; expected %zu "
                       "of float32",
                       shard->n, ct_dtype_name(shard->dtype), n);
    }
    ct_status status = hold_grads(unit, unit->config.reduce, err);
    if (status == CT_OK) {
        status = ct_fsdp_place(unit, shard, &here, err);
    }
    if (status == CT_OK) {
        const bool adds_here = add && !unit->config.offload;
        status = reduce_group(unit, comm, g, presence, &here, adds_here, err);
    }
    if (status == CT_OK) {
        status = ct_fsdp_bring_down(unit, shard, &here, add, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : ct_fsdp_read_marks(unit, presence, shard, (size_t)comm->rank * n, err);
}

ct_status
ct_fsdp_clear_grads(ct_fsdp *unit, size_t group, size_t at, size_t n, ct_error *err)
{
    const ct_status status = hold_grads(unit, unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_span gap = ct_span_part(grads_of(unit, &unit->groups[group]), at, n);
    return unit->device->zero(unit->stream, &gap, 1, err);
}

void
ct_fsdp_drop_grads(ct_fsdp *unit)
{
    if (unit->holds_grads) {
        ct_mapping_release(unit->grads, &unit->ledger->spares);
        unit->holds_grads = false;
        unit->ledger->live -= grad_live(unit);
    }
}
