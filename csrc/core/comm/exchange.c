/* The exchange of data in pieces, over a barrier of processes. A slot is overwritten
 * only after all ranks have used the piece (CT_BARRIER_USED), and read only after the
 * owner has made the piece (CT_BARRIER_MADE). */
#define _GNU_SOURCE /* syscall */
#include "core/comm/exchange.h"

#include "core/base/alloc.h"
#include "core/base/copy_far.h"
#include "core/base/owner.h"
#include "core/base/wait.h"
#include "core/comm/reduce.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- the barrier of the processes of a segment: waiting that never hangs --------- */

/* Each rank has two counters in shared memory: the pieces of work that it has made, and
 * the pieces that it has used of all ranks. A wait spins on a counter, then sleeps in
 * the kernel (futex), and wakes now and then to check whether the counter's process
 * still lives. A rank that died, left, or came too late breaks the barrier: from then
 * on every wait of every rank fails and names that rank. Counters are written by their
 * own rank alone; the fault word is written once, by compare and swap, so all ranks
 * report the same first fault. */

enum {
    LINE_BYTES = 64, /* a cache line, so that ranks write to different lines */
    PAGE_BYTES = 4096,
    LEAST_SPINS = 8,
    MOST_SPINS = 1024,
    YIELDS = 5,
    LOOK_UP_NANOSECONDS = 20000000, /* the longest time to notice a death */
    REASON_SHIFT = 24,              /* a fault: reason and rank in a word */
};

typedef enum reason {
    LATE = 1,
    DEAD,
    GONE,
    INTERRUPTED
} reason;

/* A counter, and the number of ranks that sleep until a change. */
typedef struct tally {
    _Alignas(LINE_BYTES) _Atomic uint32_t count;
    _Atomic uint32_t sleepers;
} tally;

typedef struct place {
    tally tallies[2];                             /* by ct_process_barrier_count */
    _Alignas(LINE_BYTES) _Atomic int32_t process; /* 0 before joining */
    atomic_bool has_left;
} place;

typedef struct board {
    _Alignas(LINE_BYTES) _Atomic uint32_t fault; /* 0 while the barrier is whole */
    place places[];
} board;

typedef enum ct_process_barrier_count {
    CT_BARRIER_MADE,
    CT_BARRIER_USED
} ct_process_barrier_count;

struct ct_process_barrier {
    const ct_segment *segment;
    board *board;
    ct_owner owner; /* a forked child must not give up the parent's place */
    int rank, world_size;
    const ct_rank_names *names; /* of the ranks in messages; the caller's */
    int spins;                  /* looks at a counter before yielding the core */
    double timeout_seconds;
};

/* Bytes of the barrier at the start of a segment; a multiple of a page. */
static size_t
barrier_bytes(int world_size)
{
    const size_t bytes = sizeof(board) + (size_t)world_size * sizeof(place);
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* Takes place `rank` in the segment. Segment and names stay the caller's and must
 * outlive the barrier. CT_ENOMEM or CT_EIO. */
static ct_status
barrier_join(ct_process_barrier **barrier, const ct_segment *segment, int rank,
             int world_size, const ct_rank_names *names, double timeout_seconds,
             ct_error *err)
{
    ct_process_barrier *c = ct_alloc(sizeof *c);
    if (c == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a group of processes");
    }
    ct_status status = ct_segment_hold(segment, rank, err);
    if (status != CT_OK) {
        ct_free(c);
        return status;
    }
    *c = (ct_process_barrier){
        .segment = segment,
        .board = segment->base,
        .owner = ct_owner_here(),
        .rank = rank,
        .world_size = world_size,
        .names = names,
        .spins = MOST_SPINS,
        .timeout_seconds = timeout_seconds,
    };
    atomic_store(&c->board->places[rank].process, (int32_t)getpid());
    *barrier = c;
    return CT_OK;
}

/* ---- the barrier: waking --------------------------------------------------------- */

static void
wake(tally *t)
{
    if (atomic_load(&t->sleepers) != 0) {
        (void)syscall(SYS_futex, &t->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

/* Sleeps while the count is `seen`, but never long. */
static void
sleep_while(tally *t, uint32_t seen)
{
    const struct timespec nap = {0, LOOK_UP_NANOSECONDS};
    atomic_fetch_add(&t->sleepers, 1);
    (void)syscall(SYS_futex, &t->count, FUTEX_WAIT, seen, &nap, NULL, 0);
    atomic_fetch_sub(&t->sleepers, 1);
}

/* Sets this rank's counter, which only grows (modulo 2**32), and wakes the waiting
 * ranks, to which memory written before is visible. */
static void
barrier_raise(ct_process_barrier *c, ct_process_barrier_count which, uint32_t value)
{
    tally *t = &c->board->places[c->rank].tallies[which];
    atomic_store(&t->count, value);
    wake(t);
}

/* Leaves the barrier; in a forked child the place stays the parent's. NULL is fine. */
static void
barrier_leave(ct_process_barrier *c)
{
    if (c != NULL && ct_owner_is_here(c->owner)) {
        place *own = &c->board->places[c->rank];
        atomic_store(&own->has_left, true);
        wake(&own->tallies[CT_BARRIER_MADE]);
        wake(&own->tallies[CT_BARRIER_USED]);
    }
    ct_free(c);
}

/* ---- the barrier: faults --------------------------------------------------------- */

/* Only the first fault is kept. */
static void
break_barrier(ct_process_barrier *c, reason why, int culprit)
{
    uint32_t whole = 0;
    const uint32_t fault = (uint32_t)why << REASON_SHIFT | (uint32_t)culprit;
    (void)atomic_compare_exchange_strong(&c->board->fault, &whole, fault);
    for (int rank = 0; rank < c->world_size; rank++) {
        wake(&c->board->places[rank].tallies[CT_BARRIER_MADE]);
        wake(&c->board->places[rank].tallies[CT_BARRIER_USED]);
    }
}

static ct_status
fail_broken(const ct_process_barrier *c, const char *what, ct_error *err)
{
    static const char *const reasons[] = {
        [LATE] = "did not come within",
        [DEAD] = "died",
        [GONE] = "has left the group",
        [INTERRUPTED] = "was interrupted",
    };
    const uint32_t fault = atomic_load(&c->board->fault);
    const reason why = (reason)(fault >> REASON_SHIFT);
    const int culprit = (int)(fault & ((1u << REASON_SHIFT) - 1));
    const int process = atomic_load(&c->board->places[culprit].process);
    char seconds[96] = "";
    if (why == LATE) {
        (void)snprintf(seconds, sizeof seconds, " %g seconds%s", c->timeout_seconds,
                       culprit == c->rank ? ": the others have given this rank up"
                                          : "");
    }
    return ct_fail(err, CT_ECOMM, "%s on rank %d of %d: rank %d (process %d) %s%s",
                   what, ct_rank_called(c->names, c->rank), c->names->of,
                   ct_rank_called(c->names, culprit), process, reasons[why], seconds);
}

/* CT_ECOMM when the barrier is broken, whatever the counters say. */
static ct_status
barrier_check(const ct_process_barrier *c, const char *what, ct_error *err)
{
    return atomic_load(&c->board->fault) == 0 ? CT_OK : fail_broken(c, what, err);
}

/* Breaks the barrier when the rank cannot or may not come any more. */
static void
look_after(ct_process_barrier *c, int rank, ct_deadline deadline)
{
    place *p = &c->board->places[rank];
    const int32_t process = atomic_load(&p->process);
    if (atomic_load(&p->has_left)) {
        break_barrier(c, GONE, rank);
    }
    else if (process != 0 && process != (int32_t)getpid() &&
             !ct_segment_is_held(c->segment, rank)) {
        break_barrier(c, DEAD, rank);
    }
    else if (ct_deadline_left(deadline) <= 0.0) {
        break_barrier(c, LATE, rank);
    }
}

/* ---- the barrier: waiting -------------------------------------------------------- */

/* Counters wrap around, and are never 2**31 apart. */
static bool
is_at(uint32_t count, uint32_t value)
{
    return (int32_t)(count - value) >= 0;
}

static bool
has_reached(tally *t, uint32_t value)
{
    return is_at(atomic_load(&t->count), value);
}

static inline void
pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Spins as long as spinning has paid lately: if ranks share cores, a spinning rank only
 * slows down the awaited rank. */
static bool
spin(ct_process_barrier *c, tally *t, uint32_t value)
{
    for (int i = 0; i < c->spins; i++) {
        if (has_reached(t, value)) {
            c->spins = c->spins < MOST_SPINS / 2 ? 2 * c->spins : MOST_SPINS;
            return true;
        }
        pause_core();
    }
    c->spins = c->spins > 2 * LEAST_SPINS ? c->spins / 2 : LEAST_SPINS;
    for (int i = 0; i < YIELDS; i++) {
        (void)sched_yield();
        if (has_reached(t, value)) {
            return true;
        }
    }
    return false;
}

static void
report_stall(const ct_process_barrier *c, int rank, const char *what, double waited)
{
    char text[256];
    (void)snprintf(text, sizeof text,
                   "%s on rank %d of %d has waited %.3g seconds for rank %d "
                   "(process %d), and fails after %g",
                   what, ct_rank_called(c->names, c->rank), c->names->of, waited,
                   ct_rank_called(c->names, rank),
                   (int)atomic_load(&c->board->places[rank].process),
                   c->timeout_seconds);
    ct_stall_report(text);
}

/* Reads the counter again after the check on the rank: a rank that raised the counter
 * and then died has done the work. */
static ct_status
sleep_until(ct_process_barrier *c, int rank, ct_process_barrier_count which,
            uint32_t value, const char *what, ct_error *err)
{
    tally *t = &c->board->places[rank].tallies[which];
    const ct_deadline deadline = ct_deadline_after(c->timeout_seconds);
    double stall = ct_stall_seconds();
    uint32_t seen = atomic_load(&t->count);
    while (!is_at(seen, value)) {
        if (atomic_load(&c->board->fault) != 0) {
            return fail_broken(c, what, err);
        }
        sleep_while(t, seen);
        if (ct_interrupted()) {
            break_barrier(c, INTERRUPTED, c->rank);
            return ct_fail(err, CT_EHOST, "%s was interrupted", what);
        }
        look_after(c, rank, deadline);
        seen = atomic_load(&t->count);
        const double waited = c->timeout_seconds - ct_deadline_left(deadline);
        if (!is_at(seen, value) && waited >= stall) {
            report_stall(c, rank, what, waited);
            stall *= 2.0;
        }
    }
    return CT_OK;
}

/* Whether the counter of every other rank is at `value` or beyond. */
static bool
barrier_has(const ct_process_barrier *c, ct_process_barrier_count which, uint32_t value)
{
    for (int rank = 0; rank < c->world_size; rank++) {
        if (rank != c->rank &&
            !has_reached(&c->board->places[rank].tallies[which], value)) {
            return false;
        }
    }
    return true;
}

/* Waits until the counter of every other rank is at `value` or beyond. CT_ECOMM when
 * the barrier is broken, or breaks in this wait; `what` begins the message. CT_EHOST:
 * interrupted (core/base/wait.h), which breaks the barrier for the others. */
static ct_status
barrier_wait(ct_process_barrier *c, ct_process_barrier_count which, uint32_t value,
             const char *what, ct_error *err)
{
    ct_status status = CT_OK;
    for (int rank = 0; status == CT_OK && rank < c->world_size; rank++) {
        tally *t = &c->board->places[rank].tallies[which];
        if (rank != c->rank && !has_reached(t, value) && !spin(c, t, value)) {
            status = sleep_until(c, rank, which, value, what, err);
        }
    }
    return status;
}

/* ---- slots ----------------------------------------------------------------------- */

enum {
    CT_SLOTS = 8 /* of a rank */
};

/* A rank's request, and the place of data that is not in the slots. The
 * request's pointers mean nothing to other processes. */
typedef struct ct_note {
    ct_request request;
    ct_peer_place place;
} ct_note;

static uint32_t
count_pieces(const ct_transfer *t)
{
    return t->part == 0 ? 1 : (uint32_t)((t->part + t->piece - 1) / t->piece);
}

enum {
    SLOT_BYTES = 128 << 10, /* fits a core's cache with the slots of another rank */
    NOTE_BYTES = 256
};

static char *
slot_of(const ct_exchange *self, int rank, uint32_t piece)
{
    const size_t slot = (size_t)rank * CT_SLOTS + piece % CT_SLOTS;
    return (char *)self->segment->base + barrier_bytes(self->world_size) +
           slot * (NOTE_BYTES + SLOT_BYTES);
}

static ct_note *
ct_slot_note(const ct_exchange *self, int rank, uint32_t piece)
{
    void *slot = slot_of(self, rank, piece);
    return slot;
}

/* The rank's data in a peer buffer, by its note; NULL: in the slots. */
static char *
located(const ct_exchange *self, int rank)
{
    return ct_peer_buffers_at(&self->peer_buffers, rank,
                              ct_slot_note(self, rank, self->done)->place);
}

/* ---- writing a piece ------------------------------------------------------------- */

/* Whether other ranks read the data of `rank`. */
static bool
publishes(const ct_transfer *t, int rank)
{
    const bool is_root = rank == t->request->root;
    return t->sink == CT_SINK_COPY ? is_root : t->sink != CT_SINK_ROOT || !is_root;
}

/* Whether a rank's data may be read in place although another rank's is in slots. The
 * operand of a reduction is also the result, so only if each rank reduces a shard. */
static bool
may_be_read_alone(const ct_transfer *t)
{
    return t->each_own || t->sink != CT_SINK_REDUCE;
}

static void
write_note(const ct_exchange *self, const ct_transfer *t, ct_note *n)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    const size_t filled = parts * t->part < t->total ? parts * t->part : t->total;
    *n = (ct_note){
        .request = *t->request, .place = {-1, 0}
    };
    if (publishes(t, self->rank)) {
        n->place = ct_peer_buffers_find(&self->peer_buffers, t->from, filled * t->item);
    }
}

/* Whether the counter of all other ranks has reached the value; with `waits`, waits. */
static ct_status
reach(const ct_exchange *self, const ct_transfer *t, ct_process_barrier_count which,
      uint32_t value, bool waits, bool *reached, ct_error *err)
{
    ct_status status = CT_OK;
    *reached = barrier_has(self->barrier, which, value);
    if (!*reached && waits) {
        status = barrier_wait(self->barrier, which, value,
                              ct_collective_name(t->request->what), err);
        *reached = status == CT_OK;
    }
    return status;
}

/* Elements of part `index` from its element `at` on, at most a piece. */
static size_t
length_at(const ct_transfer *t, int index, size_t at)
{
    const size_t begin = (size_t)index * t->part + at;
    const size_t in_part = t->part - at < t->piece ? t->part - at : t->piece;
    const size_t left = begin < t->total ? t->total - begin : 0;
    return in_part < left ? in_part : left;
}

/* Copies this rank's data, of each part the elements from `at` on, into the slot of a
 * piece. */
static void
ct_slot_fill(const ct_exchange *self, const ct_transfer *t, uint32_t index, size_t at)
{
    char *slot = slot_of(self, self->rank, index) + NOTE_BYTES;
    const int rank = self->rank;
    const size_t piece = t->piece * t->item;
    if (!t->each_own) {
        const size_t n = length_at(t, rank, at);
        if (t->stream != NULL && n != 0) {
            t->stream->fill(t->stream->arg, at, n, slot);
        }
        else if (n != 0) {
            memcpy(slot, t->from + at * t->item, n * t->item);
        }
        return;
    }
    for (int other = 0; other < self->world_size; other++) {
        const size_t n = length_at(t, other, at);
        if (other != rank && n != 0) {
            const size_t begin = (size_t)other * t->part + at;
            memcpy(slot + (size_t)other * piece, t->from + begin * t->item,
                   n * t->item);
        }
    }
}

/* Makes the next piece, once its slot is free. */
static ct_status
publish(const ct_exchange *self, ct_transfer *t, bool waits, bool *published,
        ct_error *err)
{
    const int rank = self->rank;
    const uint32_t piece = self->done + t->published;
    const bool in_place = t->published != 0 && self->direct[rank] != NULL;
    ct_status status = CT_OK;
    *published = true;
    if (!in_place) {
        status = reach(self, t, CT_BARRIER_USED, piece + 1 - CT_SLOTS, waits, published,
                       err);
    }
    if (!*published) {
        return status;
    }
    if (t->published == 0) {
        write_note(self, t, ct_slot_note(self, rank, piece));
        self->direct[rank] = may_be_read_alone(t) ? located(self, rank) : NULL;
    }
    if (self->direct[rank] == NULL && publishes(t, rank)) {
        ct_slot_fill(self, t, piece, t->published * t->piece);
    }
    barrier_raise(self->barrier, CT_BARRIER_MADE, piece + 1);
    t->published++;
    return CT_OK;
}

/* ---- an exchange ----------------------------------------------------------------- */

static const ct_request *
noted_request(const void *group, int rank)
{
    const ct_exchange *self = group;
    return &ct_slot_note(self, rank, self->done)->request;
}

/* Finds the data in peer buffers; true when all ranks' data is there. */
static bool
find_direct(ct_exchange *self, const ct_transfer *t)
{
    bool all = t->part != 0;
    for (int rank = 0; rank < self->world_size; rank++) {
        self->direct[rank] = located(self, rank);
        all = all && (self->direct[rank] != NULL || !publishes(t, rank));
    }
    for (int rank = 0; !all && !may_be_read_alone(t) && rank < self->world_size;
         rank++) {
        self->direct[rank] = NULL;
    }
    return all;
}

/* Elements of each part that a slot holds. */
static size_t
ct_slot_length(const ct_exchange *self, const ct_transfer *t)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    return SLOT_BYTES / (t->item * parts);
}

static ct_status
post(ct_exchange *self, ct_transfer *t, bool waits, bool *moved, ct_error *err)
{
    if (ct_request_check(t->request, self->world_size, NULL) != CT_OK) {
        t->part = t->total = 0;
    }
    t->piece = ct_slot_length(self, t);
    t->stage = CT_STAGE_COMPARE;
    ct_status status =
        barrier_check(self->barrier, ct_collective_name(t->request->what), err);
    if (status == CT_OK) {
        status = publish(self, t, waits, moved, err);
    }
    if (!*moved) {
        t->stage = CT_STAGE_POST;
    }
    return status;
}

static ct_status
compare(ct_exchange *self, ct_transfer *t, bool waits, bool *moved, ct_error *err)
{
    ct_status status =
        reach(self, t, CT_BARRIER_MADE, self->done + 1, waits, moved, err);
    if (status != CT_OK || !*moved) {
        return status;
    }
    status =
        ct_requests_compare(noted_request, self, self->world_size, self->names, err);
    if (status == CT_OK) {
        status = ct_request_check(t->request, self->world_size, err);
    }
    if (status != CT_OK) {
        barrier_raise(self->barrier, CT_BARRIER_USED, ++self->done);
        return status;
    }
    t->in_place = find_direct(self, t);
    t->pieces = t->in_place ? 1 : count_pieces(t);
    t->stage = CT_STAGE_MOVE;
    return CT_OK;
}

/* The data of `rank` for this rank, from element `at` on: our own operand, or in a peer
 * buffer, or in a slot. */
static const char *
piece_of(const ct_exchange *self, const ct_transfer *t, int rank, uint32_t piece,
         size_t at)
{
    const size_t receiver = t->each_own ? (size_t)self->rank : 0;
    const char *whole = rank == self->rank ? t->from : self->direct[rank];
    if (whole != NULL) {
        return whole + (receiver * t->part + at) * t->item;
    }
    return slot_of(self, rank, piece) + NOTE_BYTES + receiver * t->piece * t->item;
}

static bool
overlap(const void *a, const void *b, size_t bytes)
{
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return (x < y ? y - x : x - y) < bytes;
}

/* Copies a part of a result of `whole` bytes. */
static void
copy(void *to, const void *from, size_t bytes, size_t whole)
{
    if (bytes == 0 || to == from) {
        return;
    }
    if (whole >= CT_FAR_BYTES && !overlap(to, from, bytes)) {
        ct_copy_far(to, from, bytes);
    }
    else {
        memmove(to, from, bytes);
    }
}

static void
gather(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    for (int rank = 0; rank < self->world_size; rank++) {
        copy(t->to + ((size_t)rank * t->part + at) * t->item,
             piece_of(self, t, rank, piece, at), length_at(t, rank, at) * t->item,
             t->total * t->item);
    }
}

static void
reduce(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    const size_t own = length_at(t, self->rank, at);
    for (int rank = 0; rank < self->world_size; rank++) {
        self->rows[rank] = piece_of(self, t, rank, piece, at);
    }
    if (t->stream != NULL && own != 0) {
        t->stream->use(t->stream->arg, at, own, self->rows);
    }
    else if (own != 0) {
        ct_reduce(t->to + at * t->item, self->rows, (size_t)self->world_size, own,
                  t->request->in.dtype, t->request->op);
    }
}

/* Uses a piece of all ranks' data, the elements from `at` on: from exchange->direct, or
 * from the slots of `piece` for a rank without. */
static void
ct_slots_take(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    const int root = t->request->root;
    switch (t->sink) {
    case CT_SINK_GATHER:
        gather(self, t, piece, at);
        return;
    case CT_SINK_REDUCE:
        reduce(self, t, piece, at);
        return;
    case CT_SINK_ROOT:
        if (self->rank == root) {
            reduce(self, t, piece, at);
        }
        return;
    case CT_SINK_COPY:
        if (self->rank != root) {
            copy(t->to + at * t->item, piece_of(self, t, root, piece, at),
                 length_at(t, self->rank, at) * t->item, t->part * t->item);
        }
        return;
    }
}

/* An all_reduce in place: reduces this rank's shard of the elements and writes the
 * result into all peer buffers. */
static void
ct_peer_buffers_reduce(const ct_exchange *self, const ct_request *r)
{
    const size_t ranks = (size_t)self->world_size, n = r->in.n;
    const size_t item = ct_dtype_size(r->in.dtype);
    const size_t shard = (n + ranks - 1) / ranks, block = SLOT_BYTES / item;
    const size_t begin = (size_t)self->rank * shard;
    const size_t end = begin + shard < n ? begin + shard : n;
    for (size_t at = begin; at < end; at += block) {
        const size_t length = end - at < block ? end - at : block;
        char *own = self->direct[self->rank] + at * item;
        for (size_t rank = 0; rank < ranks; rank++) {
            self->rows[rank] = self->direct[rank] + at * item;
        }
        ct_reduce(own, self->rows, ranks, length, r->in.dtype, r->op);
        for (size_t rank = 0; rank < ranks; rank++) {
            copy(self->direct[rank] + at * item, own, length * item, n * item);
        }
    }
}

static void
take_in_place(const ct_exchange *self, ct_transfer *t)
{
    if (t->request->what == CT_ALL_REDUCE && t->sink == CT_SINK_REDUCE) {
        ct_peer_buffers_reduce(self, t->request);
    }
    else {
        t->piece = t->part;
        ct_slots_take(self, t, self->done, 0);
    }
}

static ct_status
take(const ct_exchange *self, ct_transfer *t, bool waits, bool *taken, ct_error *err)
{
    const uint32_t piece = self->done + t->taken;
    ct_status status = reach(self, t, CT_BARRIER_MADE, piece + 1, waits, taken, err);
    if (status != CT_OK || !*taken) {
        return status;
    }
    if (t->in_place) {
        take_in_place(self, t);
    }
    else {
        ct_slots_take(self, t, piece, t->taken * t->piece);
    }
    barrier_raise(self->barrier, CT_BARRIER_USED, piece + 1);
    t->taken++;
    return CT_OK;
}

/* Writes pieces ahead while there are free slots: fewer turns mean fewer waits where
 * ranks share cores. Waits only for the slot of the piece that is used next. */
static ct_status
publish_free(ct_exchange *self, ct_transfer *t, bool waits, bool *moved, ct_error *err)
{
    ct_status status = CT_OK;
    bool published = true;
    while (status == CT_OK && published && t->published < t->pieces &&
           t->published < t->taken + CT_SLOTS) {
        const bool is_next = t->published == t->taken;
        status = publish(self, t, waits && is_next, &published, err);
        *moved = published || !is_next;
    }
    return status;
}

static ct_status
move(ct_exchange *self, ct_transfer *t, bool waits, bool *moved, ct_error *err)
{
    ct_status status = CT_OK;
    while (status == CT_OK && *moved && t->taken < t->pieces) {
        status = publish_free(self, t, waits, moved, err);
        if (status == CT_OK && *moved) {
            status = take(self, t, waits, moved, err);
        }
    }
    if (t->taken == t->pieces) {
        self->done += t->pieces;
        t->stage = CT_STAGE_FINISH;
    }
    return status;
}

static ct_status
finish(ct_exchange *self, ct_transfer *t, bool waits, bool *moved, ct_error *err)
{
    ct_status status = CT_OK;
    if (self->direct[self->rank] != NULL) {
        status = reach(self, t, CT_BARRIER_USED, self->done, waits, moved, err);
    }
    if (*moved) {
        t->stage = CT_STAGE_ENDED;
    }
    return status;
}

ct_status
ct_exchange_step(ct_exchange *self, ct_transfer *t, bool waits, ct_error *err)
{
    static ct_status (*const stages[])(ct_exchange *, ct_transfer *, bool, bool *,
                                       ct_error *) = {
        [CT_STAGE_POST] = post,
        [CT_STAGE_COMPARE] = compare,
        [CT_STAGE_MOVE] = move,
        [CT_STAGE_FINISH] = finish,
    };
    ct_status status = CT_OK;
    bool moved = true;
    while (status == CT_OK && moved && t->stage != CT_STAGE_ENDED) {
        status = stages[t->stage](self, t, waits, &moved, err);
    }
    if (status != CT_OK) {
        t->stage = CT_STAGE_ENDED;
    }
    return status;
}

/* ---- beginning and end ----------------------------------------------------------- */

/* Bytes of all slots, which lie behind the barrier. */
static size_t
ct_slots_bytes(int world_size)
{
    return (size_t)world_size * CT_SLOTS * ((size_t)NOTE_BYTES + SLOT_BYTES);
}

size_t
ct_exchange_bytes(int world_size)
{
    return barrier_bytes(world_size) + ct_slots_bytes(world_size);
}

void
ct_exchange_fini(ct_exchange *self)
{
    barrier_leave(self->barrier);
    ct_peer_buffers_fini(&self->peer_buffers);
    ct_free((void *)self->rows);
    ct_free((void *)self->direct);
    *self = (ct_exchange){0};
}

ct_status
ct_exchange_init(ct_exchange *self, const ct_segment *segment, int rank, int world_size,
                 const ct_rank_names *names, double timeout_seconds, ct_error *err)
{
    ct_exchange made = {
        .segment = segment, .rank = rank, .world_size = world_size, .names = names};
    made.rows = (const void **)ct_calloc((size_t)world_size, sizeof *made.rows);
    made.direct = (char **)ct_calloc((size_t)world_size, sizeof *made.direct);
    ct_status status = CT_OK;
    if (made.rows == NULL || made.direct == NULL) {
        status =
            ct_fail(err, CT_ENOMEM, "no memory for a group of %d ranks", world_size);
    }
    if (status == CT_OK) {
        status = barrier_join(&made.barrier, segment, rank, world_size, names,
                              timeout_seconds, err);
    }
    if (status != CT_OK) {
        ct_exchange_fini(&made);
        return status;
    }
    *self = made;
    return CT_OK;
}

_Static_assert(sizeof(ct_note) <= NOTE_BYTES, "a note fits before a slot's data");
