/* Communicators: groups of ranks and their collectives.
 *
 * The one table whose entries may re-enter Python. The engines above know the table
 * alone; a backend fills the table in. ct_comm_self is a group of a single rank;
 * tests/core/ct_comm_local.h has a backend whose ranks are threads.
 *
 * Every rank of a group calls the same collectives in the same order, with spans of the
 * same lengths and dtypes. All backends reduce fp64, fp32, bf16, fp16 and int64; other
 * dtypes may be rejected with CT_EINVAL. A collective that a rank does not join fails
 * on the others with CT_ECOMM within the backend's time-out; the message names the
 * collective, the calling rank and, if known, the missing rank.
 *
 * A group of several ranks belongs to the process that joined it. In a forked child
 * every collective fails with CT_ECOMM at once, and `free` releases the child's memory
 * alone: the parent stays in the group. */
#ifndef CORE_COMM_COMM_H
#define CORE_COMM_COMM_H

#include "core/base/owner.h"
#include "core/base/span.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* The numbers by which messages name ranks: rank r of this group is rank
 * `first + r * step` of a group of `of` ranks, and this group may be a part of that
 * group. */
typedef struct ct_rank_names {
    int first, step, of;
} ct_rank_names;

static inline int
ct_rank_called(const ct_rank_names *names, int rank)
{
    return names->first + rank * names->step;
}

typedef enum ct_reduce_op {
    CT_REDUCE_SUM,
    CT_REDUCE_MEAN,
    CT_REDUCE_MAX,
    CT_REDUCE_MIN
} ct_reduce_op;

typedef enum ct_collective {
    CT_ALL_REDUCE,
    CT_ALL_GATHER,
    CT_REDUCE_SCATTER,
    CT_ALL_TO_ALL,
    CT_BROADCAST,
    CT_REDUCE,
    CT_BARRIER
} ct_collective;

typedef struct ct_comm ct_comm;
typedef struct ct_work ct_work;   /* a collective under way; defined by each backend */
typedef struct ct_pages ct_pages; /* core/base/pages.h */

/* The purpose of a collective. Ranks that compare requests compare labels, too, and a
 * message names the labels that differ: collectives of the same shape may serve
 * different units.
 */
typedef struct ct_label {
    uint64_t tag;  /* hash of the whole name, by ct_label_set(); 0: no label */
    uint64_t call; /* earlier collectives of this name on this rank */
    char name[88]; /* the last characters of the name */
    bool is_step;  /* the name is a step's of the training loop, not a unit's */
} ct_label;

/* A collective as data: the argument of ct_comm_start, compared between ranks. */
typedef struct ct_request {
    ct_collective what;
    ct_reduce_op op; /* of a reduction */
    int root;        /* of broadcast and reduce */
    ct_span in;      /* of all_reduce, broadcast and reduce: the result, too, but
                      * undefined after a reduce on ranks other than the root */
    ct_span out;     /* of all_gather, reduce_scatter and all_to_all */
    ct_label label;  /* filled in by the backend from the communicator's */
} ct_request;

/* An all_reduce of data that no rank holds whole: `fill` writes this rank's elements
 * from `at` on into a piece, and `use` gets the same piece of all ranks, in rank order.
 * Pieces come in order; the next may be filled before the last is used. */
typedef struct ct_stream {
    size_t n; /* elements, the same number on every rank */
    ct_dtype dtype;
    void *arg; /* of both functions */
    void (*fill)(void *arg, size_t at, size_t n, void *piece);
    void (*use)(void *arg, size_t at, size_t n, const void *const *pieces);
} ct_stream;

/* The ranks of a group that form a smaller one. */
typedef struct ct_members {
    int *ranks;      /* n ranks, in the new order; n is 0 for a rank in none */
    int n, index;    /* index: the place of this rank among them */
    unsigned serial; /* number of this split of the group: the same on all ranks */
} ct_members;

/* A backend. Optional entries are NULL. */
typedef struct ct_comm_ops {
    const char *name;
    /* Runs a collective to the end. */
    ct_status (*run)(ct_comm *comm, const ct_request *request, ct_error *err);
    /* Begins a collective; NULL for a backend without concurrency. The memory of the
     * spans is the backend's until wait has returned. */
    ct_status (*start)(ct_comm *comm, const ct_request *request, ct_work **work,
                       ct_error *err);
    /* Waits for the work and frees the work, on failure too. NULL with start. */
    ct_status (*wait)(ct_comm *comm, ct_work *work, ct_error *err);
    /* Makes the group of ct_comm_split; every rank calls this, also with n < 2 and
     * nothing to make. NULL if a group cannot be split. */
    ct_status (*group)(ct_comm *comm, const ct_members *members, ct_comm **made,
                       ct_error *err);
    /* ct_comm_memory for a backend whose ranks share memory; else NULL. */
    ct_status (*memory)(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err);
    void (*free)(ct_comm *comm);
    /* Bytes of the batches in which a caller should divide the work around a
     * collective, so that a batch stays in the cache; 0: each collective has a high
     * fixed cost, so use few. */
    size_t batch_bytes;
    bool takes_device_memory; /* spans may lie in a GPU's memory as well */
    bool compares;            /* ranks compare every request: no history is needed */
    /* Runs a stream; NULL where a collective over a batch is as fast. */
    ct_status (*stream)(ct_comm *comm, const ct_stream *stream, ct_error *err);
    /* ct_comm_follow, ct_comm_precede and ct_comm_order, for a backend that enqueues
     * its work; else NULL. */
    ct_status (*follow)(ct_comm *comm, void *stream, ct_error *err);
    ct_status (*precede)(ct_comm *comm, void *stream, ct_error *err);
    ct_status (*order)(ct_comm *comm, ct_work *work, void *stream, ct_error *err);
    ct_status (*check)(ct_comm *comm, ct_error *err); /* likewise for ct_comm_check */
} ct_comm_ops;

struct ct_comm {
    const ct_comm_ops *ops;
    int rank; /* in [0, world_size) */
    int world_size;
    unsigned splits; /* so far */
    void *stream;    /* of the device, for a backend that enqueues its work; or NULL */
    /* For the memory of a GPU: a group of the same ranks, owned; or NULL. */
    struct ct_comm *on_gpu;
    struct ct_comm *owned_by; /* of such a group: the group for the host's memory */
    int gpu;                  /* the ordinal, of a group for a GPU's memory */
    ct_owner owner;
    ct_rank_names names;   /* of the ranks in messages */
    const ct_label *label; /* of the next collectives; the caller's; NULL: none */
    struct ct_history
        *history; /* core/comm/collectives.h; owned by its maker; or NULL */
};

/* The base of every backend's communicator: made by this process, never split. */
ct_comm ct_comm_made(const ct_comm_ops *ops, int rank, int world_size);

/* Whether this process is the rank, and not a child that was forked from it. */
static inline bool
ct_comm_is_here(const ct_comm *comm)
{
    return ct_owner_is_here(comm->owner);
}

/* CT_ECOMM in such a child, naming the collective, the rank and both processes. */
CT_NODISCARD ct_status ct_comm_check_here(const ct_comm *comm, const char *what,
                                          ct_error *err);

/* Runs the request and waits for the result. */
static inline ct_status
ct_comm_run(ct_comm *comm, const ct_request *request, ct_error *err)
{
    return comm->ops->run(comm, request, err);
}

/* In place, over spans of one length; waits for the result. */
CT_NODISCARD ct_status ct_comm_all_reduce(ct_comm *comm, const ct_span *span,
                                          ct_reduce_op op, ct_error *err);

/* Puts in.n elements of every rank, in rank order, into out (in.n * world_size). `in`
 * is this rank's part of out, or does not overlap out. */
CT_NODISCARD ct_status ct_comm_all_gather(ct_comm *comm, const ct_span *out,
                                          const ct_span *in, ct_error *err);

CT_NODISCARD ct_status ct_comm_reduce_scatter(ct_comm *comm, const ct_span *out,
                                              const ct_span *in, ct_reduce_op op,
                                              ct_error *err);

/* Both spans have a part of the same length for every rank: part r of `in` goes to rank
 * r, part r of `out` comes from rank r. The spans do not overlap. */
CT_NODISCARD ct_status ct_comm_all_to_all(ct_comm *comm, const ct_span *out,
                                          const ct_span *in, ct_error *err);

CT_NODISCARD ct_status ct_comm_broadcast(ct_comm *comm, const ct_span *span, int root,
                                         ct_error *err);

CT_NODISCARD ct_status ct_comm_barrier(ct_comm *comm, ct_error *err);

/* Begins the request; a backend without `start` has run it on return. *work has to be
 * passed to ct_comm_wait once, in the order of the starts; NULL stands for a work that
 * ended at the start. On failure there is no work. */
CT_NODISCARD static inline ct_status
ct_comm_start(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    *work = NULL;
    return comm->ops->start != NULL ? comm->ops->start(comm, request, work, err)
                                    : ct_comm_run(comm, request, err);
}

CT_NODISCARD static inline ct_status
ct_comm_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    return work == NULL ? CT_OK : comm->ops->wait(comm, work, err);
}

/* Orders the next collectives after the work that is on a stream of the device so far,
 * as if they were enqueued there. CT_EDEVICE. */
CT_NODISCARD static inline ct_status
ct_comm_follow(ct_comm *comm, void *stream, ct_error *err)
{
    return comm->ops->follow == NULL ? CT_OK : comm->ops->follow(comm, stream, err);
}

/* Orders later work on a stream of the device after the work that is on the group's
 * stream so far. CT_EDEVICE. */
CT_NODISCARD static inline ct_status
ct_comm_precede(ct_comm *comm, void *stream, ct_error *err)
{
    return comm->ops->precede == NULL ? CT_OK : comm->ops->precede(comm, stream, err);
}

/* ct_comm_wait for a stream of the device in place of the host: later work on the
 * stream comes after the collective. A backend that does not enqueue lets the host
 * wait. A failure after the return is reported by the group's next collective. */
CT_NODISCARD static inline ct_status
ct_comm_order(ct_comm *comm, ct_work *work, void *stream, ct_error *err)
{
    return work == NULL || comm->ops->order == NULL
               ? ct_comm_wait(comm, work, err)
               : comm->ops->order(comm, work, stream, err);
}

/* For a host that has waited for the work behind ct_comm_order: CT_ECOMM where such a
 * collective had failed, so that the streams continued with wrong values. */
CT_NODISCARD static inline ct_status
ct_comm_check(ct_comm *comm, ct_error *err)
{
    return comm->ops->check == NULL ? CT_OK : comm->ops->check(comm, err);
}

/* Runs the request between the work that is on a stream of the device so far and later
 * work there. */
CT_NODISCARD ct_status ct_comm_enqueue(ct_comm *comm, const ct_request *request,
                                       void *stream, ct_error *err);

/* Allocates `bytes` > 0 of zeroed, page-aligned host memory that is best for the
 * operands of collectives: ranks of a machine read each other's in place, if the whole
 * span lies in this memory. A collective, with equal bytes on every rank. The memory
 * may be used for anything, outlives the communicator, and is released with
 * ct_pages_free. CT_EINVAL, CT_ENOMEM, CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory,
                                      ct_error *err);

/* Makes a smaller group of the ranks with the same color, in the order of their keys,
 * ties in the order of their ranks. A collective of the whole group; a rank with a
 * color below 0 gets NULL and no error. The new group is independent and has the same
 * backend and time-out (one rank alone: ct_comm_self). CT_EINVAL for a backend that
 * cannot split groups, CT_ENOMEM, CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_split(ct_comm *comm, int64_t color, int64_t key,
                                     ct_comm **made, ct_error *err);

/* "all_reduce", ...; "sum", ... */
const char *ct_collective_name(ct_collective what);
const char *ct_reduce_op_name(ct_reduce_op op);

/* CT_EINVAL, saying who called what, unless the requests of all ranks, found by at(),
 * are alike. Of the two requests in the message, the majority's is always there. */
typedef const ct_request *ct_request_at(const void *group, int rank);
CT_NODISCARD ct_status ct_requests_compare(ct_request_at *at, const void *group,
                                           int world_size, const ct_rank_names *names,
                                           ct_error *err);

/* The same for ranks that do not see each other's requests: all ranks of `comm` gather
 * and compare them. */
CT_NODISCARD ct_status ct_requests_exchange(ct_comm *comm, const ct_request *own,
                                            ct_error *err);

/* Names a label. The tag is a hash of the name and of `shape`, a number that keeps
 * things of one name apart. */
void ct_label_set(ct_label *label, const char *name, uint64_t shape);

/* The request with the communicator's label. */
ct_request ct_request_labelled(const ct_comm *comm, const ct_request *request);

/* CT_EINVAL unless the lengths, dtypes and the root fit a group of world_size ranks. To
 * be called once the ranks' requests are known to be alike, so that all are rejected.
 */
CT_NODISCARD ct_status ct_request_check(const ct_request *request, int world_size,
                                        ct_error *err);

/* A group of one rank; NULL when out of memory. Release with comm->ops->free. */
ct_comm *ct_comm_self_new(void);

CT_END_DECLS

#endif
