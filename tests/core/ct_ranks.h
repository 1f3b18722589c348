/* Runs one function as the ranks of a group of threads. */
#ifndef CT_RANKS_H
#define CT_RANKS_H

#include "ct_comm_local.h"
#include "ct_test.h"

#include <pthread.h>

enum {
    MAX_RANKS = 8
};

typedef void rank_fn(ct_comm *comm, void *arg);

typedef struct rank_start {
    ct_comm *comm;
    rank_fn *fn;
    void *arg;
} rank_start;

/* A rank that returns leaves the group. */
static inline void *
rank_thread(void *op)
{
    const rank_start *start = op;
    start->fn(start->comm, start->arg);
    start->comm->ops->free(start->comm);
    return NULL;
}

static inline void
run_ranks(int world_size, double timeout_seconds, rank_fn *fn, void *arg)
{
    ct_comm *comms[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    rank_start starts[MAX_RANKS];
    CHECK(ct_comm_local_new(comms, world_size, timeout_seconds, NULL) == CT_OK);
    for (int rank = 0; rank < world_size; rank++) {
        starts[rank] = (rank_start){comms[rank], fn, arg};
        CHECK(pthread_create(&threads[rank], NULL, rank_thread, &starts[rank]) == 0);
    }
    for (int rank = 0; rank < world_size; rank++) {
        CHECK(pthread_join(threads[rank], NULL) == 0);
    }
}

#endif
