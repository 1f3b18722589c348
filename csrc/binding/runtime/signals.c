#define _POSIX_C_SOURCE 200809L
/* Ctrl-C and SIGTERM while training: a flag for the training loops.
 *
 * A process has one disposition per signal, so this is process-wide by nature: the
 * first train() on the main thread installs the handler, the last to leave restores the
 * previous handler. A child forked meanwhile, such as a worker of a data loader, trains
 * nothing: its first signal goes to the previous handler. */
#include "binding/runtime/signals.h"

#include "core/base/owner.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_int requested;

/* What the first of the runs found. */
static struct {
    ct_owner owner;
    int runs;
    struct sigaction on_int, on_term;
} outermost;

static void
on_signal(int number)
{
    int none = 0;
    if (!ct_owner_is_here(outermost.owner)) {
        (void)sigaction(
            number, number == SIGINT ? &outermost.on_int : &outermost.on_term, NULL);
        (void)raise(number);
    }
    else if (!atomic_compare_exchange_strong(&requested, &none, number)) {
        /* A second signal means now: back to the system's own action. */
        (void)signal(number, SIG_DFL);
        (void)raise(number);
    }
}

int
ctpy_signal_requested(void)
{
    return atomic_load_explicit(&requested, memory_order_relaxed);
}

void
ctpy_signal_request(int number)
{
    int none = 0;
    (void)atomic_compare_exchange_strong(&requested, &none, number);
}

bool
ctpy_stop_requested(void)
{
    return ctpy_signal_requested() != 0;
}

void
ctpy_signals_install(ctpy_signals *saved)
{
    struct sigaction action = {.sa_handler = on_signal};
    (void)sigemptyset(&action.sa_mask);
    if (outermost.runs > 0 && !ct_owner_is_here(outermost.owner)) {
        (void)sigaction(SIGINT, &outermost.on_int, NULL);
        (void)sigaction(SIGTERM, &outermost.on_term, NULL);
        outermost.runs = 0;
    }
    if (outermost.runs == 0) {
        outermost.owner = ct_owner_here();
        (void)sigaction(SIGINT, NULL, &outermost.on_int);
        (void)sigaction(SIGTERM, NULL, &outermost.on_term);
    }
    atomic_store(&requested, 0);
    saved->installed = sigaction(SIGINT, &action, &saved->on_int) == 0 &&
                       sigaction(SIGTERM, &action, &saved->on_term) == 0;
    outermost.runs += saved->installed;
}

int
ctpy_signals_restore(ctpy_signals *saved)
{
    int number = atomic_exchange(&requested, 0);
    if (saved->installed) {
        (void)sigaction(SIGINT, &saved->on_int, NULL);
        (void)sigaction(SIGTERM, &saved->on_term, NULL);
        saved->installed = false;
        outermost.runs -= outermost.runs > 0;
    }
    return number;
}
