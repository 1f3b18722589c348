#include "core/ct_comm_levels.h"

#include "core/ct_alloc.h"
#include "core/ct_reduce.h"

#include <string.h>

enum {
    SHORT_BYTES = 4 << 10 /* from here on bytes cost more than the number of messages */
};

typedef struct levels {
    ct_comm base; /* first: a ct_comm * of ours is a levels * */
    ct_comm *inner, *outer, *whole;
    void *scratch;
    size_t room;
} levels;

/* ---- the two levels ----------------------------------------------------------------
 */

static ct_status
say(const levels *self, const char *what, const char *where, ct_status status,
    ct_error *err)
{
    char text[sizeof err->message];
    if (status == CT_OK || status == CT_EHOST || err == NULL) {
        return status;
    }
    memcpy(text, err->message, sizeof text);
    return ct_fail(err, status, "%s on rank %d of %d, %s: %s", what, self->base.rank,
                   self->base.world_size, where, text);
}

static ct_status
within(levels *self, const char *what, const ct_request *r, ct_error *err)
{
    return say(self, what, "within its machine", ct_comm_run(self->inner, r, err), err);
}

static ct_status
across(levels *self, const char *what, const ct_request *r, ct_error *err)
{
    return say(self, what, "across machines", ct_comm_run(self->outer, r, err), err);
}

static ct_status
make_room(levels *self, size_t bytes, ct_error *err)
{
    return ct_grow(&self->scratch, &self->room, bytes, 1, err);
}

static ct_span
part_of(const ct_span *span, size_t at, size_t n)
{
    const size_t offset = at * ct_dtype_size(span->dtype);
    return (ct_span){n == 0 ? span->data : (char *)span->data + offset, n, span->dtype};
}

static ct_span
scratch_of(const levels *self, size_t at, size_t n, ct_dtype dtype)
{
    const ct_span all = {self->scratch, at + n, dtype};
    return part_of(&all, at, n);
}

/* ---- all_gather and reduce_scatter -------------------------------------------------
 */

/* Each rank fetches the parts of those with its place on the other machines; a
 * machine's parts then come together in the block of that machine. */
static ct_status
gather(levels *self, const char *what, const ct_span *out, const ct_span *in,
       ct_error *err)
{
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = in->n * (size_t)self->inner->world_size;
    ct_status status =
        make_room(self, machines * in->n * ct_dtype_size(in->dtype), err);
    if (status == CT_OK) {
        const ct_request r = {.what = CT_ALL_GATHER,
                              .in = *in,
                              .out = scratch_of(self, 0, machines * in->n, in->dtype)};
        status = across(self, what, &r, err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_ALL_GATHER,
                              .in = scratch_of(self, m * in->n, in->n, in->dtype),
                              .out = part_of(out, m * block, block)};
        status = within(self, what, &r, err);
    }
    return status;
}

static ct_status
scatter(levels *self, const ct_span *out, const ct_span *in, ct_reduce_op op,
        ct_error *err)
{
    const char *what = "reduce_scatter";
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = out->n * (size_t)self->inner->world_size;
    ct_status status =
        make_room(self, machines * out->n * ct_dtype_size(in->dtype), err);
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_REDUCE_SCATTER,
                              .op = op,
                              .in = part_of(in, m * block, block),
                              .out = scratch_of(self, m * out->n, out->n, in->dtype)};
        status = within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {.what = CT_REDUCE_SCATTER,
                              .op = op,
                              .in = scratch_of(self, 0, machines * out->n, in->dtype),
                              .out = *out};
        status = across(self, what, &r, err);
    }
    return status;
}

/* ---- all_reduce --------------------------------------------------------------------
 */

/* Reduces rows of span->n elements, one of each rank, into the span. */
static ct_status
reduce_rows(const char *rows, size_t ranks, const ct_span *span, ct_reduce_op op,
            ct_error *err)
{
    const void **at = (const void **)ct_calloc(ranks, sizeof *at);
    if (at == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the rows of %zu ranks", ranks);
    }
    for (size_t rank = 0; rank < ranks; rank++) {
        at[rank] = rows + rank * span->n * ct_dtype_size(span->dtype);
    }
    ct_reduce(span->data, at, ranks, span->n, span->dtype, op);
    ct_free((void *)at);
    return CT_OK;
}

/* All ranks' elements on every rank, reduced in their order. */
static ct_status
reduce_gathered(levels *self, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    const size_t ranks = (size_t)self->base.world_size;
    const ct_span rows = {ct_alloc(ranks * span->n * ct_dtype_size(span->dtype)),
                          ranks * span->n, span->dtype};
    if (rows.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu elements", rows.n);
    }
    ct_status status = gather(self, "all_reduce", &rows, span, err);
    if (status == CT_OK) {
        status = reduce_rows(rows.data, ranks, span, op, err);
    }
    ct_free(rows.data);
    return status;
}

/* A share for each of the machine's ranks, reduced in the machine, across machines, and
 * handed round in the machine. */
static ct_status
reduce_shares(levels *self, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    const size_t share = span->n / (size_t)self->inner->world_size;
    ct_status status = make_room(self, share * ct_dtype_size(span->dtype), err);
    const ct_span own = scratch_of(self, 0, share, span->dtype);
    const ct_request steps[] = {
        {.what = CT_REDUCE_SCATTER, .op = op, .in = *span, .out = own},
        {.what = CT_ALL_REDUCE, .op = op, .in = own},
        {.what = CT_ALL_GATHER, .in = own, .out = *span},
    };
    if (status == CT_OK) {
        status = within(self, "all_reduce", &steps[0], err);
    }
    if (status == CT_OK) {
        status = across(self, "all_reduce", &steps[1], err);
    }
    return status == CT_OK ? within(self, "all_reduce", &steps[2], err) : status;
}

static ct_status
levels_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    levels *self = (levels *)comm;
    const size_t ranks = (size_t)self->inner->world_size;
    const size_t rest = span->n % ranks, even = span->n - rest;
    const bool is_short = span->n * ct_dtype_size(span->dtype) <= SHORT_BYTES;
    if (is_short || (op == CT_REDUCE_MEAN && !ct_dtype_is_float(span->dtype))) {
        return reduce_gathered(self, span, op, err);
    }
    const ct_span whole = part_of(span, 0, even), last = part_of(span, even, rest);
    ct_status status = reduce_shares(self, &whole, op, err);
    return status == CT_OK && rest != 0 ? reduce_gathered(self, &last, op, err)
                                        : status;
}

/* ---- the others --------------------------------------------------------------------
 */

static ct_status
levels_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_GATHER, .out = *out, .in = *in};
    ct_status status = ct_request_check(&r, comm->world_size, err);
    return status == CT_OK ? gather((levels *)comm, "all_gather", out, in, err)
                           : status;
}

/* A mean of integers has to see all of them before it is rounded. */
static ct_status
scatter_integer_means(levels *self, const ct_span *out, const ct_span *in,
                      ct_error *err)
{
    const size_t bytes = in->n * ct_dtype_size(in->dtype);
    ct_span copy = {ct_alloc(bytes), in->n, in->dtype};
    if (copy.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu bytes", bytes);
    }
    memcpy(copy.data, in->data, bytes);
    ct_status status = reduce_gathered(self, &copy, CT_REDUCE_MEAN, err);
    const ct_span own = part_of(&copy, (size_t)self->base.rank * out->n, out->n);
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
    ct_status status = ct_request_check(&r, comm->world_size, err);
    if (status != CT_OK || in->n == 0) {
        return status;
    }
    return op == CT_REDUCE_MEAN && !ct_dtype_is_float(in->dtype)
               ? scatter_integer_means((levels *)comm, out, in, err)
               : scatter((levels *)comm, out, in, op, err);
}

/* First within machines, to the rank with the place of the receiver: the parts for each
 * machine lie side by side. */
static ct_status
levels_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    levels *self = (levels *)comm;
    const char *what = "all_to_all";
    const ct_request whole = {.what = CT_ALL_TO_ALL, .out = *out, .in = *in};
    const size_t machines = (size_t)self->outer->world_size, block = in->n / machines;
    ct_status status = ct_request_check(&whole, comm->world_size, err);
    if (status == CT_OK) {
        status = make_room(self, in->n * ct_dtype_size(in->dtype), err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_ALL_TO_ALL,
                              .in = part_of(in, m * block, block),
                              .out = scratch_of(self, m * block, block, in->dtype)};
        status = within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {.what = CT_ALL_TO_ALL,
                              .in = scratch_of(self, 0, in->n, in->dtype),
                              .out = *out};
        status = across(self, what, &r, err);
    }
    return status;
}

static ct_status
levels_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    levels *self = (levels *)comm;
    const int ranks = self->inner->world_size;
    ct_request r = {.what = CT_BROADCAST, .in = *span, .root = root};
    ct_status status = ct_request_check(&r, comm->world_size, err);
    if (status == CT_OK && self->inner->rank == root % ranks) {
        r.root = root / ranks;
        status = across(self, "broadcast", &r, err);
    }
    r.root = root % ranks;
    return status == CT_OK ? within(self, "broadcast", &r, err) : status;
}

/* The second within holds a machine's ranks until the last machine has come. */
static ct_status
levels_barrier(ct_comm *comm, ct_error *err)
{
    levels *self = (levels *)comm;
    const ct_request r = {.what = CT_BARRIER};
    ct_status status = within(self, "barrier", &r, err);
    if (status == CT_OK) {
        status = across(self, "barrier", &r, err);
    }
    return status == CT_OK ? within(self, "barrier", &r, err) : status;
}

static ct_status
levels_group(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    ct_comm *whole = ((levels *)comm)->whole;
    if (whole->ops->group == NULL) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       whole->ops->name);
    }
    return whole->ops->group(whole, members, made, err);
}

static ct_status
levels_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return ct_comm_memory(((levels *)comm)->inner, bytes, memory, err);
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
    levels *self = (levels *)comm;
    free_one(self->inner);
    free_one(self->outer);
    free_one(self->whole);
    ct_free(self->scratch);
    ct_free(self);
}

static const ct_comm_ops levels_ops = {
    .name = "levels",
    .all_reduce = levels_all_reduce,
    .all_gather = levels_all_gather,
    .reduce_scatter = levels_reduce_scatter,
    .all_to_all = levels_all_to_all,
    .broadcast = levels_broadcast,
    .barrier = levels_barrier,
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
                         ct_error *err)
{
    levels *self = ct_calloc(1, sizeof *self);
    ct_status status = self == NULL ? ct_fail(err, CT_ENOMEM, "no memory for a group")
                                    : check_ranks(inner, outer, whole, err);
    if (self == NULL || status != CT_OK) {
        free_one(inner);
        free_one(outer);
        free_one(whole);
        ct_free(self);
        return status;
    }
    *self = (levels){
        .base = {.ops = &levels_ops,
                 .rank = whole->rank,
                 .world_size = whole->world_size},
        .inner = inner,
        .outer = outer,
        .whole = whole,
    };
    *comm = &self->base;
    return CT_OK;
}
