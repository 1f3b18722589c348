/* Threads of the core: signal handlers run on the host's threads alone. */
#ifndef CORE_BASE_THREAD_H
#define CORE_BASE_THREAD_H

#include "core/base/decls.h"

#include <pthread.h>
#include <stdbool.h>

CT_BEGIN_DECLS

/* Starts run(arg) with every signal blocked; false when no thread can be started. */
bool ct_thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

CT_END_DECLS

#endif
