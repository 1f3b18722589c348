/* Our threads: one pool for the process, work claimed batch by batch.
 *
 * The caller works too and waits only for batches that were claimed, never for a
 * thread to wake. Which thread runs a batch is not defined, so a batch must write
 * only what is its own; whoever combines results does it in index order afterwards,
 * which makes them independent of the number of threads. A forked child starts with
 * no threads and makes its own at first use. */
#ifndef CT_POOL_H
#define CT_POOL_H

#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs batch number `batch` of the job behind arg. Must not fork, and what it gives to
 * ct_pool_run in turn runs on its own thread alone. */
typedef void ct_pool_fn(void *arg, size_t batch);

/* Runs fn(arg, 0) ... fn(arg, n_batches - 1), each once, and returns when all have
 * ended. Safe to call from several threads: a second caller runs its job alone. */
void ct_pool_run(ct_pool_fn *fn, void *arg, size_t n_batches);

/* Sets how many threads work on a job, the caller included. Waits for a running job.
 * CT_EINVAL when n is 0 or above 256; CT_ENOMEM when a thread cannot be started, with
 * the old number kept. */
CT_NODISCARD ct_status ct_pool_set_threads(size_t n, ct_error *err);
size_t ct_pool_threads(void);

/* The number that the pool starts with: CTRAINER_NUM_THREADS, else OMP_NUM_THREADS,
 * else the processors that this process may use. CT_EINVAL when the first is set to
 * something else than a number >= 1; a pool used in spite of that has one thread. */
CT_NODISCARD ct_status ct_pool_default_threads(size_t *n, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
