/* The thread pool of the process; threads claim work batch by batch.
 *
 * The caller works too and waits only for claimed batches, never for a thread to wake.
 * Any thread may run a batch, so a batch writes to memory of its own only; the caller
 * combines results in index order afterwards, which makes them independent of the
 * number of threads. A forked child starts without threads and makes new ones at first
 * use. */
#ifndef CT_POOL_H
#define CT_POOL_H

#include "core/base/status.h"

#include <stddef.h>

CT_BEGIN_DECLS

/* Runs batch number `batch` of the job behind arg. Must not fork; a nested ct_pool_run
 * runs on the calling thread alone. */
typedef void ct_pool_fn(void *arg, size_t batch);

/* Runs fn(arg, 0) ... fn(arg, n_batches - 1), each once, and returns when all have
 * ended. Safe to call from several threads: a second caller runs its job alone. */
void ct_pool_run(ct_pool_fn *fn, void *arg, size_t n_batches);

/* Sets how many threads work on a job, the caller included. Waits for a running job.
 * CT_EINVAL when n is 0 or above 256; CT_ENOMEM when a thread cannot be started, with
 * the old number kept. */
CT_NODISCARD ct_status ct_pool_set_threads(size_t n, ct_error *err);
size_t ct_pool_threads(void);

/* The initial number of threads: CTRAINER_NUM_THREADS, else OMP_NUM_THREADS, else the
 * number of processors available to the process. CT_EINVAL when CTRAINER_NUM_THREADS is
 * not a number >= 1; the pool then has one thread. */
CT_NODISCARD ct_status ct_pool_default_threads(size_t *n, ct_error *err);

CT_END_DECLS

#endif
