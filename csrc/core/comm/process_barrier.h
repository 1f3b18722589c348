/* The processes of a segment, and how they wait for one another without hanging.
 *
 * Each rank has two counters that all can see: how many pieces of work it has made, and
 * how many it has used of everyone. A wait looks at them for a moment, then sleeps in
 * the kernel (futex), and looks up now and then whether who it waits for still lives.
 * A rank that died, left, or lets others wait too long breaks the barrier: every wait
 * of every rank fails from then on, and names it. */
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

/* What the barrier takes at the start of a segment; a multiple of a page. */
size_t ct_process_barrier_bytes(int world_size);

/* Takes place `rank` in the segment, which stays the caller's and must outlive the
 * barrier; so do the names of the ranks in messages. CT_ENOMEM or CT_EIO. */
CT_NODISCARD ct_status ct_process_barrier_join(ct_process_barrier **barrier,
                                               const ct_segment *segment, int rank,
                                               int world_size,
                                               const ct_rank_names *names,
                                               double timeout_seconds, ct_error *err);

/* CT_ECOMM when the barrier is broken, whatever the counters say. */
CT_NODISCARD ct_status ct_process_barrier_check(const ct_process_barrier *barrier,
                                                const char *what, ct_error *err);

/* Sets this rank's counter, which only grows (modulo 2**32), and wakes who waits for
 * it. What was written before is seen by who has waited. */
void ct_process_barrier_raise(ct_process_barrier *barrier,
                              ct_process_barrier_count which, uint32_t value);

/* Whether that counter of every other rank is at `value` or beyond. */
bool ct_process_barrier_has(const ct_process_barrier *barrier,
                            ct_process_barrier_count which, uint32_t value);

/* Waits until that counter of every other rank is at `value` or beyond. CT_ECOMM when
 * the barrier is broken or this breaks it; `what` begins the text. CT_EHOST:
 * interrupted (core/base/wait.h), which breaks it for the others. */
CT_NODISCARD ct_status ct_process_barrier_wait(ct_process_barrier *barrier,
                                               ct_process_barrier_count which,
                                               uint32_t value, const char *what,
                                               ct_error *err);

/* The rank comes no more; in a forked child the place stays the parent's. NULL is fine.
 */
void ct_process_barrier_leave(ct_process_barrier *barrier);

#endif
