/* Ctrl-C and SIGTERM while training. */
#ifndef CTPY_SIGNALS_H
#define CTPY_SIGNALS_H

#include <signal.h>
#include <stdbool.h>

typedef struct ctpy_signals {
    struct sigaction on_int, on_term; /* what was installed before */
    bool installed;
} ctpy_signals;

/* Replaces the handlers of SIGINT and SIGTERM by one that sets a flag. Call it on the
 * main thread alone; *saved starts as {0}. */
void ctpy_signals_install(ctpy_signals *saved);

/* Puts the old handlers back and returns the signal that arrived meanwhile, or 0. */
int ctpy_signals_restore(ctpy_signals *saved);

/* The signal that arrived since install, or 0. */
int ctpy_signal_requested(void);

/* As if that signal had arrived, unless one has; 0: nothing. */
void ctpy_signal_request(int number);

/* True when Ctrl-C or SIGTERM has asked the run to end; long loops look at it between
 * batches. */
bool ctpy_stop_requested(void);

#endif
