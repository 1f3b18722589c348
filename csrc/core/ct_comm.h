/* The communicator table: collectives of a group of ranks.
 *
 * The one table whose entries may re-enter Python. The step engine is written against
 * the table; ct_comm_self, a group of one rank, is the backend that needs nobody, and
 * ct_comm_local.h has one whose ranks are threads. */
#ifndef CT_COMM_H
#define CT_COMM_H

#include "core/ct_span.h"
#include "core/ct_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ct_reduce_op {
    CT_REDUCE_SUM,
    CT_REDUCE_MEAN,
    CT_REDUCE_MAX,
    CT_REDUCE_MIN
} ct_reduce_op;

typedef struct ct_comm ct_comm;

typedef struct ct_comm_ops {
    const char *name;
    /* In place, on every rank the same spans; waits for the result. */
    ct_status (*all_reduce)(ct_comm *comm, const ct_span *span, ct_reduce_op op,
                            ct_error *err);
    /* in.n elements of every rank, in rank order, into out (in.n * world_size). */
    ct_status (*all_gather)(ct_comm *comm, const ct_span *out, const ct_span *in,
                            ct_error *err);
    ct_status (*reduce_scatter)(ct_comm *comm, const ct_span *out, const ct_span *in,
                                ct_reduce_op op, ct_error *err);
    ct_status (*broadcast)(ct_comm *comm, const ct_span *span, int root, ct_error *err);
    ct_status (*barrier)(ct_comm *comm, ct_error *err);
    void (*free)(ct_comm *comm);
} ct_comm_ops;

struct ct_comm {
    const ct_comm_ops *ops;
    int rank; /* in [0, world_size) */
    int world_size;
};

/* A group of one rank; NULL when out of memory. Release with comm->ops->free. */
ct_comm *ct_comm_self_new(void);

#ifdef __cplusplus
}
#endif

#endif
