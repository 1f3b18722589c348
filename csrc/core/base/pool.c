/* A job is published as one 64-bit ticket: its number and the count of unclaimed
 * batches. Claiming is one compare-and-swap; for a thread that was held up since an
 * earlier job it fails, because the number has changed. Only a thread with a claimed
 * batch reads the job's fields, and they stay until the batch is counted as done. So
 * the caller never waits for a thread without a batch, and batches take no lock. */
#define _GNU_SOURCE /* sched_getaffinity, syscall */
#include "core/base/pool.h"
#include "core/base/thread.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MAX_THREADS = 256,
    SPINS = 2000 /* some tens of microseconds: longer than from one pass to the next */
};

static struct {
    /* Held while a job runs, while the threads change and over a fork. Guards all
     * fields that are not atomic. */
    pthread_mutex_t busy;
    size_t started; /* workers that exist: the first so many below */
    struct {
        pthread_t thread;
        size_t index;
    } workers[MAX_THREADS];
    ct_pool_fn *fn;
    void *arg;
    uint32_t n_batches;

    atomic_size_t threads;   /* wanted, the caller included */
    atomic_size_t keep;      /* workers from this index on end themselves */
    _Atomic uint64_t ticket; /* job number << 32 | unclaimed batches */
    _Atomic uint32_t job;    /* changes when there is something to look at */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t done; /* batches of the job that have ended */
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Private futexes: the words are never in memory that processes share. */
static void
futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    (void)syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL,
                  0);
}

static void
futex_wake(_Atomic uint32_t *word, int waiters)
{
    (void)syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, waiters, NULL, NULL,
                  0);
}

static void
spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Runs batches while any are unclaimed. True if the calling thread ended the last batch
 * of the job. */
static bool
work_off(void)
{
    bool last = false;
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while ((uint32_t)ticket != 0) {
        if (!atomic_compare_exchange_weak_explicit(&pool.ticket, &ticket, ticket - 1,
                                                   memory_order_acq_rel,
                                                   memory_order_acquire)) {
            continue;
        }
        const uint32_t n_batches = pool.n_batches;
        pool.fn(pool.arg, n_batches - (uint32_t)ticket);
        last = atomic_fetch_add_explicit(&pool.done, 1, memory_order_acq_rel) + 1 ==
               n_batches;
        ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    }
    return last;
}

/* Spins for a while, then sleeps until pool.job differs from `seen`; returns pool.job.
 * A sleeper counts itself before its last look, and announce() counts sleepers after
 * the change (both sequentially consistent): no wake-up can be missed. */
static uint32_t
wait_for_change(uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        const uint32_t job = atomic_load_explicit(&pool.job, memory_order_acquire);
        if (job != seen) {
            return job;
        }
        spin_pause();
    }
    uint32_t job;
    atomic_fetch_add(&pool.sleepers, 1);
    while ((job = atomic_load(&pool.job)) == seen) {
        futex_wait(&pool.job, seen);
    }
    atomic_fetch_sub(&pool.sleepers, 1);
    return job;
}

static void
announce(int waiters)
{
    atomic_fetch_add(&pool.job, 1);
    if (atomic_load(&pool.sleepers) != 0) {
        futex_wake(&pool.job, waiters);
    }
}

static void *
worker(void *arg)
{
    /* 0 is an old number at worst: a new worker looks at the ticket once for nothing.
     */
    const size_t index = *(const size_t *)arg;
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for_change(seen);
        if (index >= atomic_load(&pool.keep)) {
            return NULL;
        }
        if (work_off()) {
            /* Only the job's caller sleeps on `done`. */
            futex_wake(&pool.done, 1);
        }
    }
}

/* Starts workers until there are n. False when a worker could not be started. */
static bool
start_workers(size_t n)
{
    if (pool.started >= n) {
        return true;
    }
    atomic_store(&pool.keep, n);
    bool ok = true;
    while (ok && pool.started < n) {
        const size_t i = pool.started;
        pool.workers[i].index = i;
        ok = ct_thread_start(&pool.workers[i].thread, worker, &pool.workers[i].index) ==
             0;
        pool.started += ok;
    }
    return ok;
}

static void
stop_workers(size_t n)
{
    if (pool.started <= n) {
        return;
    }
    atomic_store(&pool.keep, n);
    /* All have to look at `keep`, sleeping or not. */
    announce(MAX_THREADS);
    while (pool.started > n) {
        (void)pthread_join(pool.workers[--pool.started].thread, NULL);
    }
}

/* A fork waits for the running job, so that the child finds the pool at rest. The child
 * has no workers and starts new ones for its first job. */
static void
before_fork(void)
{
    (void)pthread_mutex_lock(&pool.busy);
}

static void
after_fork_in_parent(void)
{
    (void)pthread_mutex_unlock(&pool.busy);
}

/* fork copies the calling thread alone: the workers and their sleep are the
 * parent's. */
static void
after_fork_in_child(void)
{
    pool.started = 0;
    atomic_store(&pool.sleepers, 0);
    (void)pthread_mutex_unlock(&pool.busy);
}

/* The number at the start of `text`, at most MAX_THREADS; 0 if there is none, or if
 * anything but `end` follows. */
static size_t
parse_threads(const char *text, char end)
{
    char *rest;
    const long n = strtol(text, &rest, 10);
    if (rest == text || n < 1 || (*rest != '\0' && *rest != end)) {
        return 0;
    }
    return n < MAX_THREADS ? (size_t)n : MAX_THREADS;
}

static size_t
usable_processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        return 1;
    }
    const int n = CPU_COUNT(&set);
    return n < 1 ? 1 : n < MAX_THREADS ? (size_t)n : MAX_THREADS;
}

ct_status
ct_pool_default_threads(size_t *n, ct_error *err)
{
    const char *ours = getenv("CTRAINER_NUM_THREADS");
    if (ours != NULL && *ours != '\0') {
        *n = parse_threads(ours, '\0');
        return *n != 0 ? CT_OK
                       : ct_fail(err, CT_EINVAL,
                                 "CTRAINER_NUM_THREADS must be a number in [1, %d], "
                                 "got '%s'",
                                 MAX_THREADS, ours);
    }
    const char *theirs = getenv("OMP_NUM_THREADS"); /* "4", or "4,2" for nested teams */
    *n = theirs != NULL ? parse_threads(theirs, ',') : 0;
    if (*n == 0) {
        *n = usable_processors();
    }
    return CT_OK;
}

static void
initialise(void)
{
    size_t n;
    if (ct_pool_default_threads(&n, NULL) != CT_OK) {
        n = 1;
    }
    atomic_store(&pool.threads, n);
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void
run_alone(ct_pool_fn *fn, void *arg, size_t n_batches)
{
    for (size_t batch = 0; batch < n_batches; batch++) {
        fn(arg, batch);
    }
}

static void
wait_until_done(uint32_t n_batches)
{
    for (int i = 0;; i++) {
        const uint32_t done = atomic_load_explicit(&pool.done, memory_order_acquire);
        if (done == n_batches) {
            return;
        }
        if (i < SPINS) {
            spin_pause();
        }
        else {
            futex_wait(&pool.done, done);
        }
    }
}

static void
run_together(ct_pool_fn *fn, void *arg, uint32_t n_batches)
{
    pool.fn = fn;
    pool.arg = arg;
    pool.n_batches = n_batches;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    /* A new number in the upper half makes every compare-and-swap on the old ticket
     * fail. */
    const uint64_t number =
        atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> 32;
    atomic_store_explicit(&pool.ticket, (number + 1) << 32 | n_batches,
                          memory_order_release);
    const size_t others = pool.started < n_batches ? pool.started : n_batches - 1;
    /* After the ticket, so that a woken thread finds work. */
    announce((int)others);
    (void)work_off();
    wait_until_done(n_batches);
}

void
ct_pool_run(ct_pool_fn *fn, void *arg, size_t n_batches)
{
    (void)pthread_once(&once, initialise);
    /* trylock, as a second caller, or a batch that calls the pool, would wait for a job
     * that waits for the caller. */
    if (n_batches < 2 || n_batches > UINT32_MAX ||
        pthread_mutex_trylock(&pool.busy) != 0) {
        run_alone(fn, arg, n_batches);
        return;
    }
    (void)start_workers(atomic_load(&pool.threads) - 1); /* fewer will do */
    if (pool.started == 0) {
        run_alone(fn, arg, n_batches);
    }
    else {
        run_together(fn, arg, (uint32_t)n_batches);
    }
    (void)pthread_mutex_unlock(&pool.busy);
}

ct_status
ct_pool_set_threads(size_t n, ct_error *err)
{
    if (n < 1 || n > MAX_THREADS) {
        return ct_fail(err, CT_EINVAL,
                       "the number of threads must be in [1, %d], got %zu", MAX_THREADS,
                       n);
    }
    (void)pthread_once(&once, initialise);
    (void)pthread_mutex_lock(&pool.busy);
    const size_t before = pool.started;
    const bool ok = start_workers(n - 1);
    if (ok) {
        atomic_store(&pool.threads, n);
    }
    /* Stops the surplus; after a failure the threads that were just started. */
    stop_workers(ok ? n - 1 : before);
    (void)pthread_mutex_unlock(&pool.busy);
    return ok ? CT_OK
              : ct_fail(err, CT_ENOMEM,
                        "a thread could not be started; %zu of %zu are running",
                        before + 1, n);
}

size_t
ct_pool_threads(void)
{
    (void)pthread_once(&once, initialise);
    return atomic_load(&pool.threads);
}
