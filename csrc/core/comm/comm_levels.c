#include "core/comm/comm_levels.h"

#include "core/base/alloc.h"
#include "core/comm/hierarchical.h"

#include <string.h>

/* ---- all ranks ask for the same, and it fits them ----------------------------------
 */

static ct_status
check(const ct_levels *self, const ct_request *r, ct_error *err)
{
    const ct_status status = ct_levels_compare(self, r, err);
    return status == CT_OK ? ct_request_check(r, self->base.world_size, err) : status;
}

/* ---- all_gather and reduce_scatter -------------------------------------------------
 */

static ct_status
scatter(ct_levels *self, const ct_span *out, const ct_span *in, ct_reduce_op op,
        ct_error *err)
{
    const char *what = "reduce_scatter";
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = out->n * (size_t)self->inner->world_size;
    ct_status status =
        ct_levels_make_room(self, machines * out->n * ct_dtype_size(in->dtype), err);
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {
            .what = CT_REDUCE_SCATTER,
            .op = op,
            .in = ct_levels_part(in, m * block, block),
            .out = ct_levels_scratch(self, m * out->n, out->n, in->dtype)};
        status = ct_levels_within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {
            .what = CT_REDUCE_SCATTER,
            .op = op,
            .in = ct_levels_scratch(self, 0, machines * out->n, in->dtype),
            .out = *out};
        status = ct_levels_across(self, what, &r, err);
    }
    return status;
}

/* ---- the others --------------------------------------------------------------------
 */

static ct_status
levels_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_GATHER, .out = *out, .in = *in};
    const ct_status status = check((ct_levels *)comm, &r, err);
    return status == CT_OK
               ? ct_levels_gather((ct_levels *)comm, "all_gather", out, in, err)
               : status;
}

/* A mean of integers has to see all of them before it is rounded. */
static ct_status
scatter_integer_means(ct_levels *self, const ct_span *out, const ct_span *in,
                      ct_error *err)
{
    const size_t bytes = in->n * ct_dtype_size(in->dtype);
    ct_span copy = {ct_alloc(bytes), in->n, in->dtype};
    if (copy.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu bytes", bytes);
    }
    memcpy(copy.data, in->data, bytes);
    ct_status status = ct_levels_reduce_gathered(self, &copy, CT_REDUCE_MEAN, err);
    const ct_span own = ct_levels_part(&copy, (size_t)self->base.rank * out->n, out->n);
    if (status == CT_OK) {
        memcpy(out->data, own.data, out->n * ct_dtype_size(out->dtype));
    }
    ct_free(copy.data);
    return status;
}

static ct_status
levels_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                      ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_REDUCE_SCATTER, .out = *out, .in = *in, .op = op};
    const ct_status status = check((ct_levels *)comm, &r, err);
    if (status != CT_OK || in->n == 0) {
        return status;
    }
    return op == CT_REDUCE_MEAN && !ct_dtype_is_float(in->dtype)
               ? scatter_integer_means((ct_levels *)comm, out, in, err)
               : scatter((ct_levels *)comm, out, in, op, err);
}

/* First within machines, to the rank with the place of the receiver: the parts for each
 * machine lie side by side. */
static ct_status
levels_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    ct_levels *self = (ct_levels *)comm;
    const char *what = "all_to_all";
    const ct_request whole = {.what = CT_ALL_TO_ALL, .out = *out, .in = *in};
    const size_t machines = (size_t)self->outer->world_size, block = in->n / machines;
    ct_status status = check(self, &whole, err);
    if (status == CT_OK) {
        status = ct_levels_make_room(self, in->n * ct_dtype_size(in->dtype), err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_ALL_TO_ALL,
                              .in = ct_levels_part(in, m * block, block),
                              .out =
                                  ct_levels_scratch(self, m * block, block, in->dtype)};
        status = ct_levels_within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {.what = CT_ALL_TO_ALL,
                              .in = ct_levels_scratch(self, 0, in->n, in->dtype),
                              .out = *out};
        status = ct_levels_across(self, what, &r, err);
    }
    return status;
}

static ct_status
levels_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    ct_levels *self = (ct_levels *)comm;
    const int ranks = self->inner->world_size;
    ct_request r = {.what = CT_BROADCAST, .in = *span, .root = root};
    ct_status status = check(self, &r, err);
    if (status == CT_OK && self->inner->rank == root % ranks) {
        r.root = root / ranks;
        status = ct_levels_across(self, "broadcast", &r, err);
    }
    r.root = root % ranks;
    return status == CT_OK ? ct_levels_within(self, "broadcast", &r, err) : status;
}

/* To the rank of its own machine that has the root's place, and from those to it. */
static ct_status
reduce_shares(ct_levels *self, const ct_span *span, ct_reduce_op op, int root,
              ct_error *err)
{
    const int ranks = self->inner->world_size;
    ct_request r = {.what = CT_REDUCE, .in = *span, .op = op, .root = root % ranks};
    ct_status status = ct_levels_within(self, "reduce", &r, err);
    if (status == CT_OK && self->inner->rank == root % ranks) {
        r.root = root / ranks;
        status = ct_levels_across(self, "reduce", &r, err);
    }
    return status;
}

static ct_status
levels_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root,
              ct_error *err)
{
    ct_levels *self = (ct_levels *)comm;
    const ct_request r = {.what = CT_REDUCE, .in = *span, .op = op, .root = root};
    const ct_status status = check(self, &r, err);
    if (status != CT_OK) {
        return status;
    }
    return op == CT_REDUCE_MEAN && !ct_dtype_is_float(span->dtype)
               ? ct_levels_reduce_gathered(self, span, op, err)
               : reduce_shares(self, span, op, root, err);
}

/* The second within holds a machine's ranks until the last machine has come. */
static ct_status
levels_barrier(ct_comm *comm, ct_error *err)
{
    ct_levels *self = (ct_levels *)comm;
    const ct_request r = {.what = CT_BARRIER};
    ct_status status = ct_levels_compare(self, &r, err);
    if (status == CT_OK) {
        status = ct_levels_within(self, "barrier", &r, err);
    }
    if (status == CT_OK) {
        status = ct_levels_across(self, "barrier", &r, err);
    }
    return status == CT_OK ? ct_levels_within(self, "barrier", &r, err) : status;
}

static ct_status
levels_group(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    ct_comm *whole = ((ct_levels *)comm)->whole;
    if (whole->ops->group == NULL) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       whole->ops->name);
    }
    return whole->ops->group(whole, members, made, err);
}

static ct_status
levels_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return ct_comm_memory(((ct_levels *)comm)->inner, bytes, memory, err);
}

static void
free_one(ct_comm *comm)
{
    if (comm != NULL) {
        comm->ops->free(comm);
    }
}

static void
levels_free(ct_comm *comm)
{
    ct_levels *self = (ct_levels *)comm;
    free_one(self->inner);
    free_one(self->outer);
    free_one(self->whole);
    ct_levels_free_works(self);
    ct_free(self->scratch);
    ct_free(self);
}

static const ct_comm_ops levels_ops = {
    .name = "levels",
    .all_reduce = ct_levels_all_reduce,
    .all_gather = levels_all_gather,
    .reduce_scatter = levels_reduce_scatter,
    .all_to_all = levels_all_to_all,
    .broadcast = levels_broadcast,
    .reduce = levels_reduce,
    .barrier = levels_barrier,
    .start = ct_levels_start,
    .wait = ct_levels_wait,
    .group = levels_group,
    .memory = levels_memory,
    .free = levels_free,
};

static ct_status
check_ranks(const ct_comm *inner, const ct_comm *outer, const ct_comm *whole,
            ct_error *err)
{
    const int rank = outer->rank * inner->world_size + inner->rank;
    if (outer->world_size * inner->world_size == whole->world_size &&
        rank == whole->rank) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "rank %d of %d cannot be rank %d of the %d of machine %d of %d",
                   whole->rank, whole->world_size, inner->rank, inner->world_size,
                   outer->rank, outer->world_size);
}

ct_status
ct_comm_levels_new_steal(ct_comm **comm, ct_comm *inner, ct_comm *outer, ct_comm *whole,
                         bool compares, ct_error *err)
{
    ct_levels *self = ct_calloc(1, sizeof *self);
    ct_status status = self == NULL ? ct_fail(err, CT_ENOMEM, "no memory for a group")
                                    : check_ranks(inner, outer, whole, err);
    if (self == NULL || status != CT_OK) {
        free_one(inner);
        free_one(outer);
        free_one(whole);
        ct_free(self);
        return status;
    }
    const int ranks = inner->world_size, of = whole->world_size;
    inner->names = (ct_rank_names){outer->rank * ranks, 1, of};
    outer->names = (ct_rank_names){inner->rank, ranks, of};
    *self = (ct_levels){
        .base = ct_comm_made(&levels_ops, whole->rank, of),
        .compares = compares,
        .inner = inner,
        .outer = outer,
        .whole = whole,
    };
    *comm = &self->base;
    return CT_OK;
}
