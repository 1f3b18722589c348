/* Ctrl-C and SIGTERM while training. */
#ifndef CTPY_SIGNALS_H
#define CTPY_SIGNALS_H

#include <signal.h>
#include <stdbool.h>

typedef struct ctpy_signals {
    struct sigaction on_int, on_term; /* the previous handlers */
    bool installed;
} ctpy_signals;

/* Replaces the handlers of SIGINT and SIGTERM by a handler that sets a flag. For the
 * main thread alone; *saved starts as {0}. */
void ctpy_signals_install(ctpy_signals *saved);

/* Puts the old handlers back and returns the signal that arrived meanwhile, or 0. */
int ctpy_signals_restore(ctpy_signals *saved);

/* The signal that arrived since install, or 0. */
int ctpy_signal_requested(void);

/* Sets the flag as for that signal, unless it is set; 0: does nothing. */
void ctpy_signal_request(int number);

/* True after Ctrl-C or SIGTERM: the run should end. Long loops check it between
 * batches.
 */
bool ctpy_stop_requested(void);

#endif
