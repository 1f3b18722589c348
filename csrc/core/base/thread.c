#define _GNU_SOURCE /* pthread_sigmask */
#include "core/base/thread.h"

#include <signal.h>
#include <stddef.h>

int
ct_thread_start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
