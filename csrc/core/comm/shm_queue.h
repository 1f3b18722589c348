/* The collectives of a rank in shared memory, those that have begun first.
 *
 * One that has begun goes on whenever its rank calls anything of the group, as far as
 * it goes without waiting for others. They end in the order in which they began. */
#ifndef CT_SHM_QUEUE_H
#define CT_SHM_QUEUE_H

#include "core/comm/exchange.h"

typedef struct ct_shm_queue {
    ct_exchange exchange;
    bool busy;             /* a thread is in here */
    ct_work *first, *last; /* of those begun that have not ended */
} ct_shm_queue;

/* As ct_comm_run, ct_comm_start and ct_comm_wait. */
CT_NODISCARD ct_status ct_shm_run(ct_shm_queue *queue, const ct_request *request,
                                  ct_error *err);
CT_NODISCARD ct_status ct_shm_start(ct_shm_queue *queue, const ct_request *request,
                                    ct_work **work, ct_error *err);
CT_NODISCARD ct_status ct_shm_wait(ct_shm_queue *queue, ct_work *work, ct_error *err);

/* As `stream` of ct_comm_ops. */
CT_NODISCARD ct_status ct_shm_stream(ct_shm_queue *queue, const ct_stream *stream,
                                     ct_error *err);

#endif
