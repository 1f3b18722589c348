/* A group over two others: within the machine, then across machines, then within again,
 * so that each byte crosses between machines once. */
#include "core/comm/hierarchical.h"

#include "core/base/alloc.h"
#include "core/comm/comm.h"
#include "core/comm/reduce.h"

#include <string.h>

typedef enum stage {
    WITHIN,
    ACROSS,
    ENDED
} stage;

struct ct_work {
    ct_request request; /* an all_reduce */
    ct_span even, rest; /* what falls into equal shares, and the elements behind it */
    ct_span share;      /* this rank's, in memory of its own */
    void *memory;
    size_t room;
    ct_work *step; /* the level's, under way */
    stage stage;
    bool under_way; /* in the group's list */
    ct_status status;
    ct_error error;
    ct_work *next;
};

typedef struct ct_hierarchical {
    ct_comm base; /* first: a ct_comm * of ours is a ct_hierarchical * */
    ct_comm *inner, *outer, *whole;
    bool compares; /* all ranks' requests, over `whole`, before each collective */
    void *scratch;
    size_t room;
    ct_work *first, *last; /* all_reduces under way, in the order of their starts */
    ct_work *free_works;   /* to be used again, with their memory */
} ct_hierarchical;

static void
ct_hierarchical_free_works(ct_hierarchical *self)
{
    while (self->free_works != NULL) {
        ct_work *w = self->free_works;
        self->free_works = w->next;
        ct_free(w->memory);
        ct_free(w);
    }
}

/* core/comm/hierarchical.c, entries of the table: an all_reduce of shares works while
 * the caller does; other requests have ended when they have been started. */
void ct_hierarchical_free_works(ct_hierarchical *self); /* none is under way */

/* ---- the two levels ----------------------------------------------------------------
 */

/* Says in *err where a failure was: "all_reduce on rank 5 of 8, across machines: ...".
 */
static ct_status
ct_hierarchical_say(const ct_hierarchical *self, const char *what, const char *where,
                    ct_status status, ct_error *err)
{
    char text[sizeof err->message];
    if (status == CT_OK || status == CT_EHOST || err == NULL) {
        return status;
    }
    memcpy(text, err->message, sizeof text);
    return ct_fail(err, status, "%s on rank %d of %d, %s: %s", what, self->base.rank,
                   self->base.world_size, where, text);
}

/* CT_EINVAL on all ranks unless they ask for the same, where that is compared. */
static ct_status
ct_hierarchical_compare(const ct_hierarchical *self, const ct_request *r, ct_error *err)
{
    const ct_request own = ct_request_labelled(&self->base, r);
    return self->compares ? ct_requests_exchange(self->whole, &own, err) : CT_OK;
}

static ct_status
run_labelled(const ct_hierarchical *self, ct_comm *level, const ct_request *r,
             ct_error *err)
{
    level->label = self->base.label;
    const ct_status status = ct_comm_run(level, r, err);
    level->label = NULL;
    return status;
}

/* Runs a step of the collective `what` on one of the levels. */
static ct_status
ct_hierarchical_within(ct_hierarchical *self, const char *what, const ct_request *r,
                       ct_error *err)
{
    return ct_hierarchical_say(self, what, "within its machine",
                               run_labelled(self, self->inner, r, err), err);
}

static ct_status
ct_hierarchical_across(ct_hierarchical *self, const char *what, const ct_request *r,
                       ct_error *err)
{
    return ct_hierarchical_say(self, what, "across machines",
                               run_labelled(self, self->outer, r, err), err);
}

/* Makes room for as many bytes in the group's own memory; what lies there. */
static ct_status
ct_hierarchical_make_room(ct_hierarchical *self, size_t bytes, ct_error *err)
{
    return ct_grow(&self->scratch, &self->room, bytes, 1, err);
}

/* n elements of the span from `at` on. */
static ct_span
ct_hierarchical_part(const ct_span *span, size_t at, size_t n)
{
    const size_t offset = at * ct_dtype_size(span->dtype);
    return (ct_span){n == 0 ? span->data : (char *)span->data + offset, n, span->dtype};
}

static ct_span
ct_hierarchical_scratch(const ct_hierarchical *self, size_t at, size_t n,
                        ct_dtype dtype)
{
    const ct_span all = {self->scratch, at + n, dtype};
    return ct_hierarchical_part(&all, at, n);
}

/* ---- what several collectives are made of ------------------------------------------
 */

/* Each rank fetches the parts of those with its place on the other machines; a
 * machine's parts then come together in the block of that machine. */
static ct_status
ct_hierarchical_gather(ct_hierarchical *self, const char *what, const ct_span *out,
                       const ct_span *in, ct_error *err)
{
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = in->n * (size_t)self->inner->world_size;
    ct_status status = ct_hierarchical_make_room(
        self, machines * in->n * ct_dtype_size(in->dtype), err);
    if (status == CT_OK) {
        const ct_request r = {
            .what = CT_ALL_GATHER,
            .in = *in,
            .out = ct_hierarchical_scratch(self, 0, machines * in->n, in->dtype)};
        status = ct_hierarchical_across(self, what, &r, err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {
            .what = CT_ALL_GATHER,
            .in = ct_hierarchical_scratch(self, m * in->n, in->n, in->dtype),
            .out = ct_hierarchical_part(out, m * block, block)};
        status = ct_hierarchical_within(self, what, &r, err);
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

/* all_reduce in one rounding: all ranks' elements on every rank, in their order. */
static ct_status
ct_hierarchical_reduce_gathered(ct_hierarchical *self, const ct_span *span,
                                ct_reduce_op op, ct_error *err)
{
    const size_t ranks = (size_t)self->base.world_size;
    const ct_span rows = {ct_alloc(ranks * span->n * ct_dtype_size(span->dtype)),
                          ranks * span->n, span->dtype};
    if (rows.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu elements", rows.n);
    }
    ct_status status = ct_hierarchical_gather(self, "all_reduce", &rows, span, err);
    if (status == CT_OK) {
        status = reduce_rows(rows.data, ranks, span, op, err);
    }
    ct_free(rows.data);
    return status;
}

/* ---- all ranks ask for the same, and it fits them ----------------------------------
 */

static ct_status
check(const ct_hierarchical *self, const ct_request *r, ct_error *err)
{
    const ct_status status = ct_hierarchical_compare(self, r, err);
    return status == CT_OK ? ct_request_check(r, self->base.world_size, err) : status;
}

/* ---- all_gather and reduce_scatter -------------------------------------------------
 */

static ct_status
scatter(ct_hierarchical *self, const ct_span *out, const ct_span *in, ct_reduce_op op,
        ct_error *err)
{
    const char *what = "reduce_scatter";
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = out->n * (size_t)self->inner->world_size;
    ct_status status = ct_hierarchical_make_room(
        self, machines * out->n * ct_dtype_size(in->dtype), err);
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {
            .what = CT_REDUCE_SCATTER,
            .op = op,
            .in = ct_hierarchical_part(in, m * block, block),
            .out = ct_hierarchical_scratch(self, m * out->n, out->n, in->dtype)};
        status = ct_hierarchical_within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {
            .what = CT_REDUCE_SCATTER,
            .op = op,
            .in = ct_hierarchical_scratch(self, 0, machines * out->n, in->dtype),
            .out = *out};
        status = ct_hierarchical_across(self, what, &r, err);
    }
    return status;
}

/* ---- the others --------------------------------------------------------------------
 */

static ct_status
hierarchical_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in,
                        ct_error *err)
{
    const ct_request r = {.what = CT_ALL_GATHER, .out = *out, .in = *in};
    const ct_status status = check((ct_hierarchical *)comm, &r, err);
    return status == CT_OK ? ct_hierarchical_gather((ct_hierarchical *)comm,
                                                    "all_gather", out, in, err)
                           : status;
}

/* A mean of integers has to see all of them before it is rounded. */
static ct_status
scatter_integer_means(ct_hierarchical *self, const ct_span *out, const ct_span *in,
                      ct_error *err)
{
    const size_t bytes = in->n * ct_dtype_size(in->dtype);
    ct_span copy = {ct_alloc(bytes), in->n, in->dtype};
    if (copy.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu bytes", bytes);
    }
    memcpy(copy.data, in->data, bytes);
    ct_status status =
        ct_hierarchical_reduce_gathered(self, &copy, CT_REDUCE_MEAN, err);
    const ct_span own =
        ct_hierarchical_part(&copy, (size_t)self->base.rank * out->n, out->n);
    if (status == CT_OK) {
        memcpy(out->data, own.data, out->n * ct_dtype_size(out->dtype));
    }
    ct_free(copy.data);
    return status;
}

static ct_status
hierarchical_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                            ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_REDUCE_SCATTER, .out = *out, .in = *in, .op = op};
    const ct_status status = check((ct_hierarchical *)comm, &r, err);
    if (status != CT_OK || in->n == 0) {
        return status;
    }
    return op == CT_REDUCE_MEAN && !ct_dtype_is_float(in->dtype)
               ? scatter_integer_means((ct_hierarchical *)comm, out, in, err)
               : scatter((ct_hierarchical *)comm, out, in, op, err);
}

/* First within machines, to the rank with the place of the receiver: the parts for each
 * machine lie side by side. */
static ct_status
hierarchical_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in,
                        ct_error *err)
{
    ct_hierarchical *self = (ct_hierarchical *)comm;
    const char *what = "all_to_all";
    const ct_request whole = {.what = CT_ALL_TO_ALL, .out = *out, .in = *in};
    const size_t machines = (size_t)self->outer->world_size, block = in->n / machines;
    ct_status status = check(self, &whole, err);
    if (status == CT_OK) {
        status = ct_hierarchical_make_room(self, in->n * ct_dtype_size(in->dtype), err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {
            .what = CT_ALL_TO_ALL,
            .in = ct_hierarchical_part(in, m * block, block),
            .out = ct_hierarchical_scratch(self, m * block, block, in->dtype)};
        status = ct_hierarchical_within(self, what, &r, err);
    }
    if (status == CT_OK) {
        const ct_request r = {.what = CT_ALL_TO_ALL,
                              .in = ct_hierarchical_scratch(self, 0, in->n, in->dtype),
                              .out = *out};
        status = ct_hierarchical_across(self, what, &r, err);
    }
    return status;
}

static ct_status
hierarchical_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    ct_hierarchical *self = (ct_hierarchical *)comm;
    const int ranks = self->inner->world_size;
    ct_request r = {.what = CT_BROADCAST, .in = *span, .root = root};
    ct_status status = check(self, &r, err);
    if (status == CT_OK && self->inner->rank == root % ranks) {
        r.root = root / ranks;
        status = ct_hierarchical_across(self, "broadcast", &r, err);
    }
    r.root = root % ranks;
    return status == CT_OK ? ct_hierarchical_within(self, "broadcast", &r, err)
                           : status;
}

/* To the rank of its own machine that has the root's place, and from those to it. */
static ct_status
reduce_shares(ct_hierarchical *self, const ct_span *span, ct_reduce_op op, int root,
              ct_error *err)
{
    const int ranks = self->inner->world_size;
    ct_request r = {.what = CT_REDUCE, .in = *span, .op = op, .root = root % ranks};
    ct_status status = ct_hierarchical_within(self, "reduce", &r, err);
    if (status == CT_OK && self->inner->rank == root % ranks) {
        r.root = root / ranks;
        status = ct_hierarchical_across(self, "reduce", &r, err);
    }
    return status;
}

static ct_status
hierarchical_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root,
                    ct_error *err)
{
    ct_hierarchical *self = (ct_hierarchical *)comm;
    const ct_request r = {.what = CT_REDUCE, .in = *span, .op = op, .root = root};
    const ct_status status = check(self, &r, err);
    if (status != CT_OK) {
        return status;
    }
    return op == CT_REDUCE_MEAN && !ct_dtype_is_float(span->dtype)
               ? ct_hierarchical_reduce_gathered(self, span, op, err)
               : reduce_shares(self, span, op, root, err);
}

/* The second within holds a machine's ranks until the last machine has come. */
static ct_status
hierarchical_barrier(ct_comm *comm, ct_error *err)
{
    ct_hierarchical *self = (ct_hierarchical *)comm;
    const ct_request r = {.what = CT_BARRIER};
    ct_status status = ct_hierarchical_compare(self, &r, err);
    if (status == CT_OK) {
        status = ct_hierarchical_within(self, "barrier", &r, err);
    }
    if (status == CT_OK) {
        status = ct_hierarchical_across(self, "barrier", &r, err);
    }
    return status == CT_OK ? ct_hierarchical_within(self, "barrier", &r, err) : status;
}

static ct_status
hierarchical_group(ct_comm *comm, const ct_members *members, ct_comm **made,
                   ct_error *err)
{
    ct_comm *whole = ((ct_hierarchical *)comm)->whole;
    if (whole->ops->group == NULL) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       whole->ops->name);
    }
    return whole->ops->group(whole, members, made, err);
}

static ct_status
hierarchical_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return ct_comm_memory(((ct_hierarchical *)comm)->inner, bytes, memory, err);
}

static void
free_one(ct_comm *comm)
{
    if (comm != NULL) {
        comm->ops->free(comm);
    }
}

static void
hierarchical_free(ct_comm *comm)
{
    ct_hierarchical *self = (ct_hierarchical *)comm;
    free_one(self->inner);
    free_one(self->outer);
    free_one(self->whole);
    ct_hierarchical_free_works(self);
    ct_free(self->scratch);
    ct_free(self);
}

enum {
    SHORT_BYTES = 4 << 10 /* from here on bytes cost more than the number of messages */
};

static bool
goes_by_shares(const ct_request *r)
{
    return r->what == CT_ALL_REDUCE &&
           r->in.n * ct_dtype_size(r->in.dtype) > SHORT_BYTES &&
           (r->op != CT_REDUCE_MEAN || ct_dtype_is_float(r->in.dtype));
}

static ct_work *
take_free_work(ct_hierarchical *self)
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
give_back(ct_hierarchical *self, ct_work *w)
{
    w->next = self->free_works;
    self->free_works = w;
}

static void
append(ct_hierarchical *self, ct_work *w)
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
divide(const ct_hierarchical *self, ct_work *w, const ct_request *request,
       ct_error *err)
{
    const ct_span *span = &request->in;
    const size_t ranks = (size_t)self->inner->world_size;
    const size_t share = span->n / ranks, even = share * ranks;
    ct_status status =
        ct_grow(&w->memory, &w->room, share * ct_dtype_size(span->dtype), 1, err);
    w->request = *request;
    w->even = ct_hierarchical_part(span, 0, even);
    w->rest = ct_hierarchical_part(span, even, span->n - even);
    w->share = (ct_span){w->memory, share, span->dtype};
    return status;
}

static const char name[] = "all_reduce";

static ct_status
start_within(const ct_hierarchical *self, ct_work *w, ct_error *err)
{
    const ct_request r = {
        .what = CT_REDUCE_SCATTER, .op = w->request.op, .in = w->even, .out = w->share};
    self->inner->label = self->base.label;
    const ct_status status = ct_comm_start(self->inner, &r, &w->step, err);
    self->inner->label = NULL;
    return ct_hierarchical_say(self, name, "within its machine", status, err);
}

static void
send_across(const ct_hierarchical *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = w->request.op, .in = w->share};
    w->status =
        ct_hierarchical_say(self, name, "within its machine",
                            ct_comm_wait(self->inner, w->step, &w->error), &w->error);
    w->step = NULL;
    if (w->status == CT_OK) {
        w->status = ct_hierarchical_say(
            self, name, "across machines",
            ct_comm_start(self->outer, &r, &w->step, &w->error), &w->error);
    }
    w->stage = w->status == CT_OK ? ACROSS : ENDED;
}

/* Everything that is still within its machine, in order. */
static void
send_all_across(const ct_hierarchical *self)
{
    for (ct_work *w = self->first; w != NULL; w = w->next) {
        if (w->stage == WITHIN) {
            send_across(self, w);
        }
    }
}

/* NULL, with *status and *err, on failure. */
static ct_work *
begin(ct_hierarchical *self, const ct_request *request, ct_status *status,
      ct_error *err)
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
        give_back(self, w);
        return NULL;
    }
    send_all_across(self);
    append(self, w);
    return w;
}

static ct_status
ct_hierarchical_start(ct_comm *comm, const ct_request *request, ct_work **work,
                      ct_error *err)
{
    ct_status status = CT_OK;
    if (!goes_by_shares(request)) {
        return ct_comm_run(comm, request, err);
    }
    status = ct_hierarchical_compare((ct_hierarchical *)comm, request, err);
    if (status != CT_OK) {
        return status;
    }
    *work = begin((ct_hierarchical *)comm, request, &status, err);
    return status;
}

static void
all_gather_share(ct_hierarchical *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_GATHER, .in = w->share, .out = w->even};
    w->status =
        ct_hierarchical_say(self, name, "across machines",
                            ct_comm_wait(self->outer, w->step, &w->error), &w->error);
    if (w->status == CT_OK) {
        w->status = ct_hierarchical_within(self, name, &r, &w->error);
    }
    if (w->status == CT_OK && w->rest.n != 0) {
        w->status =
            ct_hierarchical_reduce_gathered(self, &w->rest, w->request.op, &w->error);
    }
    w->stage = ENDED;
}

/* Ends the first of those under way. */
static void
end_first(ct_hierarchical *self)
{
    ct_work *w = self->first;
    if (w->stage == ACROSS) {
        all_gather_share(self, w);
    }
    self->first = w->next;
    w->under_way = false;
}

static ct_status
end(ct_hierarchical *self, ct_work *w, ct_error *err)
{
    send_all_across(self);
    while (w->under_way) {
        end_first(self);
    }
    const ct_status status = w->status;
    if (status != CT_OK && err != NULL) {
        *err = w->error;
    }
    give_back(self, w);
    return status;
}

static ct_status
ct_hierarchical_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    return end((ct_hierarchical *)comm, work, err);
}

static ct_status
ct_hierarchical_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op,
                           ct_error *err)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = op, .in = *span};
    ct_hierarchical *self = (ct_hierarchical *)comm;
    ct_status status = ct_hierarchical_compare(self, &r, err);
    if (status != CT_OK) {
        return status;
    }
    if (!goes_by_shares(&r)) {
        return ct_hierarchical_reduce_gathered(self, span, op, err);
    }
    ct_work *work = begin(self, &r, &status, err);
    return work != NULL ? end(self, work, err) : status;
}

static const ct_comm_ops hierarchical_ops = {
    .name = "levels",
    .all_reduce = ct_hierarchical_all_reduce,
    .all_gather = hierarchical_all_gather,
    .reduce_scatter = hierarchical_reduce_scatter,
    .all_to_all = hierarchical_all_to_all,
    .broadcast = hierarchical_broadcast,
    .reduce = hierarchical_reduce,
    .barrier = hierarchical_barrier,
    .start = ct_hierarchical_start,
    .wait = ct_hierarchical_wait,
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
    ct_hierarchical *self = ct_calloc(1, sizeof *self);
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
    *self = (ct_hierarchical){
        .base = ct_comm_made(&hierarchical_ops, whole->rank, of),
        .compares = compares,
        .inner = inner,
        .outer = outer,
        .whole = whole,
    };
    *comm = &self->base;
    return CT_OK;
}

/* An all_reduce over two levels: a share for each of the machine's ranks, reduced in
 * the machine, across machines, and handed round in the machine.
 *
 * A group's collectives have to be called in one order by all of its ranks, whatever
 * each has come to meanwhile. So a step is taken when another collective is started or
 * waited for, never because something has arrived: a start begins the first step and
 * sends those before it across, a wait does the rest. */
