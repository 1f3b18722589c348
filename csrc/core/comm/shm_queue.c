#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "core/comm/shm_queue.h"

#include "core/base/alloc.h"

#include <time.h>

enum {
    SHORT_BYTES = 64 << 10 /* all_reduces up to here take one transfer, not two */
};

/* A collective is one transfer, or two of which the second hands round what the first
 * has reduced. */
struct ct_work {
    ct_request request;
    ct_transfer transfer; /* the one under way */
    bool is_shared_out;   /* the first of two */
    bool ended;
    ct_status status;
    ct_error error;
    ct_work *next;
};

/* ---- what a collective moves -------------------------------------------------------
 */

/* What all requests have in common: parts of the length of the shorter span. */
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
own_share(const ct_shm_queue *self, const ct_request *r, size_t share, size_t item)
{
    const size_t begin = (size_t)self->exchange.rank * share;
    return (char *)r->in.data + (begin < r->in.n ? begin : r->in.n) * item;
}

/* A short one is reduced whole by every rank; of a long one each reduces a share, then
 * gathers those of the others. Of two ranks each reads as much either way. */
static void
plan_all_reduce(const ct_shm_queue *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t ranks = (size_t)self->exchange.world_size;
    const size_t share = (r->in.n + ranks - 1) / ranks;
    const bool is_short =
        ranks <= 2 || r->in.n * ct_dtype_size(r->in.dtype) <= SHORT_BYTES;
    w->transfer = transfer_of(r, is_short ? r->in.n : share, ranks, CT_SINK_REDUCE);
    w->transfer.to = r->in.data;
    if (!is_short) {
        w->transfer.to = own_share(self, r, share, w->transfer.item);
        w->transfer.total = r->in.n;
        w->transfer.each_own = true;
        w->is_shared_out = true;
    }
}

static void
plan_sharing_out(const ct_shm_queue *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t share = w->transfer.part;
    w->transfer =
        transfer_of(r, share, (size_t)self->exchange.world_size, CT_SINK_GATHER);
    w->transfer.total = r->in.n;
    w->transfer.from = own_share(self, r, share, w->transfer.item);
    w->transfer.to = r->in.data;
    w->is_shared_out = false;
}

static void
plan(const ct_shm_queue *self, ct_work *w)
{
    const ct_request *r = &w->request;
    const size_t ranks = (size_t)self->exchange.world_size;
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
        w->transfer = transfer_of(r, r->in.n, ranks, CT_SINK_COPY);
        w->transfer.to = r->in.data;
        return;
    case CT_REDUCE:
        w->transfer = transfer_of(r, r->in.n, ranks, CT_SINK_ROOT);
        w->transfer.to = r->in.data;
        return;
    case CT_BARRIER:
        w->transfer = transfer_of(r, 0, ranks, CT_SINK_REDUCE);
        return;
    }
}

/* ---- collectives under way ---------------------------------------------------------
 */

/* Takes one as far as it goes; with `waits`, to its end. */
static void
advance(ct_shm_queue *self, ct_work *w, bool waits)
{
    w->status = ct_exchange_step(&self->exchange, &w->transfer, waits, &w->error);
    if (w->status == CT_OK && w->transfer.stage == CT_STAGE_ENDED && w->is_shared_out &&
        !w->transfer.in_place) {
        plan_sharing_out(self, w);
        w->status = ct_exchange_step(&self->exchange, &w->transfer, waits, &w->error);
    }
    w->ended = w->transfer.stage == CT_STAGE_ENDED;
}

/* They end in order: with `until`, all before it and itself; else those that can
 * without waiting. */
static void
progress(ct_shm_queue *self, const ct_work *until)
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

static void
append(ct_shm_queue *self, ct_work *w, const ct_request *request)
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

static ct_status
enter(ct_shm_queue *self, const ct_request *r, ct_error *err)
{
    return __atomic_exchange_n(&self->busy, true, __ATOMIC_ACQUIRE)
               ? ct_fail(err, CT_EINVAL,
                         "%s while another thread of rank %d is in a collective of the "
                         "same group",
                         ct_collective_name(r->what), self->exchange.rank)
               : CT_OK;
}

static void
leave(ct_shm_queue *self)
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

ct_status
ct_shm_run(ct_shm_queue *self, const ct_request *request, ct_error *err)
{
    ct_work w;
    ct_status status = enter(self, request, err);
    if (status != CT_OK) {
        return status;
    }
    append(self, &w, request);
    progress(self, &w);
    leave(self);
    return result_of(&w, err);
}

/* Tells itself from an all_reduce by its `out`. */
ct_status
ct_shm_stream(ct_shm_queue *self, const ct_stream *stream, ct_error *err)
{
    const ct_span all = {.n = stream->n, .dtype = stream->dtype};
    const ct_request r = {.what = CT_ALL_REDUCE, .in = all, .out = all};
    ct_work w;
    ct_status status = enter(self, &r, err);
    if (status != CT_OK) {
        return status;
    }
    append(self, &w, &r);
    w.transfer = transfer_of(&w.request, stream->n, (size_t)self->exchange.world_size,
                             CT_SINK_REDUCE);
    w.transfer.stream = stream;
    w.is_shared_out = false;
    progress(self, &w);
    leave(self);
    return result_of(&w, err);
}

ct_status
ct_shm_start(ct_shm_queue *self, const ct_request *request, ct_work **work,
             ct_error *err)
{
    ct_work *w = ct_alloc(sizeof *w);
    if (w == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to begin a collective");
    }
    ct_status status = enter(self, request, err);
    if (status != CT_OK) {
        ct_free(w);
        return status;
    }
    append(self, w, request);
    progress(self, NULL);
    leave(self);
    *work = w;
    return CT_OK;
}

/* Another thread may be in here: a work that is dropped is waited for anywhere. */
ct_status
ct_shm_wait(ct_shm_queue *self, ct_work *work, ct_error *err)
{
    const struct timespec nap = {0, 200000};
    while (enter(self, &work->request, NULL) != CT_OK) {
        (void)nanosleep(&nap, NULL);
    }
    progress(self, work);
    leave(self);
    const ct_status status = result_of(work, err);
    ct_free(work);
    return status;
}
