/* The communicator table: collectives of a group of ranks.
 *
 * The one table whose entries may re-enter Python. The step engine is written against
 * the table; ct_comm_self, a group of one rank, is the backend that needs nobody, and
 * tests/core/ct_comm_local.h has one whose ranks are threads.
 *
 * Every rank of a group calls the same collectives in the same order, with spans of the
 * same lengths and dtypes. A backend takes the dtypes that it can reduce, or says with
 * CT_EINVAL that it has none; fp64, fp32, bf16, fp16 and int64 it always has. A
 * collective that other ranks do not join fails with CT_ECOMM within the backend's
 * time-out; its text names the collective, this rank, and the rank that did not come
 * where that is known.
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

#ifdef __cplusplus
extern "C" {
#endif

/* What messages call the ranks of a group. */

/* Rank r is rank `first + r * step` of `of`: a group that is a part of a larger one
 * tells of its ranks by their numbers there. */
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
typedef struct ct_work ct_work;   /* a collective under way; each backend has its own */
typedef struct ct_pages ct_pages; /* core/base/pages.h */

/* What a collective is for, beyond its shape: two of one shape are not the same. Ranks
 * that compare requests compare this, too, and name it where they differ. */
typedef struct ct_label {
    uint64_t tag;  /* of the whole name, ct_label_tag(); 0: for nothing in particular */
    uint64_t call; /* how many of that name came before on this rank */
    char name[88]; /* its last characters */
    bool is_step;  /* the name says what a rank is doing; else it is a unit's */
} ct_label;

/* A collective as data: what ct_comm_start begins and ranks compare. */
typedef struct ct_request {
    ct_collective what;
    ct_reduce_op op; /* of those that reduce */
    int root;        /* of broadcast and reduce */
    ct_span in;      /* of all_reduce, broadcast and reduce: the result, too */
    ct_span out;     /* of all_gather, reduce_scatter and all_to_all */
    ct_label label;  /* the backend fills it in from the communicator's */
} ct_request;

/* An all_reduce that no rank ever holds whole: this rank fills its piece of the
 * elements from `at` on, and is then handed those of all ranks, in rank order. Pieces
 * come in order; one may be filled before the piece before it is used. */
typedef struct ct_stream {
    size_t n; /* elements, as many on every rank */
    ct_dtype dtype;
    void *arg; /* handed to both */
    void (*fill)(void *arg, size_t at, size_t n, void *piece);
    void (*use)(void *arg, size_t at, size_t n, const void *const *pieces);
} ct_stream;

/* Ranks of a group that form a smaller one. */
typedef struct ct_members {
    int *ranks;      /* n of them, in their new order; n is 0 for a rank in none */
    int n, index;    /* this rank's place among them */
    unsigned serial; /* how many times the group has been split: alike on all ranks */
} ct_members;

typedef struct ct_comm_ops {
    const char *name;
    /* In place, on every rank the same spans; waits for the result. */
    ct_status (*all_reduce)(ct_comm *comm, const ct_span *span, ct_reduce_op op,
                            ct_error *err);
    /* in.n elements of every rank, in rank order, into out (in.n * world_size). `in` is
     * this rank's part of out, or they do not overlap. */
    ct_status (*all_gather)(ct_comm *comm, const ct_span *out, const ct_span *in,
                            ct_error *err);
    ct_status (*reduce_scatter)(ct_comm *comm, const ct_span *out, const ct_span *in,
                                ct_reduce_op op, ct_error *err);
    /* in and out hold a part of the same length for every rank: in's part r goes to
     * rank r, out's part r comes from it. They do not overlap. */
    ct_status (*all_to_all)(ct_comm *comm, const ct_span *out, const ct_span *in,
                            ct_error *err);
    ct_status (*broadcast)(ct_comm *comm, const ct_span *span, int root, ct_error *err);
    /* In place on the root; what the others' spans then hold is not said. */
    ct_status (*reduce)(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root,
                        ct_error *err);
    ct_status (*barrier)(ct_comm *comm, ct_error *err);
    /* Begins a collective; NULL for a backend that cannot work meanwhile. The spans'
     * memory is the backend's until wait has returned. */
    ct_status (*start)(ct_comm *comm, const ct_request *request, ct_work **work,
                       ct_error *err);
    /* Waits for it and frees the work, on failure too. NULL where start is. */
    ct_status (*wait)(ct_comm *comm, ct_work *work, ct_error *err);
    /* ct_comm_split's: makes the group of these; every rank calls it, and there is
     * nothing to make for n < 2. NULL where there are no smaller groups. */
    ct_status (*group)(ct_comm *comm, const ct_members *members, ct_comm **made,
                       ct_error *err);
    /* ct_comm_memory for a backend whose ranks share memory; else NULL. */
    ct_status (*memory)(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err);
    void (*free)(ct_comm *comm);
    /* Work that ends in a collective may be cut into pieces of so many bytes, which
     * are then still in the cache; 0: each collective costs much, the fewer the better.
     */
    size_t batch_bytes;
    /* Whether spans may lie in a GPU's memory, beside the host's. */
    bool takes_device_memory;
    /* Whether ranks compare every request, so that a history of them is not needed. */
    bool compares;
    /* Streams; NULL where a collective over a batch is as good. */
    ct_status (*stream)(ct_comm *comm, const ct_stream *stream, ct_error *err);
    /* ct_comm_follow, for a backend whose work is enqueued; else NULL. */
    ct_status (*follow)(ct_comm *comm, void *stream, ct_error *err);
} ct_comm_ops;

struct ct_comm {
    const ct_comm_ops *ops;
    int rank; /* in [0, world_size) */
    int world_size;
    unsigned splits; /* so far */
    ct_owner owner;
    ct_rank_names names;        /* of its ranks in messages */
    const ct_label *label;      /* of the next collectives; the caller's; NULL: none */
    struct ct_history *history; /* core/comm/history.h; whoever made it; or NULL */
};

/* What every backend begins a group with: made by this process, never split. */
ct_comm ct_comm_made(const ct_comm_ops *ops, int rank, int world_size);

/* Whether this process is the rank, and not a child that was forked from it; CT_ECOMM,
 * naming the collective, the rank and both processes. */
bool ct_comm_is_here(const ct_comm *comm);
CT_NODISCARD ct_status ct_comm_check_here(const ct_comm *comm, const char *what,
                                          ct_error *err);

/* Does what the request asks for and waits for the result. */
CT_NODISCARD ct_status ct_comm_run(ct_comm *comm, const ct_request *request,
                                   ct_error *err);

/* Begins it; a backend without `start` has done it when this returns. *work is for
 * ct_comm_wait, which has to be called once, in the order of the starts. On failure
 * there is no work. */
CT_NODISCARD ct_status ct_comm_start(ct_comm *comm, const ct_request *request,
                                     ct_work **work, ct_error *err);
CT_NODISCARD ct_status ct_comm_wait(ct_comm *comm, ct_work *work, ct_error *err);

/* Puts the collectives that come behind what is on a stream of the device so far, as if
 * they were enqueued there. CT_EDEVICE. */
CT_NODISCARD ct_status ct_comm_follow(ct_comm *comm, void *stream, ct_error *err);

/* Gives every rank `bytes` > 0 of zeroed, page-aligned host memory that is best for
 * what it hands to collectives: ranks of one machine read each other's where it lies,
 * as long as the whole span is in it. A collective like the others, with equal bytes on
 * every rank. It may be used for anything, outlives the communicator, and is released
 * with ct_pages_free. CT_EINVAL, CT_ENOMEM, CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory,
                                      ct_error *err);

/* Makes a smaller group of the ranks that give the same color, in the order of their
 * keys, and of their ranks where these are equal. A collective of the whole group; a
 * rank whose color is below 0 gets NULL and no error. The new group stands by itself
 * and has the same backend and time-out (one rank alone: ct_comm_self). CT_EINVAL where
 * the backend has no smaller groups, CT_ENOMEM, CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_split(ct_comm *comm, int64_t color, int64_t key,
                                     ct_comm **made, ct_error *err);

/* "all_reduce", ... */
const char *ct_collective_name(ct_collective what);

/* What a request says, for messages to those whose ranks ask for different things:
 * "all_reduce of 3 float32 to 0 (max, root 0)". */
typedef struct ct_description {
    char text[96];
} ct_description;

/* CT_EINVAL, saying who called what, unless all ranks, whose requests at() finds, ask
 * for the same: of two that differ one is what most ranks ask for. */
typedef const ct_request *ct_request_at(const void *group, int rank);
CT_NODISCARD ct_status ct_requests_compare(ct_request_at *at, const void *group,
                                           int world_size, const ct_rank_names *names,
                                           ct_error *err);

/* The same for ranks that do not see each other's requests: they are gathered over
 * `comm`, whose ranks are those that are to ask for the same. */
CT_NODISCARD ct_status ct_requests_exchange(ct_comm *comm, const ct_request *own,
                                            ct_error *err);

/* Names a label; a tag depends on the name and on `shape`, which is to differ between
 * things that may have one name. */
void ct_label_set(ct_label *label, const char *name, uint64_t shape);

/* The request with what the communicator's collectives are for. */
ct_request ct_request_labelled(const ct_comm *comm, const ct_request *request);

/* CT_EINVAL unless the lengths, dtypes and the root fit a group of world_size ranks. To
 * be called when the ranks are known to ask for the same, so that all are rejected. */
CT_NODISCARD ct_status ct_request_check(const ct_request *request, int world_size,
                                        ct_error *err);

/* A group of one rank; NULL when out of memory. Release with comm->ops->free. */
ct_comm *ct_comm_self_new(void);

#ifdef __cplusplus
}
#endif

#endif
