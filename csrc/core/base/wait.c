/* Waiting with a limit: deadlines, and the question whether Ctrl-C has been pressed,
 * which every long wait of the core asks. */
#define _POSIX_C_SOURCE 200809L

#include "core/base/wait.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

static double
now_seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

ct_deadline
ct_deadline_after(double seconds)
{
    return (ct_deadline){now_seconds() + seconds};
}

double
ct_deadline_left(ct_deadline deadline)
{
    return fmax(deadline.at_seconds - now_seconds(), 0.0);
}

void
ct_deadline_nap(ct_deadline deadline, double seconds)
{
    const double nap = fmin(seconds, ct_deadline_left(deadline));
    const double whole = floor(nap);
    const struct timespec time = {(time_t)whole, (long)((nap - whole) * 1e9)};
    (void)nanosleep(&time, NULL);
}

static _Atomic(ct_interrupt_fn *) interrupted;

bool
ct_interrupted(void)
{
    ct_interrupt_fn *fn = atomic_load(&interrupted);
    return fn != NULL && fn();
}

ct_status
ct_deadline_poll(ct_deadline deadline, int fd, ct_error *err)
{
    const double longest = 0.1; /* between two looks at interruptions, in seconds */
    struct pollfd asked = {.fd = fd, .events = POLLIN};
    for (;;) {
        const double left = ct_deadline_left(deadline);
        const int n = poll(&asked, 1, (int)ceil(fmin(left, longest) * 1e3));
        if (n > 0) {
            return CT_OK;
        }
        if (ct_interrupted()) {
            return ct_fail(err, CT_EHOST, "interrupted");
        }
        if ((n < 0 && errno != EINTR) || left <= 0.0) {
            return ct_fail(err, CT_ECOMM, "nothing came in time");
        }
    }
}

void
ct_interrupt_set(ct_interrupt_fn *fn)
{
    atomic_store(&interrupted, fn);
}

static _Atomic(ct_stall_fn *) stall_reported;
static _Atomic double stall_seconds;

void
ct_stall_set(ct_stall_fn *fn, double seconds)
{
    atomic_store(&stall_seconds, seconds);
    atomic_store(&stall_reported, fn);
}

double
ct_stall_seconds(void)
{
    return atomic_load(&stall_reported) == NULL ? (double)INFINITY
                                                : atomic_load(&stall_seconds);
}

void
ct_stall_report(const char *text)
{
    ct_stall_fn *fn = atomic_load(&stall_reported);
    if (fn != NULL) {
        fn(text);
    }
}
