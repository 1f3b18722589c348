/* How the processes of a segment hand each other data: in pieces, through slots.
 *
 * For each piece a rank fills a slot with what others need, tells them, and takes from
 * their slots what it needs itself. There are a few slots, so a rank may be ahead by as
 * many pieces; it waits for a slot until all have used what was there. The first slot
 * carries what the rank was asked to do, and nobody goes on before all have compared.
 * What lies in peer buffers, memory that all can read, stays there. */
#ifndef CORE_COMM_EXCHANGE_H
#define CORE_COMM_EXCHANGE_H

#include "core/base/pages.h"
#include "core/base/segment.h"
#include "core/comm/comm.h"
#include "core/comm/process_barrier.h"

typedef struct ct_exchange {
    const ct_segment *segment; /* the caller's; begins with the barrier */
    ct_process_barrier *barrier;
    int rank, world_size;
    const ct_rank_names *names; /* the caller's */
    uint32_t done;              /* pieces of all transfers before */
    const void **rows;          /* of a reduction, by rank */
    char **direct;              /* by rank: what it gives, if it lies in peer buffers */
    ct_peer_buffers peer_buffers; /* the owner adds them, between transfers */
} ct_exchange;

/* What becomes of the parts that a rank is given. */
typedef enum ct_sink {
    CT_SINK_REDUCE, /* all ranks' parts into one */
    CT_SINK_GATHER, /* side by side, in rank order */
    CT_SINK_COPY,   /* the root's alone */
    CT_SINK_ROOT    /* all ranks' parts into one, on the root alone */
} ct_sink;

typedef enum ct_stage {
    CT_STAGE_POST, /* say what is wanted, and give the first piece */
    CT_STAGE_MEET, /* nobody goes on before all have compared */
    CT_STAGE_MOVE,
    CT_STAGE_FINISH, /* who is read in place stays for the readers */
    CT_STAGE_ENDED
} ct_stage;

/* Parts lie `part` elements apart; all have that length but the last ones of `total`
 * elements, which may be shorter or empty. */
typedef struct ct_transfer {
    const ct_request *request; /* compared with the others' */
    const char *from; /* this rank's part, or with each_own its parts for all ranks */
    char *to;
    size_t item; /* bytes of an element */
    size_t part, total;
    bool each_own;
    ct_sink sink;
    const ct_stream *stream; /* fills and uses what is reduced; or NULL */
    /* The exchange's own, all zeros at the start. */
    ct_stage stage;
    size_t piece;                  /* elements of a part at a time */
    uint32_t pieces, given, taken; /* how many there are, and how far it is */
    bool in_place;                 /* where all give lies in peer buffers */
} ct_transfer;

/* What the exchange takes of a segment, from its start. */
size_t ct_exchange_bytes(int world_size);

/* Joins the barrier; the names have to outlive it. On failure nothing is to be
 * released.
 */
CT_NODISCARD ct_status ct_exchange_init(ct_exchange *exchange,
                                        const ct_segment *segment, int rank,
                                        int world_size, const ct_rank_names *names,
                                        double timeout_seconds, ct_error *err);

/* Moves the data; every rank calls it with a like request. With `waits` it has ended
 * when this returns; without it goes as far as others let it, and to go on it is called
 * again, with no other transfer between. Failing ends it.
 *
 * All ranks are rejected alike (CT_EINVAL) or none is; of a request that is rejected
 * nothing is read. CT_ECOMM when a rank is gone or late, CT_EHOST when interrupted.
 *
 * Where what all give lies in peer buffers, it is read there, in one piece; of an
 * all_reduce then all is done, with the results written into all peer buffers. */
CT_NODISCARD ct_status ct_exchange_step(ct_exchange *exchange, ct_transfer *transfer,
                                        bool waits, ct_error *err);

/* Leaves the barrier and the peer buffers; all zeros is fine. */
void ct_exchange_fini(ct_exchange *exchange);

#endif
