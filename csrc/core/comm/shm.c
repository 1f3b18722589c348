/* The group of the processes of one machine, and its queue of collectives under way.
 *
 * A collective that has begun advances whenever the rank calls anything of the group,
 * as far as the other ranks allow. Collectives end in the order of their starts, so
 * transfers never overlap in the exchange. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include "core/comm/shm.h"

#include "core/base/alloc.h"
#include "core/base/pages.h"
#include "core/comm/exchange.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    LONGEST_KEY = 255,
    SHORT_BYTES = 64 << 10 /* all_reduces up to here take one transfer, not two */
};

/* A collective: one transfer, or a reduction by shards and then their gathering. Errors
 * are kept here: a failure is reported to the caller that waits for this work, whoever
 * advanced the queue. */
struct ct_work {
    ct_request request;
    ct_transfer transfer;  /* under way */
    bool is_gathered_next; /* the transfer is the first of two */
    bool ended;
    ct_status status;
    ct_error error;
    ct_work *next;
};

typedef struct member {
    ct_comm base; /* first: a ct_comm * of ours is a member * */
    ct_segment segment;
    ct_exchange exchange;
    bool busy;             /* a thread is in here */
    ct_work *first, *last; /* begun and not ended, in order */
    double timeout_seconds;
    char key[]; /* names the group */
} member;

/* ---- transfers of a collective --------------------------------------------------- */

static ct_transfer
transfer_of(const ct_request *r, size_t part, size_t ranks, ct_sink sink)
{
    return (ct_transfer){
        .request = r,
        .from = r->in.data,
        .to = r->out.data,
        .item = ct_dtype_size(r->in.dtype),
        .part = part,
        .total = part * ranks,
        .sink = sink,
    };
}

static char *
own_shard(const member *self, const ct_request *r, size_t shard)
{
    const size_t begin = (size_t)self->base.rank * shard;
    /* The last ranks' shards may be empty and begin at the end. */
    return (char *)r->in.data +
           (begin < r->in.n ? begin : r->in.n) * ct_dtype_size(r->in.dtype);
}

/* Every rank reduces a short operand whole; of a long operand a shard, and gathers the
 * other shards. Of two ranks each reads the same number of bytes either way. */
static void
plan_all_reduce(const member *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t ranks = (size_t)self->base.world_size;
    const size_t shard = (r->in.n + ranks - 1) / ranks;
    const bool is_short =
        ranks <= 2 || r->in.n * ct_dtype_size(r->in.dtype) <= SHORT_BYTES;
    w->transfer = transfer_of(r, is_short ? r->in.n : shard, ranks, CT_SINK_REDUCE);
    w->transfer.to = r->in.data;
    if (!is_short) {
        w->transfer.to = own_shard(self, r, shard);
        w->transfer.total = r->in.n;
        w->transfer.each_own = true;
        w->is_gathered_next = true;
    }
}

static void
plan_gathering(const member *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t shard = w->transfer.part;
    w->transfer = transfer_of(r, shard, (size_t)self->base.world_size, CT_SINK_GATHER);
    w->transfer.total = r->in.n;
    w->transfer.from = own_shard(self, r, shard);
    w->transfer.to = r->in.data;
    w->is_gathered_next = false;
}

static void
plan(const member *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t ranks = (size_t)self->base.world_size;
    switch (r->what) {
    case CT_ALL_REDUCE:
        plan_all_reduce(self, w);
        return;
    case CT_ALL_GATHER:
        w->transfer = transfer_of(r, r->in.n, ranks, CT_SINK_GATHER);
        return;
    case CT_REDUCE_SCATTER:
        w->transfer = transfer_of(r, r->out.n, ranks, CT_SINK_REDUCE);
        w->transfer.each_own = true;
        return;
    case CT_ALL_TO_ALL:
        w->transfer = transfer_of(r, r->in.n / ranks, ranks, CT_SINK_GATHER);
        w->transfer.each_own = true;
        return;
    case CT_BROADCAST:
    case CT_REDUCE:
        w->transfer = transfer_of(
            r, r->in.n, ranks, r->what == CT_BROADCAST ? CT_SINK_COPY : CT_SINK_ROOT);
        w->transfer.to = r->in.data;
        return;
    /* No elements: comparing the requests makes every rank wait for all others. */
    case CT_BARRIER:
        w->transfer = transfer_of(r, 0, ranks, CT_SINK_REDUCE);
        return;
    }
}

/* ---- the queue ------------------------------------------------------------------- */

static void
append(member *self, ct_work *w, const ct_request *request)
{
    *w = (ct_work){.request = *request};
    plan(self, w);
    if (self->first == NULL) {
        self->first = w;
    }
    else {
        self->last->next = w;
    }
    self->last = w;
}

/* Advances a collective as far as possible; with `waits`, to the end. */
static void
advance(member *self, ct_work *w, bool waits)
{
    w->status = ct_exchange_step(&self->exchange, &w->transfer, waits, &w->error);
    if (w->status == CT_OK && w->transfer.stage == CT_STAGE_ENDED &&
        w->is_gathered_next && !w->transfer.in_place) {
        plan_gathering(self, w);
        w->status = ct_exchange_step(&self->exchange, &w->transfer, waits, &w->error);
    }
    w->ended = w->transfer.stage == CT_STAGE_ENDED;
}

/* With `until`, ends all collectives up to that one; else advances without waiting. */
static void
progress(member *self, const ct_work *until)
{
    bool moved = true;
    while (self->first != NULL && moved && (until == NULL || !until->ended)) {
        ct_work *w = self->first;
        advance(self, w, until != NULL);
        moved = w->ended;
        if (moved) {
            self->first = w->next;
        }
    }
}

/* A flag and no lock: the order of two threads' collectives would differ between ranks,
 * so a second thread gets an error. */
static ct_status
enter(member *self, const ct_request *r, ct_error *err)
{
    return __atomic_exchange_n(&self->busy, true, __ATOMIC_ACQUIRE)
               ? ct_fail(err, CT_EINVAL,
                         "%s while another thread of rank %d is in a collective of the "
                         "same group",
                         ct_collective_name(r->what), self->base.rank)
               : CT_OK;
}

static void
leave(member *self)
{
    __atomic_store_n(&self->busy, false, __ATOMIC_RELEASE);
}

static ct_status
result_of(const ct_work *w, ct_error *err)
{
    if (w->status != CT_OK && err != NULL) {
        *err = w->error;
    }
    return w->status;
}

/* ---- collectives ----------------------------------------------------------------- */

/* CT_OK with the group entered and *r labelled. */
static ct_status
open_queue(ct_comm *comm, const ct_request *request, ct_request *r, ct_error *err)
{
    *r = ct_request_labelled(comm, request);
    const ct_status here = ct_comm_check_here(comm, ct_collective_name(r->what), err);
    return here == CT_OK ? enter((member *)comm, r, err) : here;
}

static ct_status
shm_run(ct_comm *comm, const ct_request *request, ct_error *err)
{
    member *self = (member *)comm;
    ct_request r;
    ct_work w;
    const ct_status status = open_queue(comm, request, &r, err);
    if (status != CT_OK) {
        return status;
    }
    /* On the stack: the queue has dropped this work when progress returns. */
    append(self, &w, &r);
    progress(self, &w);
    leave(self);
    return result_of(&w, err);
}

static ct_status
shm_start(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    member *self = (member *)comm;
    ct_request r;
    /* Before the group is entered, so that a failure has nothing to undo. */
    ct_work *w = ct_alloc(sizeof *w);
    if (w == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to begin a collective");
    }
    const ct_status status = open_queue(comm, request, &r, err);
    if (status != CT_OK) {
        ct_free(w);
        return status;
    }
    append(self, w, &r);
    progress(self, NULL);
    leave(self);
    *work = w;
    return CT_OK;
}

/* A work may be dropped, and so waited for, while another thread is in here. */
static ct_status
shm_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    const struct timespec nap = {0, 200000};
    member *self = (member *)comm;
    const ct_status here = ct_comm_check_here(comm, "the end of a collective", err);
    if (here != CT_OK) {
        return here;
    }
    while (enter(self, &work->request, NULL) != CT_OK) {
        (void)nanosleep(&nap, NULL);
    }
    progress(self, work);
    leave(self);
    const ct_status status = result_of(work, err);
    ct_free(work);
    return status;
}

/* The request has an `out`, by which the ranks distinguish a stream from an all_reduce.
 */
static ct_status
shm_stream(ct_comm *comm, const ct_stream *stream, ct_error *err)
{
    member *self = (member *)comm;
    const ct_span all = {.n = stream->n, .dtype = stream->dtype};
    const ct_request r = {.what = CT_ALL_REDUCE, .in = all, .out = all};
    ct_work w;
    ct_status status = ct_comm_check_here(comm, "all_reduce", err);
    if (status == CT_OK) {
        status = enter(self, &r, err);
    }
    if (status != CT_OK) {
        return status;
    }
    append(self, &w, &r);
    /* In place of the transfer of an all_reduce, whose operand would have an
     * address. */
    w.transfer =
        transfer_of(&w.request, stream->n, (size_t)comm->world_size, CT_SINK_REDUCE);
    w.transfer.stream = stream;
    w.is_gathered_next = false;
    progress(self, &w);
    leave(self);
    return result_of(&w, err);
}

/* ---- memory that the other ranks read in place ----------------------------------- */

/* Fails on all ranks alike: the least and the most bytes are reduced first. */
static ct_status
agree_on_bytes(member *self, size_t bytes, ct_error *err)
{
    /* A single reduction yields both: the least of the negated numbers is the negated
     * most. */
    double least_and_most[2] = {(double)bytes, -(double)bytes};
    const ct_span span = {least_and_most, 2, CT_F64};
    ct_status status = ct_comm_all_reduce(&self->base, &span, CT_REDUCE_MIN, err);
    if (status != CT_OK) {
        return status;
    }
    if (ct_pages_round(bytes) == 0 || least_and_most[0] != -least_and_most[1]) {
        return ct_fail(err, CT_EINVAL,
                       "shared memory must be of equal bytes > 0 on every rank, got "
                       "%.0f to %.0f",
                       least_and_most[0], -least_and_most[1]);
    }
    return CT_OK;
}

static ct_status
join_peer_buffer(const member *self, size_t bytes, ct_pages **buffer, ct_error *err)
{
    char key[LONGEST_KEY + 64];
    ct_segment segment = {.fd = -1};
    const size_t rank = (size_t)self->base.rank;
    /* The number is the same on all ranks, because all add buffers in the same
     * order. */
    (void)snprintf(key, sizeof key, "memory %zu of %s", self->exchange.peer_buffers.n,
                   self->key);
    ct_status status = ct_segment_join(
        &segment, key, self->base.rank, self->base.world_size,
        bytes * (size_t)self->base.world_size, self->timeout_seconds, err);
    return status == CT_OK
               ? ct_pages_new_steal(buffer, &segment, rank * bytes, bytes, err)
               : status;
}

static ct_status
shm_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    member *self = (member *)comm;
    ct_pages *buffer = NULL;
    ct_status status = ct_peer_buffers_reserve(&self->exchange.peer_buffers, err);
    if (status == CT_OK) {
        status = agree_on_bytes(self, bytes, err);
    }
    if (status == CT_OK) {
        status = join_peer_buffer(self, ct_pages_round(bytes), &buffer, err);
    }
    if (status == CT_OK) {
        /* Before the barrier: after it a place in this buffer may be named by any
         * rank. */
        ct_peer_buffers_add(&self->exchange.peer_buffers, buffer);
        status = ct_comm_barrier(comm, err);
    }
    if (status != CT_OK) {
        ct_pages_drop(buffer);
        return status;
    }
    *memory = buffer;
    return CT_OK;
}

/* ---- joining, leaving and splitting ---------------------------------------------- */

/* FNV-1a of the text, whose length grows with each group within a group. */
static unsigned long long
hash_text(const char *text)
{
    unsigned long long hash = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return hash;
}

static ct_status
shm_group(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    const member *self = (const member *)comm;
    char key[LONGEST_KEY + 1];
    if (members->n < 2) {
        return CT_OK;
    }
    /* A long key is cut at the end, so the hash of the whole comes first. */
    (void)snprintf(key, sizeof key, "%016llx group %u of rank %d of %s",
                   hash_text(self->key), members->serial, members->ranks[0], self->key);
    return ct_comm_shm_new(made, key, members->index, members->n, self->timeout_seconds,
                           err);
}

static void
shm_free(ct_comm *comm)
{
    member *self = (member *)comm;
    /* First: leaving the barrier writes to the segment. */
    ct_exchange_fini(&self->exchange);
    ct_segment_leave(&self->segment);
    ct_free(self);
}

static const ct_comm_ops shm_ops = {
    .name = "shm",
    .compares = true,
    .run = shm_run,
    .start = shm_start,
    .wait = shm_wait,
    .stream = shm_stream,
    .group = shm_group,
    .memory = shm_memory,
    .free = shm_free,
    .batch_bytes = 128 << 10, /* a slot of the exchange */
};

static ct_status
check_arguments(const char *key, int rank, int world_size, double timeout_seconds,
                ct_error *err)
{
    if (world_size < 1 || world_size > CT_SEGMENT_MOST_RANKS) {
        return ct_fail(err, CT_EINVAL, "world_size must be in [1, %d], got %d",
                       CT_SEGMENT_MOST_RANKS, world_size);
    }
    if (rank < 0 || rank >= world_size) {
        return ct_fail(err, CT_EINVAL, "rank must be in [0, %d), got %d", world_size,
                       rank);
    }
    if (strlen(key) > LONGEST_KEY) {
        return ct_fail(err, CT_EINVAL, "key must have at most %d bytes, got %zu",
                       LONGEST_KEY, strlen(key));
    }
    if (!(timeout_seconds > 0.0 && timeout_seconds < 1e9)) {
        return ct_fail(err, CT_EINVAL,
                       "timeout_seconds must be above 0 and below 1e9, got %g",
                       timeout_seconds);
    }
    return CT_OK;
}

static member *
member_new(const char *key, int rank, int world_size, double timeout_seconds)
{
    const size_t key_bytes = strlen(key) + 1;
    member *self = ct_calloc(1, sizeof *self + key_bytes);
    if (self != NULL) {
        self->base = ct_comm_made(&shm_ops, rank, world_size);
        self->timeout_seconds = timeout_seconds;
        memcpy(self->key, key, key_bytes);
    }
    return self;
}

/* Returns when all ranks have joined. */
static ct_status
join(member *self, ct_error *err)
{
    const int rank = self->base.rank, world_size = self->base.world_size;
    ct_status status =
        ct_segment_join(&self->segment, self->key, rank, world_size,
                        ct_exchange_bytes(world_size), self->timeout_seconds, err);
    if (status == CT_OK) {
        status = ct_exchange_init(&self->exchange, &self->segment, rank, world_size,
                                  &self->base.names, self->timeout_seconds, err);
    }
    return status == CT_OK ? ct_comm_barrier(&self->base, err) : status;
}

ct_status
ct_comm_shm_new(ct_comm **comm, const char *key, int rank, int world_size,
                double timeout_seconds, ct_error *err)
{
    ct_status status = check_arguments(key, rank, world_size, timeout_seconds, err);
    if (status != CT_OK) {
        return status;
    }
    member *self = member_new(key, rank, world_size, timeout_seconds);
    if (self == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a group of %d ranks", world_size);
    }
    status = join(self, err);
    if (status != CT_OK) {
        shm_free(&self->base);
        return status;
    }
    *comm = &self->base;
    return CT_OK;
}
