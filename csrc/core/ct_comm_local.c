/* Each rank notes what it asks for and waits until all have. Then every rank reads what
 * the others noted, does its share of the work on all ranks' memory, and waits again:
 * nobody goes on before all have finished, so memory and notes may then change. */
#include "core/ct_comm_local.h"

#include "core/ct_alloc.h"
#include "core/ct_meeting.h"
#include "core/ct_reduce.h"

#include <stdio.h>
#include <string.h>

/* What a rank asks for. */
typedef struct request {
    const char *what; /* "all_reduce", ... */
    ct_span out, in;
    ct_reduce_op op;
    int root;
} request;

struct group;

typedef struct member {
    ct_comm base; /* first: a ct_comm * of ours is a member * */
    struct group *group;
    request request;
} member;

typedef struct group {
    ct_meeting *meeting;
    const void **rows; /* world_size per rank, for its part of a reduction */
    int world_size;
    member members[];
} group;

/* ---- agreeing ----------------------------------------------------------------------
 */

static bool
is_like(const request *a, const request *b)
{
    return a->what == b->what && a->out.n == b->out.n && a->in.n == b->in.n &&
           a->out.dtype == b->out.dtype && a->in.dtype == b->in.dtype &&
           a->op == b->op && a->root == b->root;
}

typedef struct description {
    char text[96];
} description;

/* "all_reduce of 3 float32 to 0 (max, root 0)" */
static description
describe(const request *r)
{
    static const char *const ops[] = {
        [CT_REDUCE_SUM] = "sum",
        [CT_REDUCE_MEAN] = "mean",
        [CT_REDUCE_MAX] = "max",
        [CT_REDUCE_MIN] = "min",
    };
    description d;
    (void)snprintf(d.text, sizeof d.text, "%s of %zu %s to %zu (%s, root %d)", r->what,
                   r->in.n, ct_dtype_name(r->in.dtype), r->out.n, ops[r->op], r->root);
    return d;
}

/* The same on every rank: all compare with rank 0. */
static ct_status
check_alike(const member *self, ct_error *err)
{
    const group *g = self->group;
    const request *first = &g->members[0].request;
    for (int rank = 1; rank < g->world_size; rank++) {
        const request *other = &g->members[rank].request;
        if (!is_like(first, other)) {
            return ct_fail(err, CT_EINVAL,
                           "all ranks must call the same: rank 0 called %s, rank %d %s",
                           describe(first).text, rank, describe(other).text);
        }
    }
    return CT_OK;
}

/* `whole` holds a part for every rank. */
static ct_status
check_parts(const member *self, const ct_span *whole, const ct_span *part,
            ct_error *err)
{
    const size_t world_size = (size_t)self->group->world_size;
    if (whole->dtype == part->dtype && whole->n % world_size == 0 &&
        whole->n / world_size == part->n) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "%s over %zu ranks needs %zu times as many elements of one dtype on "
                   "one side, got %zu of %s and %zu of %s",
                   self->request.what, world_size, world_size, whole->n,
                   ct_dtype_name(whole->dtype), part->n, ct_dtype_name(part->dtype));
}

/* ---- the work of a rank ------------------------------------------------------------
 */

static void *
element(const ct_span *span, size_t at)
{
    return (char *)span->data + at * ct_dtype_size(span->dtype);
}

static void
copy(void *to, const void *from, size_t n, ct_dtype dtype)
{
    if (n != 0 && to != from) {
        memmove(to, from, n * ct_dtype_size(dtype));
    }
}

/* Reduces elements [at, at + n) of all ranks' `in` into `out`. */
static void
reduce_part(const member *self, void *out, size_t at, size_t n)
{
    const group *g = self->group;
    const request *mine = &self->request;
    const size_t world_size = (size_t)g->world_size;
    const void **rows = g->rows + (size_t)self->base.rank * world_size;
    if (n == 0) {
        return;
    }
    for (size_t rank = 0; rank < world_size; rank++) {
        rows[rank] = element(&g->members[rank].request.in, at);
    }
    ct_reduce(out, rows, world_size, n, mine->in.dtype, mine->op);
}

/* A share of the elements, reduced here and copied to every rank. */
static ct_status
work_all_reduce(member *self, ct_error *err)
{
    const group *g = self->group;
    const ct_span *mine = &self->request.in;
    const size_t rank = (size_t)self->base.rank, ranks = (size_t)g->world_size;
    const size_t share = mine->n / ranks, rest = mine->n % ranks;
    const size_t at = rank * share + (rank < rest ? rank : rest);
    const size_t n = share + (rank < rest);
    (void)err;
    reduce_part(self, element(mine, at), at, n);
    for (size_t other = 0; other < ranks; other++) {
        const ct_span *theirs = &g->members[other].request.in;
        copy(element(theirs, at), element(mine, at), n, mine->dtype);
    }
    return CT_OK;
}

static ct_status
work_reduce_scatter(member *self, ct_error *err)
{
    const ct_span *out = &self->request.out;
    ct_status status = check_parts(self, &self->request.in, out, err);
    if (status == CT_OK) {
        reduce_part(self, out->data, (size_t)self->base.rank * out->n, out->n);
    }
    return status;
}

static ct_status
work_all_gather(member *self, ct_error *err)
{
    const group *g = self->group;
    const ct_span *out = &self->request.out;
    ct_status status = check_parts(self, out, &self->request.in, err);
    for (int rank = 0; status == CT_OK && rank < g->world_size; rank++) {
        const ct_span *in = &g->members[rank].request.in;
        copy(element(out, (size_t)rank * in->n), in->data, in->n, in->dtype);
    }
    return status;
}

static ct_status
work_broadcast(member *self, ct_error *err)
{
    const group *g = self->group;
    const ct_span *mine = &self->request.in;
    const int root = self->request.root;
    if (root < 0 || root >= g->world_size) {
        return ct_fail(err, CT_EINVAL, "root must be in [0, %d), got %d", g->world_size,
                       root);
    }
    copy(mine->data, g->members[root].request.in.data, mine->n, mine->dtype);
    return CT_OK;
}

static ct_status
work_barrier(member *self, ct_error *err)
{
    (void)self;
    (void)err;
    return CT_OK;
}

/* ---- the table ---------------------------------------------------------------------
 */

/* All ranks are refused alike or none is. */
static ct_status
collective(ct_comm *comm, const request *wanted,
           ct_status (*work)(member *self, ct_error *err), ct_error *err)
{
    member *self = (member *)comm;
    ct_meeting *meeting = self->group->meeting;
    self->request = *wanted;
    ct_status status = ct_meeting_join(meeting, comm->rank, wanted->what, err);
    if (status != CT_OK) {
        return status;
    }
    status = check_alike(self, err);
    if (status == CT_OK) {
        status = work(self, err);
    }
    ct_meeting_close(meeting, comm->rank);
    return status;
}

static ct_status
local_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    const request wanted = {.what = "all_reduce", .in = *span, .op = op};
    return collective(comm, &wanted, work_all_reduce, err);
}

static ct_status
local_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const request wanted = {.what = "all_gather", .out = *out, .in = *in};
    return collective(comm, &wanted, work_all_gather, err);
}

static ct_status
local_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                     ct_reduce_op op, ct_error *err)
{
    const request wanted = {.what = "reduce_scatter", .out = *out, .in = *in, .op = op};
    return collective(comm, &wanted, work_reduce_scatter, err);
}

static ct_status
local_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    const request wanted = {.what = "broadcast", .in = *span, .root = root};
    return collective(comm, &wanted, work_broadcast, err);
}

static ct_status
local_barrier(ct_comm *comm, ct_error *err)
{
    const request wanted = {.what = "barrier"};
    return collective(comm, &wanted, work_barrier, err);
}

static void
group_free(group *g)
{
    ct_meeting_free(g->meeting);
    ct_free((void *)g->rows);
    ct_free(g);
}

static void
local_free(ct_comm *comm)
{
    group *g = ((member *)comm)->group;
    if (ct_meeting_leave(g->meeting, comm->rank)) {
        group_free(g);
    }
}

static const ct_comm_ops local_ops = {
    .name = "local",
    .all_reduce = local_all_reduce,
    .all_gather = local_all_gather,
    .reduce_scatter = local_reduce_scatter,
    .broadcast = local_broadcast,
    .barrier = local_barrier,
    .free = local_free,
};

static group *
group_new(int world_size, double timeout_seconds)
{
    const size_t ranks = (size_t)world_size;
    group *g = ct_calloc(1, sizeof *g + ranks * sizeof g->members[0]);
    if (g == NULL) {
        return NULL;
    }
    g->world_size = world_size;
    g->rows = (const void **)ct_calloc(ranks * ranks, sizeof *g->rows);
    g->meeting = g->rows == NULL ? NULL : ct_meeting_new(world_size, timeout_seconds);
    if (g->meeting == NULL) {
        group_free(g);
        return NULL;
    }
    for (int rank = 0; rank < world_size; rank++) {
        g->members[rank] = (member){
            .base = {.ops = &local_ops, .rank = rank, .world_size = world_size},
            .group = g,
        };
    }
    return g;
}

ct_status
ct_comm_local_new(ct_comm **comms, int world_size, double timeout_seconds,
                  ct_error *err)
{
    const int most = 4096; /* threads; its square of pointers is still small */
    if (world_size < 1 || world_size > most) {
        return ct_fail(err, CT_EINVAL, "world_size must be in [1, %d], got %d", most,
                       world_size);
    }
    if (!(timeout_seconds > 0.0 && timeout_seconds < 1e9)) {
        return ct_fail(err, CT_EINVAL,
                       "timeout_seconds must be above 0 and below 1e9, got %g",
                       timeout_seconds);
    }
    group *g = group_new(world_size, timeout_seconds);
    if (g == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a group of %d ranks", world_size);
    }
    for (int rank = 0; rank < world_size; rank++) {
        comms[rank] = &g->members[rank].base;
    }
    return CT_OK;
}
