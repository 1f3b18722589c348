#define _POSIX_C_SOURCE 200809L
#include "core/ct_deadline.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
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

bool
ct_deadline_poll(ct_deadline deadline, int fd)
{
    struct pollfd asked = {.fd = fd, .events = POLLIN};
    int n;
    do {
        /* Longer than a day is polled for a day at a time. */
        const double left = fmin(ct_deadline_left(deadline), 86400.0);
        n = poll(&asked, 1, (int)ceil(left * 1e3));
    } while ((n < 0 && errno == EINTR) || (n == 0 && ct_deadline_left(deadline) > 0.0));
    return n > 0;
}
