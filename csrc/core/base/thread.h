/* Threads of the core: signal handlers run on the host's threads alone. */
#ifndef CORE_BASE_THREAD_H
#define CORE_BASE_THREAD_H

#include "core/base/decls.h"

#include <pthread.h>

CT_BEGIN_DECLS

/* Starts run(arg) with every signal blocked. 0, or the error's number. */
int ct_thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

CT_END_DECLS

#endif
