/* The barrier of the processes of a segment: waiting that never hangs.
 *
 * Each rank has two counters in shared memory: the pieces of work that it has made, and
 * the pieces that it has used of all ranks. A wait spins on a counter, then sleeps in
 * the kernel (futex), and wakes now and then to check whether the counter's process
 * still lives. A rank that died, left, or came too late breaks the barrier: from then
 * on every wait of every rank fails and names that rank. */
#ifndef CT_PROCESS_BARRIER_H
#define CT_PROCESS_BARRIER_H

#include "core/comm/comm.h"
#include "core/base/segment.h"

#include <stdint.h>

typedef struct ct_process_barrier ct_process_barrier;

typedef enum ct_process_barrier_count {
    CT_BARRIER_MADE,
    CT_BARRIER_USED
} ct_process_barrier_count;

/* Bytes of the barrier at the start of a segment; a multiple of a page. */
size_t ct_process_barrier_bytes(int world_size);

/* Takes place `rank` in the segment. Segment and names stay the caller's and must
 * outlive the barrier. CT_ENOMEM or CT_EIO. */
CT_NODISCARD ct_status ct_process_barrier_join(ct_process_barrier **barrier,
                                               const ct_segment *segment, int rank,
                                               int world_size,
                                               const ct_rank_names *names,
                                               double timeout_seconds, ct_error *err);

/* CT_ECOMM when the barrier is broken, whatever the counters say. */
CT_NODISCARD ct_status ct_process_barrier_check(const ct_process_barrier *barrier,
                                                const char *what, ct_error *err);

/* Sets this rank's counter, which only grows (modulo 2**32), and wakes the waiting
 * ranks, to which memory written before is visible. */
void ct_process_barrier_raise(ct_process_barrier *barrier,
                              ct_process_barrier_count which, uint32_t value);

/* Whether the counter of every other rank is at `value` or beyond. */
bool ct_process_barrier_has(const ct_process_barrier *barrier,
                            ct_process_barrier_count which, uint32_t value);

/* Waits until the counter of every other rank is at `value` or beyond. CT_ECOMM when
 * the barrier is broken, or breaks in this wait; `what` begins the message. CT_EHOST:
 * interrupted (core/base/wait.h), which breaks the barrier for the others. */
CT_NODISCARD ct_status ct_process_barrier_wait(ct_process_barrier *barrier,
                                               ct_process_barrier_count which,
                                               uint32_t value, const char *what,
                                               ct_error *err);

/* Leaves the barrier; in a forked child the place stays the parent's. NULL is fine. */
void ct_process_barrier_leave(ct_process_barrier *barrier);

#endif
