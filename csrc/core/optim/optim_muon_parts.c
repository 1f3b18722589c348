/* Matrices dealt out to the ranks that have parts of them.
 *
 * A hand is a few matrices of one dtype, which go to the ranks in turn. A rank sends
 * each rank one message: its parts of that rank's matrices, one behind the other; and
 * gets them back orthogonal. Messages are as long as the longest. All ranks know where
 * all parts lie, so they deal alike. */
#include "core/base/alloc.h"
#include "core/optim/optim_muon.h"
#include "core/optim/optim_parts.h"

enum {
    HAND_ELEMS = 1 << 22 /* a hand of more than one matrix takes no more to send */
};

typedef struct deal {
    ct_optim_share *share;
    void *stream;
    ct_comm *comm;
    ct_dtype dtype;
    ct_optim_parts parts;
    size_t *matrices; /* numbers among the parts, the costliest first */
    size_t n_matrices;
    size_t *loads;     /* elements that rank r sends rank s: [r * ranks + s] */
    size_t first, end; /* the hand: matrices[first] up to matrices[end] */
    size_t slot;       /* elements of a message */
} deal;

static size_t
ranks_of(const deal *d)
{
    return (size_t)d->comm->world_size;
}

static size_t
owner_of(const deal *d, size_t m)
{
    return (m - d->first) % ranks_of(d);
}

static size_t
part_n(const deal *d, size_t rank, size_t m)
{
    return ct_optim_part_of(&d->parts, rank, d->matrices[m])->n;
}

/* ---- which matrices ----------------------------------------------------------------
 */

static double
cost_of(const deal *d, size_t number)
{
    const ct_update_span *span = &d->share->spans[d->parts.spans[number]];
    const double rows = (double)span->rows, cols = (double)span->cols;
    return rows * cols * (rows < cols ? rows : cols);
}

/* All of the dtype, the costliest first, so that those of a hand cost about as much. */
static void
list_matrices(deal *d)
{
    d->n_matrices = 0;
    for (size_t number = 0; number < d->parts.n; number++) {
        const ct_update_span *span = &d->share->spans[d->parts.spans[number]];
        if (ct_update_whole(span) == 0 || ct_optim_muon_dtype(span) != d->dtype) {
            continue;
        }
        size_t at = d->n_matrices++;
        for (; at > 0 && cost_of(d, d->matrices[at - 1]) < cost_of(d, number); at--) {
            d->matrices[at] = d->matrices[at - 1];
        }
        d->matrices[at] = number;
    }
}

/* Adds matrix m, the next, to the loads; the longest message then. */
static size_t
load(deal *d, size_t m)
{
    const size_t ranks = ranks_of(d), owner = owner_of(d, m);
    size_t longest = d->slot;
    for (size_t rank = 0; rank < ranks; rank++) {
        size_t *const message = &d->loads[rank * ranks + owner];
        *message += part_n(d, rank, m);
        longest = *message > longest ? *message : longest;
    }
    return longest;
}

/* As many matrices from d->end on as may be sent at once. */
static void
next_hand(deal *d)
{
    const size_t ranks = ranks_of(d);
    d->first = d->end;
    d->slot = 0;
    for (size_t i = 0; i < ranks * ranks; i++) {
        d->loads[i] = 0;
    }
    for (size_t m = d->first; m < d->n_matrices; m++) {
        const size_t longest = load(d, m);
        if (m > d->first && longest * ranks > HAND_ELEMS) {
            break;
        }
        d->slot = longest;
        d->end = m + 1;
    }
}

/* ---- messages ----------------------------------------------------------------------
 */

static char *
sent(const deal *d)
{
    return d->share->room->exchange.data;
}

static char *
received(const deal *d)
{
    return sent(d) + ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
}

/* Where this rank's part of matrix m is in its message to the owner, and where in the
 * message that comes back. */
static size_t
own_place(const deal *d, size_t m)
{
    const size_t owner = owner_of(d, m);
    size_t at = owner * d->slot;
    for (size_t k = d->first + owner; k < m; k += ranks_of(d)) {
        at += part_n(d, (size_t)d->comm->rank, k);
    }
    return at * ct_dtype_size(d->dtype);
}

static ct_status
exchange(const deal *d, ct_error *err)
{
    const size_t n = ranks_of(d) * d->slot;
    const ct_span in = {sent(d), n, d->dtype}, out = {received(d), n, d->dtype};
    double first; /* to read it is to wait for the stream */
    ct_status status =
        d->share->device->read(d->stream, d->share->room->sums.data, &first, err);
    return status == CT_OK ? d->comm->ops->all_to_all(d->comm, &out, &in, err) : status;
}

/* Brings matrix m, which is this rank's, together from the messages that came, or in
 * pieces into those that go. */
static ct_status
move(const deal *d, size_t m, char *matrix, char *messages, bool together,
     ct_error *err)
{
    const size_t size = ct_dtype_size(d->dtype), ranks = ranks_of(d);
    ct_status status = CT_OK;
    for (size_t rank = 0; status == CT_OK && rank < ranks; rank++) {
        size_t at = rank * d->slot;
        for (size_t k = d->first + owner_of(d, m); k < m; k += ranks) {
            at += part_n(d, rank, k);
        }
        const ct_optim_part *part = ct_optim_part_of(&d->parts, rank, d->matrices[m]);
        const ct_span piece = {messages + at * size, part->n, d->dtype};
        const ct_span place = {matrix + part->begin * size, part->n, d->dtype};
        status = d->share->device->copy(d->stream, together ? &place : &piece,
                                        together ? &piece : &place, 1, err);
    }
    return status;
}

/* ---- a hand ------------------------------------------------------------------------
 */

static ct_status
send_directions(const deal *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        const size_t i = d->parts.spans[d->matrices[m]];
        status = ct_optim_muon_direction(d->share, d->stream, i,
                                         sent(d) + own_place(d, m), err);
    }
    return status == CT_OK ? exchange(d, err) : status;
}

static ct_status
orthogonalize_own(const deal *d, ct_error *err)
{
    void *const matrix = d->share->room->matrices.data;
    ct_status status = CT_OK;
    for (size_t m = d->first + (size_t)d->comm->rank; status == CT_OK && m < d->end;
         m += ranks_of(d)) {
        const size_t i = d->parts.spans[d->matrices[m]];
        void *result = NULL;
        status = move(d, m, matrix, received(d), true, err);
        if (status == CT_OK) {
            status = ct_optim_muon_orthogonalize(d->share, d->stream, i, &result, err);
        }
        if (status == CT_OK) {
            status = move(d, m, result, sent(d), false, err);
        }
    }
    return status == CT_OK ? exchange(d, err) : status;
}

static ct_status
descend(const deal *d, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = d->first; status == CT_OK && m < d->end; m++) {
        const size_t i = d->parts.spans[d->matrices[m]];
        status = ct_optim_muon_descend(d->share, d->stream, i,
                                       received(d) + own_place(d, m), err);
    }
    return status;
}

static ct_status
play_hand(deal *d, ct_error *err)
{
    const size_t bytes = 2 * ranks_of(d) * d->slot * ct_dtype_size(d->dtype);
    ct_status status =
        d->share->device->scratch_grow(&d->share->room->exchange, bytes, err);
    if (status == CT_OK) {
        status = send_directions(d, err);
    }
    if (status == CT_OK) {
        status = orthogonalize_own(d, err);
    }
    return status == CT_OK ? descend(d, err) : status;
}

static ct_status
deal_dtype(deal *d, ct_dtype dtype, ct_error *err)
{
    ct_status status = CT_OK;
    d->dtype = dtype;
    d->end = 0;
    list_matrices(d);
    while (status == CT_OK && d->end < d->n_matrices) {
        next_hand(d);
        status = play_hand(d, err);
    }
    return status;
}

ct_status
ct_optim_muon_deal(ct_optim_share *share, void *stream, ct_comm *comm, ct_error *err)
{
    deal d = {.share = share, .stream = stream, .comm = comm};
    const size_t ranks = ranks_of(&d);
    ct_status status = ct_optim_parts_gather(share, comm, &d.parts, err);
    if (status != CT_OK) {
        return status;
    }
    d.matrices = ct_calloc(d.parts.n + ranks * ranks, sizeof *d.matrices);
    if (d.matrices == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to deal out %zu matrices", d.parts.n);
    }
    d.loads = d.matrices + d.parts.n;
    status = deal_dtype(&d, CT_BF16, err);
    if (status == CT_OK) {
        status = deal_dtype(&d, CT_F64, err);
    }
    ct_free(d.matrices);
    return status;
}
