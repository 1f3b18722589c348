/* A barrier of threads that cannot hang: it breaks when one of them leaves for good, or
 * does not come in time. */
#ifndef CT_THREAD_BARRIER_H
#define CT_THREAD_BARRIER_H

#include "core/base/status.h"

#include <stdbool.h>

typedef struct ct_thread_barrier ct_thread_barrier;

/* For ranks 0..n_ranks - 1, n_ranks >= 1; timeout_seconds is finite, > 0. NULL when out
 * of memory. Release with ct_thread_barrier_free. */
ct_thread_barrier *ct_thread_barrier_new(int n_ranks, double timeout_seconds);

/* Waits until every rank has come. What was written before is seen by all after it.
 * A barrier that was joined has to be closed.
 *
 * CT_ECOMM when a rank has left, or has not come within the time-out: the text names
 * `what`, this rank and that one. Every later call of every rank then fails so at once.
 */
CT_NODISCARD ct_status ct_thread_barrier_join(ct_thread_barrier *barrier, int rank,
                                              const char *what, ct_error *err);

/* Waits, for as long as it takes, until every rank that joined has come here: all are
 * at work that ends, so nobody touches what another may still be reading. */
void ct_thread_barrier_close(ct_thread_barrier *barrier, int rank);

/* The rank comes no more: those who wait for it fail. True for the last rank that
 * leaves, who frees the barrier. */
CT_NODISCARD bool ct_thread_barrier_leave(ct_thread_barrier *barrier, int rank);

void ct_thread_barrier_free(ct_thread_barrier *barrier);

#endif
