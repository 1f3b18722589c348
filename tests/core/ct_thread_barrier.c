#define _POSIX_C_SOURCE 200809L
#include "ct_thread_barrier.h"

#include "core/base/alloc.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

struct ct_thread_barrier {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    double timeout_seconds;
    int n_ranks;
    int staying;       /* ranks that have not left */
    int waiting;       /* ranks that have come since */
    uint64_t held;     /* times that all have come, to join or to close */
    int culprit;       /* the rank that broke it, or -1 */
    bool culprit_left; /* it left; else it came too late */
    uint64_t came[];   /* times that each rank has come */
};

static struct timespec
deadline_after(double seconds)
{
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    const double whole = floor(seconds);
    at.tv_sec += (time_t)whole;
    at.tv_nsec += (long)((seconds - whole) * 1e9);
    if (at.tv_nsec >= 1000000000L) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000L;
    }
    return at;
}

static void
break_locked(ct_thread_barrier *m, int culprit, bool left)
{
    if (m->culprit < 0) {
        m->culprit = culprit;
        m->culprit_left = left;
        (void)pthread_cond_broadcast(&m->changed);
    }
}

static int
first_absent_locked(const ct_thread_barrier *m)
{
    int rank = 0;
    while (rank < m->n_ranks - 1 && m->came[rank] > m->held) {
        rank++;
    }
    return rank;
}

static ct_status
fail_locked(const ct_thread_barrier *m, int rank, const char *what, ct_error *err)
{
    if (m->culprit_left) {
        return ct_fail(err, CT_ECOMM, "%s on rank %d of %d: rank %d has left the group",
                       what, rank, m->n_ranks, m->culprit);
    }
    return ct_fail(err, CT_ECOMM,
                   "%s on rank %d of %d: rank %d did not come within %g seconds%s",
                   what, rank, m->n_ranks, m->culprit, m->timeout_seconds,
                   m->culprit == rank ? ": the others have given this rank up" : "");
}

/* True for the rank that comes last, and so lets all go on. */
static bool
come_locked(ct_thread_barrier *m, int rank)
{
    m->came[rank] = m->held + 1;
    if (++m->waiting < m->n_ranks) {
        return false;
    }
    m->waiting = 0;
    m->held++;
    (void)pthread_cond_broadcast(&m->changed);
    return true;
}

static ct_status
join_locked(ct_thread_barrier *m, int rank, const char *what, ct_error *err)
{
    const uint64_t held = m->held;
    if (m->culprit >= 0) {
        return fail_locked(m, rank, what, err);
    }
    if (come_locked(m, rank)) {
        return CT_OK;
    }
    const struct timespec deadline = deadline_after(m->timeout_seconds);
    while (m->held == held && m->culprit < 0) {
        if (pthread_cond_timedwait(&m->changed, &m->lock, &deadline) == ETIMEDOUT &&
            m->held == held) {
            break_locked(m, first_absent_locked(m), false);
        }
    }
    return m->held == held ? fail_locked(m, rank, what, err) : CT_OK;
}

ct_status
ct_thread_barrier_join(ct_thread_barrier *m, int rank, const char *what, ct_error *err)
{
    (void)pthread_mutex_lock(&m->lock);
    ct_status status = join_locked(m, rank, what, err);
    (void)pthread_mutex_unlock(&m->lock);
    return status;
}

void
ct_thread_barrier_close(ct_thread_barrier *m, int rank)
{
    (void)pthread_mutex_lock(&m->lock);
    const uint64_t held = m->held;
    if (!come_locked(m, rank)) {
        while (m->held == held) {
            (void)pthread_cond_wait(&m->changed, &m->lock);
        }
    }
    (void)pthread_mutex_unlock(&m->lock);
}

bool
ct_thread_barrier_leave(ct_thread_barrier *m, int rank)
{
    (void)pthread_mutex_lock(&m->lock);
    break_locked(m, rank, true);
    const bool last = --m->staying == 0;
    (void)pthread_mutex_unlock(&m->lock);
    return last;
}

/* The lock, and the condition on the clock that nobody sets. */
static bool
init_threads(ct_thread_barrier *m)
{
    pthread_condattr_t attributes;
    bool done = false;
    if (pthread_mutex_init(&m->lock, NULL) != 0) {
        return false;
    }
    if (pthread_condattr_init(&attributes) == 0) {
        done = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
               pthread_cond_init(&m->changed, &attributes) == 0;
        (void)pthread_condattr_destroy(&attributes);
    }
    if (!done) {
        (void)pthread_mutex_destroy(&m->lock);
    }
    return done;
}

ct_thread_barrier *
ct_thread_barrier_new(int n_ranks, double timeout_seconds)
{
    ct_thread_barrier *m =
        ct_calloc(1, sizeof *m + (size_t)n_ranks * sizeof m->came[0]);
    if (m == NULL || !init_threads(m)) {
        ct_free(m);
        return NULL;
    }
    m->timeout_seconds = timeout_seconds;
    m->n_ranks = m->staying = n_ranks;
    m->culprit = -1;
    return m;
}

void
ct_thread_barrier_free(ct_thread_barrier *m)
{
    if (m != NULL) {
        (void)pthread_cond_destroy(&m->changed);
        (void)pthread_mutex_destroy(&m->lock);
        ct_free(m);
    }
}
