/* The exchange of data between the processes of a segment: in pieces, through slots.
 *
 * For each piece a rank fills a slot with data, raises a counter, and reads the other
 * ranks' slots. A rank may be ahead by as many pieces as there are slots; a slot is
 * free again when all ranks have used the piece. The first slot of a transfer also
 * carries the rank's request, and no data is used before all requests are compared.
 * Data in peer buffers, memory that all ranks can read, is read in place. */
#ifndef CORE_COMM_EXCHANGE_H
#define CORE_COMM_EXCHANGE_H

#include "core/base/pages.h"
#include "core/base/segment.h"
#include "core/comm/comm.h"

#include <stdint.h>

typedef struct ct_process_barrier ct_process_barrier; /* of the segment's processes */

typedef struct ct_exchange {
    const ct_segment *segment; /* the caller's; the barrier is at its start */
    ct_process_barrier *barrier;
    int rank, world_size;
    const ct_rank_names *names;   /* the caller's */
    uint32_t done;                /* pieces of all earlier transfers */
    const void **rows;            /* of a reduction, by rank */
    char **direct;                /* by rank: the data, if in peer buffers */
    ct_peer_buffers peer_buffers; /* added by the owner between transfers */
} ct_exchange;

/* The use of the ranks' parts. */
typedef enum ct_sink {
    CT_SINK_REDUCE, /* reduced into one */
    CT_SINK_GATHER, /* side by side, in rank order */
    CT_SINK_COPY,   /* the root's part is copied */
    CT_SINK_ROOT    /* reduced into one, on the root alone */
} ct_sink;

typedef enum ct_stage {
    CT_STAGE_POST,    /* write the request and the first piece */
    CT_STAGE_COMPARE, /* wait for all requests and compare them */
    CT_STAGE_MOVE,
    CT_STAGE_FINISH, /* a rank that is read in place waits for the readers */
    CT_STAGE_ENDED
} ct_stage;

/* Parts lie `part` elements apart and have that length, except for the last parts of
 * `total` elements, which may be shorter or empty. */
typedef struct ct_transfer {
    const ct_request *request; /* compared between ranks */
    const char *from; /* this rank's part; with each_own its parts for all ranks */
    char *to;
    size_t item; /* bytes of an element */
    size_t part, total;
    bool each_own;
    ct_sink sink;
    const ct_stream *stream; /* makes and uses the pieces of a reduction; or NULL */
    /* Progress, all zeros at the start. */
    ct_stage stage;
    size_t piece;                      /* elements of a part at a time */
    uint32_t pieces, published, taken; /* in all, written, and used */
    bool in_place;                     /* all ranks' data is in peer buffers */
} ct_transfer;

/* Bytes of the exchange at the start of a segment. */
size_t ct_exchange_bytes(int world_size);

/* Joins the barrier; the names have to outlive it. On failure there is nothing to
 * release. */
CT_NODISCARD ct_status ct_exchange_init(ct_exchange *exchange,
                                        const ct_segment *segment, int rank,
                                        int world_size, const ct_rank_names *names,
                                        double timeout_seconds, ct_error *err);

/* Moves the data; every rank calls it with a like request. With `waits` the transfer
 * has ended on return; else the transfer advances as far as the other ranks allow, and
 * the next call continues, with no other transfer in between. A failure ends the
 * transfer.
 *
 * Requests are rejected (CT_EINVAL) on all ranks or on none, before any data is read.
 * CT_ECOMM when a rank is gone or late, CT_EHOST when interrupted.
 *
 * Data of all ranks in peer buffers is read there, in a single piece; an
 * all_reduce is then complete, with the results written into all peer buffers. */
CT_NODISCARD ct_status ct_exchange_step(ct_exchange *exchange, ct_transfer *transfer,
                                        bool waits, ct_error *err);

/* Leaves the barrier and the peer buffers; all zeros is fine. */
void ct_exchange_fini(ct_exchange *exchange);

#endif
