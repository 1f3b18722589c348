/* A moment on the clock that nobody sets, by which something must have happened. */
#ifndef CT_DEADLINE_H
#define CT_DEADLINE_H

#include "core/base/status.h"

typedef struct ct_deadline {
    double at_seconds; /* on CLOCK_MONOTONIC */
} ct_deadline;

ct_deadline ct_deadline_after(double seconds);
double ct_deadline_left(ct_deadline deadline); /* seconds; never below 0 */

/* Sleeps `seconds`, or until the deadline. */
void ct_deadline_nap(ct_deadline deadline, double seconds);

/* Waits until `fd` has something to read (or has been hung up). CT_ECOMM, without a
 * text, when that does not happen before the deadline; CT_EHOST: core/base/interrupt.h. */
CT_NODISCARD ct_status ct_deadline_poll(ct_deadline deadline, int fd, ct_error *err);

#endif
