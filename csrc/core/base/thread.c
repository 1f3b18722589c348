#define _GNU_SOURCE /* pthread_sigmask */
#include "core/base/thread.h"

#include <signal.h>
#include <stddef.h>

bool
ct_thread_start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(thread, NULL, run, arg) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}
