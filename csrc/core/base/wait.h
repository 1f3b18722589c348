/* The latest moment for an event, on the monotonic clock. */
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

/* Waits until `fd` is readable (or hung up). CT_ECOMM, without a text, after the
 * deadline; CT_EHOST when interrupted. */
CT_NODISCARD ct_status ct_deadline_poll(ct_deadline deadline, int fd, ct_error *err);

/* Interrupts of a wait for other processes: the host's Ctrl-C.
 *
 * The core knows no host; the embedding program may set a function for asking. Waiting
 * threads call it now and then, without holding a lock. When it returns true the wait
 * fails with CT_EHOST: the function has noted the reason. */

typedef bool ct_interrupt_fn(void);

/* For the whole process; NULL, the default: nothing interrupts. */
void ct_interrupt_set(ct_interrupt_fn *fn);

bool ct_interrupted(void);

/* A long wait for another process is reported to the host after `seconds`, and again
 * whenever the wait has doubled; the waiting thread calls the function, without a lock.
 */
typedef void ct_stall_fn(const char *text);

/* For the whole process; NULL, the default: nothing is reported. */
void ct_stall_set(ct_stall_fn *fn, double seconds);

double ct_stall_seconds(void); /* infinity for NULL */
void ct_stall_report(const char *text);

#endif
