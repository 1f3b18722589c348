/* Each rank notes what it asks for and waits until all have. Then every rank reads what
 * the others noted, does its share of the work on all ranks' memory, and waits again:
 * nobody goes on before all have finished, so memory and notes may then change. */
#include "ct_comm_local.h"

#include "core/base/alloc.h"
#include "ct_thread_barrier.h"
#include "core/comm/reduce.h"

#include <string.h>

struct group;

typedef struct member {
    ct_comm base; /* first: a ct_comm * of ours is a member * */
    struct group *group;
    ct_request request; /* what it asks for */
} member;

typedef struct group {
    ct_thread_barrier *barrier;
    const void **rows; /* world_size per rank, for its part of a reduction */
    int world_size;
    double timeout_seconds;
    member members[];
} group;

/* ---- agreeing -------------------------------------------------------------------- */

static const ct_request *
request_of(const void *g, int rank)
{
    return &((const group *)g)->members[rank].request;
}

/* ---- the work of a rank ---------------------------------------------------------- */

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
    const ct_request *mine = &self->request;
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
static void
work_all_reduce(const member *self)
{
    const group *g = self->group;
    const ct_span *mine = &self->request.in;
    const size_t rank = (size_t)self->base.rank, ranks = (size_t)g->world_size;
    const size_t share = mine->n / ranks, rest = mine->n % ranks;
    const size_t at = rank * share + (rank < rest ? rank : rest);
    const size_t n = share + (rank < rest);
    reduce_part(self, element(mine, at), at, n);
    for (size_t other = 0; other < ranks; other++) {
        const ct_span *theirs = &g->members[other].request.in;
        copy(element(theirs, at), element(mine, at), n, mine->dtype);
    }
}

static void
work_reduce_scatter(const member *self)
{
    const ct_span *out = &self->request.out;
    reduce_part(self, out->data, (size_t)self->base.rank * out->n, out->n);
}

static void
work_all_gather(const member *self)
{
    const group *g = self->group;
    const ct_span *out = &self->request.out;
    for (int rank = 0; rank < g->world_size; rank++) {
        const ct_span *in = &g->members[rank].request.in;
        copy(element(out, (size_t)rank * in->n), in->data, in->n, in->dtype);
    }
}

static void
work_all_to_all(const member *self)
{
    const group *g = self->group;
    const ct_span *out = &self->request.out;
    const size_t part = out->n / (size_t)g->world_size;
    for (int rank = 0; rank < g->world_size; rank++) {
        const ct_span *in = &g->members[rank].request.in;
        copy(element(out, (size_t)rank * part),
             element(in, (size_t)self->base.rank * part), part, out->dtype);
    }
}

static void
work_broadcast(const member *self)
{
    const ct_span *mine = &self->request.in;
    const member *root = &self->group->members[self->request.root];
    copy(mine->data, root->request.in.data, mine->n, mine->dtype);
}

static void
work_reduce(const member *self)
{
    const ct_span *mine = &self->request.in;
    if (self->base.rank == self->request.root) {
        reduce_part(self, mine->data, 0, mine->n);
    }
}

static void
work(const member *self)
{
    switch (self->request.what) {
    case CT_ALL_REDUCE:
        work_all_reduce(self);
        break;
    case CT_ALL_GATHER:
        work_all_gather(self);
        break;
    case CT_REDUCE_SCATTER:
        work_reduce_scatter(self);
        break;
    case CT_ALL_TO_ALL:
        work_all_to_all(self);
        break;
    case CT_BROADCAST:
        work_broadcast(self);
        break;
    case CT_REDUCE:
        work_reduce(self);
        break;
    case CT_BARRIER:
        break;
    }
}

/* ---- the table ------------------------------------------------------------------- */

/* All ranks are rejected alike or none is. */
static ct_status
local_run(ct_comm *comm, const ct_request *wanted, ct_error *err)
{
    member *self = (member *)comm;
    ct_thread_barrier *barrier = self->group->barrier;
    const char *what = ct_collective_name(wanted->what);
    ct_status status = ct_comm_check_here(comm, what, err);
    if (status == CT_OK) {
        self->request = ct_request_labelled(comm, wanted);
        status = ct_thread_barrier_join(barrier, comm->rank, what, err);
    }
    if (status != CT_OK) {
        return status;
    }
    status = ct_requests_compare(request_of, self->group, comm->world_size,
                                 &comm->names, err);
    if (status == CT_OK) {
        status = ct_request_check(wanted, comm->world_size, err);
    }
    if (status == CT_OK) {
        work(self);
    }
    ct_thread_barrier_close(barrier, comm->rank);
    return status;
}

static void
group_free(group *g)
{
    ct_thread_barrier_free(g->barrier);
    ct_free((void *)g->rows);
    ct_free(g);
}

/* In a forked child the other ranks' threads are not there, and one may have held the
 * lock: the child's copy of the group stays as it is. */
static void
local_free(ct_comm *comm)
{
    group *g = ((member *)comm)->group;
    if (ct_comm_is_here(comm) && ct_thread_barrier_leave(g->barrier, comm->rank)) {
        group_free(g);
    }
}

static group *
group_new(const ct_comm_ops *ops, int world_size, double timeout_seconds)
{
    const size_t ranks = (size_t)world_size;
    group *g = ct_calloc(1, sizeof *g + ranks * sizeof g->members[0]);
    if (g == NULL) {
        return NULL;
    }
    g->world_size = world_size;
    g->timeout_seconds = timeout_seconds;
    g->rows = (const void **)ct_calloc(ranks * ranks, sizeof *g->rows);
    g->barrier =
        g->rows == NULL ? NULL : ct_thread_barrier_new(world_size, timeout_seconds);
    if (g->barrier == NULL) {
        group_free(g);
        return NULL;
    }
    for (int rank = 0; rank < world_size; rank++) {
        g->members[rank] = (member){
            .base = ct_comm_made(ops, rank, world_size),
            .group = g,
        };
    }
    return g;
}

/* Fills comms[0..world_size). */
static bool
form_group(const ct_comm_ops *ops, ct_comm **comms, int world_size,
           double timeout_seconds)
{
    group *g = group_new(ops, world_size, timeout_seconds);
    for (int rank = 0; g != NULL && rank < world_size; rank++) {
        comms[rank] = &g->members[rank].base;
    }
    return g != NULL;
}

/* The first member's part: all members' communicators, or NULL. */
static ct_comm **
make_for_all(const ct_comm *comm, const ct_members *m)
{
    ct_comm **comms = (ct_comm **)ct_calloc((size_t)m->n, sizeof(ct_comm *));
    const double timeout_seconds = ((const member *)comm)->group->timeout_seconds;
    if (comms != NULL && !form_group(comm->ops, comms, m->n, timeout_seconds)) {
        ct_free((void *)comms);
        comms = NULL;
    }
    return comms;
}

/* Ranks are threads: one makes the group and tells the others where it is. */
static ct_status
local_group(ct_comm *comm, const ct_members *m, ct_comm **made, ct_error *err)
{
    const bool leads = m->n > 1 && m->index == 0;
    const size_t ranks = (size_t)comm->world_size;
    ct_comm **own = leads ? make_for_all(comm, m) : NULL;
    ct_comm ***all = (ct_comm ***)ct_calloc(ranks, sizeof(ct_comm **));
    if (all == NULL) {
        ct_free((void *)own);
        return ct_fail(err, CT_ENOMEM, "no memory for %zu addresses", ranks);
    }
    const ct_span in = {(void *)&own, sizeof(ct_comm **), CT_U8};
    const ct_span out = {(void *)all, ranks * sizeof(ct_comm **), CT_U8};
    ct_status status = ct_comm_all_gather(comm, &out, &in, err);
    if (status == CT_OK && m->n > 1) {
        ct_comm **comms = all[m->ranks[0]];
        *made = comms == NULL ? NULL : comms[m->index];
    }
    if (status == CT_OK) {
        status = ct_comm_barrier(comm, err);
    }
    ct_free((void *)own);
    ct_free((void *)all);
    return status;
}

static const ct_comm_ops local_ops = {
    .name = "local",
    .compares = true,
    .run = local_run,
    .group = local_group,
    .free = local_free,
};

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
    if (!form_group(&local_ops, comms, world_size, timeout_seconds)) {
        return ct_fail(err, CT_ENOMEM, "no memory for a group of %d ranks", world_size);
    }
    return CT_OK;
}
