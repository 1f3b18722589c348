/* The processes of a segment, and how they wait for one another without hanging.
 *
 * Each rank has two counters that all can see: how many pieces of work it has made, and
 * how many it has used of everyone. A wait looks at them for a moment, then sleeps in
 * the kernel (futex), and looks up now and then whether who it waits for still lives.
 * A rank that died, left, or lets others wait too long breaks the crew: every wait of
 * every rank fails from then on, and names it. */
#ifndef CT_CREW_H
#define CT_CREW_H

#include "core/comm/comm.h"
#include "core/base/segment.h"

#include <stdint.h>

typedef struct ct_crew ct_crew;

typedef enum ct_crew_count {
    CT_CREW_MADE,
    CT_CREW_USED
} ct_crew_count;

/* What the crew takes at the start of a segment; a multiple of a page. */
size_t ct_crew_bytes(int world_size);

/* Takes place `rank` in the segment, which stays the caller's and must outlive the
 * crew; so do the names of the ranks in messages. CT_ENOMEM or CT_EIO. */
CT_NODISCARD ct_status ct_crew_join(ct_crew **crew, const ct_segment *segment, int rank,
                                    int world_size, const ct_rank_names *names,
                                    double timeout_seconds, ct_error *err);

/* CT_ECOMM when the crew is broken, whatever the counters say. */
CT_NODISCARD ct_status ct_crew_check(const ct_crew *crew, const char *what,
                                     ct_error *err);

/* Sets this rank's counter, which only grows (modulo 2**32), and wakes who waits for
 * it. What was written before is seen by who has waited. */
void ct_crew_raise(ct_crew *crew, ct_crew_count which, uint32_t value);

/* Whether that counter of every other rank is at `value` or beyond. */
bool ct_crew_has(const ct_crew *crew, ct_crew_count which, uint32_t value);

/* Waits until that counter of every other rank is at `value` or beyond. CT_ECOMM when
 * the crew is broken or this breaks it; `what` begins the text. CT_EHOST: interrupted
 * (core/base/wait.h), which breaks it for the others. */
CT_NODISCARD ct_status ct_crew_wait(ct_crew *crew, ct_crew_count which, uint32_t value,
                                    const char *what, ct_error *err);

/* The rank comes no more; in a forked child the place stays the parent's. NULL is fine.
 */
void ct_crew_leave(ct_crew *crew);

#endif
