/* A moment on the clock that nobody sets, by which something must have happened. */
#ifndef CORE_BASE_WAIT_H
#define CORE_BASE_WAIT_H

#include "core/base/status.h"

#include <stdbool.h>

typedef struct ct_deadline {
    double at_seconds; /* on CLOCK_MONOTONIC */
} ct_deadline;

ct_deadline ct_deadline_after(double seconds);
double ct_deadline_left(ct_deadline deadline); /* seconds; never below 0 */

/* Sleeps `seconds`, or until the deadline. */
void ct_deadline_nap(ct_deadline deadline, double seconds);

/* Waits until `fd` has something to read (or has been hung up). CT_ECOMM, without a
 * text, when that does not happen before the deadline; CT_EHOST: core/base/wait.h. */
CT_NODISCARD ct_status ct_deadline_poll(ct_deadline deadline, int fd, ct_error *err);

/* Whether a wait for other processes is to end early: the host's Ctrl-C.
 *
 * The core knows no host; whoever embeds it may say how to ask. The function is called
 * now and then by threads that wait, which hold no lock, and where it returns true the
 * wait fails with CT_EHOST: the function has noted why. */

typedef bool ct_interrupt_fn(void);

/* For the whole process; NULL, the default: nothing interrupts. */
void ct_interrupt_set(ct_interrupt_fn *fn);

bool ct_interrupted(void);

#endif
