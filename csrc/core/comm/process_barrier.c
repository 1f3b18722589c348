/* Counters are written by their own rank alone; the fault word is written once, by
 * compare and swap, so all ranks report the same first fault. */
#define _GNU_SOURCE /* syscall */
#include "core/comm/process_barrier.h"

#include "core/base/alloc.h"
#include "core/base/wait.h"
#include "core/base/owner.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

struct ct_process_barrier {
    const ct_segment *segment;
    board *board;
    ct_owner owner; /* a forked child must not give up the parent's place */
    int rank, world_size;
    const ct_rank_names *names; /* of the ranks in messages; the caller's */
    int spins;                  /* looks at a counter before yielding the core */
    double timeout_seconds;
};

size_t
ct_process_barrier_bytes(int world_size)
{
    const size_t bytes = sizeof(board) + (size_t)world_size * sizeof(place);
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

ct_status
ct_process_barrier_join(ct_process_barrier **barrier, const ct_segment *segment,
                        int rank, int world_size, const ct_rank_names *names,
                        double timeout_seconds, ct_error *err)
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

/* ---- waking ---------------------------------------------------------------------- */

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

void
ct_process_barrier_raise(ct_process_barrier *c, ct_process_barrier_count which,
                         uint32_t value)
{
    tally *t = &c->board->places[c->rank].tallies[which];
    atomic_store(&t->count, value);
    wake(t);
}

void
ct_process_barrier_leave(ct_process_barrier *c)
{
    if (c != NULL && ct_owner_is_here(c->owner)) {
        place *own = &c->board->places[c->rank];
        atomic_store(&own->has_left, true);
        wake(&own->tallies[CT_BARRIER_MADE]);
        wake(&own->tallies[CT_BARRIER_USED]);
    }
    ct_free(c);
}

/* ---- faults ---------------------------------------------------------------------- */

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

ct_status
ct_process_barrier_check(const ct_process_barrier *c, const char *what, ct_error *err)
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

/* ---- waiting --------------------------------------------------------------------- */

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

/* Reads the counter again after the check on the rank: a rank that raised the counter
 * and then died has done the work. */
static ct_status
sleep_until(ct_process_barrier *c, int rank, ct_process_barrier_count which,
            uint32_t value, const char *what, ct_error *err)
{
    tally *t = &c->board->places[rank].tallies[which];
    const ct_deadline deadline = ct_deadline_after(c->timeout_seconds);
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
    }
    return CT_OK;
}

bool
ct_process_barrier_has(const ct_process_barrier *c, ct_process_barrier_count which,
                       uint32_t value)
{
    for (int rank = 0; rank < c->world_size; rank++) {
        if (rank != c->rank &&
            !has_reached(&c->board->places[rank].tallies[which], value)) {
            return false;
        }
    }
    return true;
}

ct_status
ct_process_barrier_wait(ct_process_barrier *c, ct_process_barrier_count which,
                        uint32_t value, const char *what, ct_error *err)
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
