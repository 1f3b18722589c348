/* A group over two others: collectives run within the machine, then across machines, so
 * that of n bytes a rank sends n / ranks_a_machine across.
 *
 * The collectives of a group have to be called in one order by all ranks. So an
 * all_reduce under way advances only when another collective is started or waited for,
 * never because data has arrived: a start begins the step within the machine and sends
 * the all_reduces before it across machines; a wait does the rest. */
#include "core/comm/hierarchical.h"

#include "core/base/alloc.h"
#include "core/comm/reduce.h"

#include <string.h>

typedef enum stage {
    WITHIN,
    ACROSS,
    ENDED
} stage;

/* An all_reduce by shards: reduce_scatter within the machine, all_reduce of the shard
 * across machines, all_gather within the machine. */
struct ct_work {
    ct_request request;
    ct_span even,
        rest;      /* the equal shards of all ranks, and the elements behind them */
    ct_span shard; /* this rank's, in `memory` */
    void *memory;
    size_t room;
    ct_work *step; /* under way in the inner or the outer group */
    stage stage;
    bool under_way; /* in the group's list */
    ct_status status;
    ct_error error;
    ct_work *next;
};

typedef struct hierarchical {
    ct_comm base; /* first: a ct_comm * of ours is a hierarchical * */
    ct_comm *inner, *outer, *whole;
    bool compares; /* all ranks' requests, over `whole`, before each collective */
    void *scratch;
    size_t room;
    ct_work *first, *last; /* all_reduces under way, in the order of their starts */
    ct_work *free_works;   /* for reuse, with their memory */
} hierarchical;

/* ---- the two groups -------------------------------------------------------------- */

/* Puts the place of a failure before its message: "all_reduce on rank 5 of 8, across
 * machines: ...". */
static ct_status
add_place(const hierarchical *self, const char *what, const ct_comm *group,
          ct_status status, ct_error *err)
{
    char text[sizeof err->message];
    if (status == CT_OK || status == CT_EHOST || err == NULL) {
        return status;
    }
    memcpy(text, err->message, sizeof text);
    return ct_fail(err, status, "%s on rank %d of %d, %s: %s", what, self->base.rank,
                   self->base.world_size,
                   group == self->inner ? "within its machine" : "across machines",
                   text);
}

/* Runs a step of the collective `what` in one of the groups. */
static ct_status
run_in(hierarchical *self, ct_comm *group, const char *what, const ct_request *r,
       ct_error *err)
{
    group->label = self->base.label;
    const ct_status status = ct_comm_run(group, r, err);
    group->label = NULL;
    return add_place(self, what, group, status, err);
}

static ct_status
make_room(hierarchical *self, size_t n, ct_dtype dtype, ct_error *err)
{
    return ct_grow(&self->scratch, &self->room, n * ct_dtype_size(dtype), 1, err);
}

/* n elements of the span from `at` on. */
static ct_span
part_of(const ct_span *span, size_t at, size_t n)
{
    const size_t offset = at * ct_dtype_size(span->dtype);
    return (ct_span){n == 0 ? span->data : (char *)span->data + offset, n, span->dtype};
}

static ct_span
scratch_of(const hierarchical *self, size_t at, size_t n, ct_dtype dtype)
{
    const ct_span all = {self->scratch, at + n, dtype};
    return part_of(&all, at, n);
}

/* ---- gathering ------------------------------------------------------------------- */

/* Each rank gathers the parts of the ranks with its place on their machines; then each
 * machine's parts are gathered within, into the machine's block of `out`. */
static ct_status
gather(hierarchical *self, const char *what, const ct_span *out, const ct_span *in,
       ct_error *err)
{
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = in->n * (size_t)self->inner->world_size;
    ct_status status = make_room(self, machines * in->n, in->dtype, err);
    if (status == CT_OK) {
        const ct_request r = {.what = CT_ALL_GATHER,
                              .in = *in,
                              .out = scratch_of(self, 0, machines * in->n, in->dtype)};
        status = run_in(self, self->outer, what, &r, err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_ALL_GATHER,
                              .in = scratch_of(self, m * in->n, in->n, in->dtype),
                              .out = part_of(out, m * block, block)};
        status = run_in(self, self->inner, what, &r, err);
    }
    return status;
}

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

/* all_reduce with one rounding: every rank gathers all elements and reduces in rank
 * order. */
static ct_status
reduce_gathered(hierarchical *self, const ct_span *span, ct_reduce_op op, ct_error *err)
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

/* A mean of integers is rounded once, after all integers have been gathered. */
static bool
is_integer_mean(const ct_request *r)
{
    return r->op == CT_REDUCE_MEAN && !ct_dtype_is_float(r->in.dtype);
}

/* ---- the other collectives ------------------------------------------------------- */

static ct_status
scatter_integer_means(hierarchical *self, const ct_request *r, ct_error *err)
{
    const ct_span *in = &r->in, *out = &r->out;
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

/* Sends each machine the row of the scratch's first half for that machine, and reduces
 * the received rows: gloo's own reduce_scatter sends all rows to all. */
static ct_status
scatter_rows(hierarchical *self, const ct_request *whole, ct_error *err)
{
    const size_t machines = (size_t)self->outer->world_size, n = whole->out.n;
    const ct_request r = {
        .what = CT_ALL_TO_ALL,
        .in = scratch_of(self, 0, machines * n, whole->in.dtype),
        .out = scratch_of(self, machines * n, machines * n, whole->in.dtype)};
    const ct_status status = run_in(self, self->outer, "reduce_scatter", &r, err);
    return status == CT_OK
               ? reduce_rows(r.out.data, machines, &whole->out, whole->op, err)
               : status;
}

/* reduce_scatter and all_to_all: within each machine to the rank that has the place of
 * the receiver, for one receiving machine after the other; then across machines. */
static ct_status
exchange_blocks(hierarchical *self, const ct_request *whole, ct_error *err)
{
    const char *what = ct_collective_name(whole->what);
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = whole->in.n / machines;
    const bool reduces = whole->what == CT_REDUCE_SCATTER;
    const size_t part = reduces ? whole->out.n : block;
    const ct_dtype dtype = whole->in.dtype;
    ct_request r = {.what = whole->what, .op = whole->op};
    ct_status status = make_room(self, machines * part * (reduces ? 2 : 1), dtype, err);
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        r.in = part_of(&whole->in, m * block, block);
        r.out = scratch_of(self, m * part, part, dtype);
        status = run_in(self, self->inner, what, &r, err);
    }
    if (status != CT_OK || reduces) {
        return status == CT_OK ? scatter_rows(self, whole, err) : status;
    }
    r.in = scratch_of(self, 0, machines * part, dtype);
    r.out = whole->out;
    return run_in(self, self->outer, what, &r, err);
}

static ct_status
reduce_scatter(hierarchical *self, const ct_request *r, ct_error *err)
{
    if (r->in.n == 0) {
        return CT_OK;
    }
    return is_integer_mean(r) ? scatter_integer_means(self, r, err)
                              : exchange_blocks(self, r, err);
}

/* Between the machines through the ranks that have the root's place. */
static ct_status
broadcast_or_reduce(hierarchical *self, const ct_request *whole, ct_error *err)
{
    const int ranks = self->inner->world_size;
    const char *what = ct_collective_name(whole->what);
    const bool reduces = whole->what == CT_REDUCE;
    const bool crosses = self->inner->rank == whole->root % ranks;
    ct_request within = *whole, across = *whole;
    ct_status status = CT_OK;
    within.root = whole->root % ranks;
    across.root = whole->root / ranks;
    if (reduces) {
        status = run_in(self, self->inner, what, &within, err);
    }
    if (status == CT_OK && crosses) {
        status = run_in(self, self->outer, what, &across, err);
    }
    return status == CT_OK && !reduces ? run_in(self, self->inner, what, &within, err)
                                       : status;
}

/* The second barrier within holds a machine's ranks until the last machine has come. */
static ct_status
barrier(hierarchical *self, const ct_request *r, ct_error *err)
{
    ct_comm *const groups[] = {self->inner, self->outer, self->inner};
    ct_status status = CT_OK;
    for (int i = 0; status == CT_OK && i < 3; i++) {
        status = run_in(self, groups[i], "barrier", r, err);
    }
    return status;
}

/* ---- all_reduce by shards -------------------------------------------------------- */

enum {
    SHORT_BYTES = 4 << 10 /* up to here the number of messages costs more than bytes */
};

static bool
goes_by_shards(const ct_request *r)
{
    return r->what == CT_ALL_REDUCE &&
           r->in.n * ct_dtype_size(r->in.dtype) > SHORT_BYTES && !is_integer_mean(r);
}

static ct_work *
take_free_work(hierarchical *self)
{
    ct_work *w = self->free_works;
    if (w == NULL) {
        return ct_calloc(1, sizeof *w);
    }
    self->free_works = w->next;
    *w = (ct_work){.memory = w->memory, .room = w->room};
    return w;
}

static void
keep_free_work(hierarchical *self, ct_work *w)
{
    w->next = self->free_works;
    self->free_works = w;
}

static void
append(hierarchical *self, ct_work *w)
{
    if (self->first == NULL) {
        self->first = w;
    }
    else {
        self->last->next = w;
    }
    self->last = w;
    w->under_way = true;
}

static ct_status
divide(const hierarchical *self, ct_work *w, const ct_request *request, ct_error *err)
{
    const ct_span *span = &request->in;
    const size_t ranks = (size_t)self->inner->world_size;
    const size_t shard = span->n / ranks, even = shard * ranks;
    ct_status status =
        ct_grow(&w->memory, &w->room, shard * ct_dtype_size(span->dtype), 1, err);
    w->request = *request;
    w->even = part_of(span, 0, even);
    w->rest = part_of(span, even, span->n - even);
    w->shard = (ct_span){w->memory, shard, span->dtype};
    return status;
}

static ct_status
start_within(const hierarchical *self, ct_work *w, ct_error *err)
{
    const ct_request r = {
        .what = CT_REDUCE_SCATTER, .op = w->request.op, .in = w->even, .out = w->shard};
    self->inner->label = self->base.label;
    const ct_status status = ct_comm_start(self->inner, &r, &w->step, err);
    self->inner->label = NULL;
    return add_place(self, "all_reduce", self->inner, status, err);
}

static void
send_across(const hierarchical *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = w->request.op, .in = w->shard};
    w->status = ct_comm_wait(self->inner, w->step, &w->error);
    (void)add_place(self, "all_reduce", self->inner, w->status, &w->error);
    w->step = NULL;
    if (w->status == CT_OK) {
        w->status = ct_comm_start(self->outer, &r, &w->step, &w->error);
        (void)add_place(self, "all_reduce", self->outer, w->status, &w->error);
    }
    w->stage = w->status == CT_OK ? ACROSS : ENDED;
}

/* Sends all works that are still within the machine across, in order. */
static void
send_all_across(const hierarchical *self)
{
    for (ct_work *w = self->first; w != NULL; w = w->next) {
        if (w->stage == WITHIN) {
            send_across(self, w);
        }
    }
}

/* NULL, with *status and *err, on failure. */
static ct_work *
begin(hierarchical *self, const ct_request *request, ct_status *status, ct_error *err)
{
    ct_work *w = take_free_work(self);
    if (w == NULL) {
        *status = ct_fail(err, CT_ENOMEM, "no memory to begin an all_reduce");
        return NULL;
    }
    *status = divide(self, w, request, err);
    if (*status == CT_OK) {
        *status = start_within(self, w, err);
    }
    if (*status != CT_OK) {
        keep_free_work(self, w);
        return NULL;
    }
    send_all_across(self);
    append(self, w);
    return w;
}

static void
gather_shards(hierarchical *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_GATHER, .in = w->shard, .out = w->even};
    w->status = ct_comm_wait(self->outer, w->step, &w->error);
    (void)add_place(self, "all_reduce", self->outer, w->status, &w->error);
    if (w->status == CT_OK) {
        w->status = run_in(self, self->inner, "all_reduce", &r, &w->error);
    }
    if (w->status == CT_OK && w->rest.n != 0) {
        w->status = reduce_gathered(self, &w->rest, w->request.op, &w->error);
    }
    w->stage = ENDED;
}

/* Ends all works up to `work`, and returns it to the free ones. */
static ct_status
end(hierarchical *self, ct_work *work, ct_error *err)
{
    send_all_across(self);
    while (work->under_way) {
        ct_work *w = self->first;
        if (w->stage == ACROSS) {
            gather_shards(self, w);
        }
        self->first = w->next;
        w->under_way = false;
    }
    const ct_status status = work->status;
    if (status != CT_OK && err != NULL) {
        *err = work->error;
    }
    keep_free_work(self, work);
    return status;
}

static ct_status
all_reduce(hierarchical *self, const ct_request *r, ct_error *err)
{
    ct_status status = CT_OK;
    if (!goes_by_shards(r)) {
        return reduce_gathered(self, &r->in, r->op, err);
    }
    ct_work *work = begin(self, r, &status, err);
    return work != NULL ? end(self, work, err) : status;
}

/* ---- the table ------------------------------------------------------------------- */

/* CT_EINVAL on all ranks unless the requests are alike, if the group compares requests.
 */
static ct_status
compare(const hierarchical *self, const ct_request *r, ct_error *err)
{
    const ct_request own = ct_request_labelled(&self->base, r);
    return self->compares ? ct_requests_exchange(self->whole, &own, err) : CT_OK;
}

static ct_status
hierarchical_run(ct_comm *comm, const ct_request *r, ct_error *err)
{
    hierarchical *self = (hierarchical *)comm;
    ct_status status = compare(self, r, err);
    if (status == CT_OK) {
        status = ct_request_check(r, comm->world_size, err);
    }
    if (status != CT_OK) {
        return status;
    }
    switch (r->what) {
    case CT_ALL_REDUCE:
        return all_reduce(self, r, err);
    case CT_ALL_GATHER:
        return gather(self, "all_gather", &r->out, &r->in, err);
    case CT_REDUCE_SCATTER:
        return reduce_scatter(self, r, err);
    case CT_ALL_TO_ALL:
        return exchange_blocks(self, r, err);
    case CT_BROADCAST:
        return broadcast_or_reduce(self, r, err);
    case CT_REDUCE:
        return is_integer_mean(r) ? reduce_gathered(self, &r->in, r->op, err)
                                  : broadcast_or_reduce(self, r, err);
    case CT_BARRIER:
        break;
    }
    return barrier(self, r, err);
}

/* Only all_reduces by shards work while the caller does. */
static ct_status
hierarchical_start(ct_comm *comm, const ct_request *request, ct_work **work,
                   ct_error *err)
{
    if (!goes_by_shards(request)) {
        return ct_comm_run(comm, request, err);
    }
    ct_status status = compare((hierarchical *)comm, request, err);
    if (status == CT_OK) {
        *work = begin((hierarchical *)comm, request, &status, err);
    }
    return status;
}

static ct_status
hierarchical_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    return end((hierarchical *)comm, work, err);
}

static ct_status
hierarchical_group(ct_comm *comm, const ct_members *members, ct_comm **made,
                   ct_error *err)
{
    ct_comm *whole = ((hierarchical *)comm)->whole;
    if (whole->ops->group == NULL) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       whole->ops->name);
    }
    return whole->ops->group(whole, members, made, err);
}

static ct_status
hierarchical_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return ct_comm_memory(((hierarchical *)comm)->inner, bytes, memory, err);
}

static void
free_groups(ct_comm *inner, ct_comm *outer, ct_comm *whole)
{
    inner->ops->free(inner);
    outer->ops->free(outer);
    whole->ops->free(whole);
}

static void
hierarchical_free(ct_comm *comm)
{
    hierarchical *self = (hierarchical *)comm;
    free_groups(self->inner, self->outer, self->whole);
    while (self->free_works != NULL) {
        ct_work *w = self->free_works;
        self->free_works = w->next;
        ct_free(w->memory);
        ct_free(w);
    }
    ct_free(self->scratch);
    ct_free(self);
}

static const ct_comm_ops hierarchical_ops = {
    .name = "hierarchical",
    .run = hierarchical_run,
    .start = hierarchical_start,
    .wait = hierarchical_wait,
    .group = hierarchical_group,
    .memory = hierarchical_memory,
    .free = hierarchical_free,
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
ct_comm_hierarchical_new_steal(ct_comm **comm, ct_comm *inner, ct_comm *outer,
                               ct_comm *whole, bool compares, ct_error *err)
{
    hierarchical *self = ct_calloc(1, sizeof *self);
    ct_status status = self == NULL ? ct_fail(err, CT_ENOMEM, "no memory for a group")
                                    : check_ranks(inner, outer, whole, err);
    if (self == NULL || status != CT_OK) {
        free_groups(inner, outer, whole);
        ct_free(self);
        return status;
    }
    const int ranks = inner->world_size, of = whole->world_size;
    inner->names = (ct_rank_names){outer->rank * ranks, 1, of};
    outer->names = (ct_rank_names){inner->rank, ranks, of};
    *self = (hierarchical){
        .base = ct_comm_made(&hierarchical_ops, whole->rank, of),
        .compares = compares,
        .inner = inner,
        .outer = outer,
        .whole = whole,
    };
    *comm = &self->base;
    return CT_OK;
}

/* ---- one level ------------------------------------------------------------------- */

int
ct_comm_ranks_a_machine(const ct_comm *comm)
{
    return comm->ops == &hierarchical_ops
               ? ((const hierarchical *)comm)->inner->world_size
               : 0;
}

ct_status
ct_comm_run_level(ct_comm *comm, bool across, const ct_request *request, ct_error *err)
{
    hierarchical *self = (hierarchical *)comm;
    const ct_status status = compare(self, request, err);
    return status == CT_OK ? run_in(self, across ? self->outer : self->inner,
                                    ct_collective_name(request->what), request, err)
                           : status;
}
