#include "core/ct_exchange.h"

#include "core/ct_alloc.h"
#include "core/ct_reduce.h"

#include <stdint.h>
#include <string.h>

enum {
    SLOTS = 4,
    SLOT_BYTES = 128 << 10, /* fits a core's cache with the slots of another rank */
    NOTE_BYTES = 256
};

/* What a rank was asked to do, and where its data is unless it is in the slots. Only
 * lengths, dtypes and the like mean something to others, not the request's pointers. */
typedef struct note {
    ct_request request;
    int lanes; /* index of the memory that holds it, or -1 */
    size_t offset;
} note;

_Static_assert(sizeof(note) <= NOTE_BYTES, "a note fits before a slot's data");

/* ---- where things are --------------------------------------------------------------
 */

static char *
slot_of(const ct_exchange *self, int rank, uint32_t piece)
{
    const size_t slot = (size_t)rank * SLOTS + piece % SLOTS;
    return (char *)self->segment->base + ct_crew_bytes(self->world_size) +
           slot * (NOTE_BYTES + SLOT_BYTES);
}

static note *
note_of(const ct_exchange *self, int rank, uint32_t piece)
{
    void *slot = slot_of(self, rank, piece);
    return slot;
}

/* Elements of each part that a slot holds. */
static size_t
piece_length(const ct_exchange *self, const ct_transfer *t)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    return SLOT_BYTES / (t->item * parts);
}

static uint32_t
count_pieces(const ct_exchange *self, const ct_transfer *t)
{
    const size_t length = piece_length(self, t);
    return t->part == 0 ? 1 : (uint32_t)((t->part + length - 1) / length);
}

/* Elements of part `index` from its element `at` on, up to a piece. */
static size_t
length_at(const ct_exchange *self, const ct_transfer *t, int index, size_t at)
{
    const size_t begin = (size_t)index * t->part + at;
    const size_t piece = piece_length(self, t);
    const size_t in_part = t->part - at < piece ? t->part - at : piece;
    const size_t left = begin < t->total ? t->total - begin : 0;
    return in_part < left ? in_part : left;
}

/* What `rank` gives to us of the elements from `at` on: its own, in its lane, or in
 * its slot. */
static const char *
given_by(const ct_exchange *self, const ct_transfer *t, int rank, uint32_t piece,
         size_t at)
{
    const size_t receiver = t->each_own ? (size_t)self->rank : 0;
    const char *whole = rank == self->rank ? t->from : self->direct[rank];
    if (whole != NULL) {
        return whole + (receiver * t->part + at) * t->item;
    }
    return slot_of(self, rank, piece) + NOTE_BYTES +
           receiver * piece_length(self, t) * t->item;
}

/* The note on a span of `bytes` at `from`. */
static void
locate(const ct_exchange *self, const char *from, size_t bytes, note *n)
{
    n->lanes = -1;
    for (size_t i = 0; i < self->n_lanes && from != NULL; i++) {
        const ct_lanes *l = &self->lanes[i];
        const uintptr_t lane =
            (uintptr_t)l->segment.base + (size_t)self->rank * l->lane_bytes;
        const size_t offset = (uintptr_t)from - lane;
        if (offset < l->lane_bytes && bytes <= l->lane_bytes - offset) {
            n->lanes = (int)i;
            n->offset = offset;
        }
    }
}

static const char *
located(const ct_exchange *self, int rank, const note *n)
{
    if (n->lanes < 0) {
        return NULL;
    }
    const ct_lanes *l = &self->lanes[n->lanes];
    return (const char *)l->segment.base + (size_t)rank * l->lane_bytes + n->offset;
}

/* ---- giving ------------------------------------------------------------------------
 */

static bool
gives(const ct_exchange *self, const ct_transfer *t)
{
    return t->sink != CT_SINK_COPY || self->rank == t->request->root;
}

static void
fill_slot(const ct_exchange *self, const ct_transfer *t, char *slot, size_t at)
{
    const int rank = self->rank;
    const size_t piece = piece_length(self, t) * t->item;
    if (!t->each_own) {
        const size_t n = length_at(self, t, rank, at);
        if (n != 0) {
            memcpy(slot, t->from + at * t->item, n * t->item);
        }
        return;
    }
    for (int other = 0; other < self->world_size; other++) {
        const size_t n = length_at(self, t, other, at);
        if (other != rank && n != 0) {
            const size_t begin = (size_t)other * t->part + at;
            memcpy(slot + (size_t)other * piece, t->from + begin * t->item,
                   n * t->item);
        }
    }
}

/* In place, others would read what is being reduced. */
static bool
may_be_read_in_place(const ct_exchange *self, const ct_transfer *t)
{
    return gives(self, t) && (t->each_own || t->sink != CT_SINK_REDUCE);
}

static void
write_note(const ct_exchange *self, const ct_transfer *t, note *n)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    const size_t given = parts * t->part < t->total ? parts * t->part : t->total;
    *n = (note){.request = *t->request, .lanes = -1};
    if (may_be_read_in_place(self, t)) {
        locate(self, t->from, given * t->item, n);
    }
}

static ct_status
give(const ct_exchange *self, const ct_transfer *t, uint32_t index, ct_error *err)
{
    const int rank = self->rank;
    const uint32_t piece = self->done + index;
    const bool in_place = index != 0 && self->direct[rank] != NULL;
    if (!in_place) {
        ct_status status = ct_crew_wait(self->crew, CT_CREW_USED, piece + 1 - SLOTS,
                                        ct_collective_name(t->request->what), err);
        if (status != CT_OK) {
            return status;
        }
    }
    if (index == 0) {
        note *n = note_of(self, rank, piece);
        write_note(self, t, n);
        self->direct[rank] = located(self, rank, n);
    }
    if (self->direct[rank] == NULL && gives(self, t)) {
        fill_slot(self, t, slot_of(self, rank, piece) + NOTE_BYTES,
                  index * piece_length(self, t));
    }
    ct_crew_raise(self->crew, CT_CREW_MADE, piece + 1);
    return CT_OK;
}

/* ---- taking ------------------------------------------------------------------------
 */

static void
copy(void *to, const void *from, size_t bytes)
{
    if (bytes != 0 && to != from) {
        memmove(to, from, bytes);
    }
}

static void
take(const ct_exchange *self, const ct_transfer *t, uint32_t index)
{
    const uint32_t piece = self->done + index;
    const size_t at = index * piece_length(self, t);
    const int ranks = self->world_size, root = t->request->root;
    const size_t own = length_at(self, t, self->rank, at);
    if (t->sink == CT_SINK_COPY && self->rank != root) {
        copy(t->to + at * t->item, given_by(self, t, root, piece, at), own * t->item);
    }
    for (int rank = 0; t->sink == CT_SINK_GATHER && rank < ranks; rank++) {
        copy(t->to + ((size_t)rank * t->part + at) * t->item,
             given_by(self, t, rank, piece, at),
             length_at(self, t, rank, at) * t->item);
    }
    if (t->sink == CT_SINK_REDUCE && own != 0) {
        for (int rank = 0; rank < ranks; rank++) {
            self->rows[rank] = given_by(self, t, rank, piece, at);
        }
        ct_reduce(t->to + at * t->item, self->rows, (size_t)ranks, own,
                  t->request->in.dtype, t->request->op);
    }
}

/* ---- an exchange -------------------------------------------------------------------
 */

/* The same on every rank: all compare with rank 0. */
static ct_status
check_alike(const ct_exchange *self, ct_error *err)
{
    const ct_request *first = &note_of(self, 0, self->done)->request;
    for (int rank = 1; rank < self->world_size; rank++) {
        const ct_request *other = &note_of(self, rank, self->done)->request;
        if (!ct_request_is_like(first, other)) {
            return ct_fail(err, CT_EINVAL,
                           "all ranks must call the same: rank 0 called %s, rank %d %s",
                           ct_request_describe(first).text, rank,
                           ct_request_describe(other).text);
        }
    }
    return CT_OK;
}

static ct_status
read_notes(ct_exchange *self, const ct_transfer *t, ct_error *err)
{
    ct_status status = check_alike(self, err);
    if (status == CT_OK) {
        status = ct_request_check(t->request, self->world_size, err);
    }
    for (int rank = 0; status == CT_OK && rank < self->world_size; rank++) {
        self->direct[rank] = located(self, rank, note_of(self, rank, self->done));
    }
    return status;
}

static ct_status
take_when_made(ct_exchange *self, const ct_transfer *t, uint32_t index, ct_error *err)
{
    const uint32_t piece = self->done + index;
    ct_status status = ct_crew_wait(self->crew, CT_CREW_MADE, piece + 1,
                                    ct_collective_name(t->request->what), err);
    if (status == CT_OK) {
        take(self, t, index);
        ct_crew_raise(self->crew, CT_CREW_USED, piece + 1);
    }
    return status;
}

/* Ends the exchange after `pieces`; who was read in place waits for the readers. */
static ct_status
finish(ct_exchange *self, const ct_transfer *t, uint32_t pieces, ct_error *err)
{
    self->done += pieces;
    if (self->direct[self->rank] == NULL) {
        return CT_OK;
    }
    return ct_crew_wait(self->crew, CT_CREW_USED, self->done,
                        ct_collective_name(t->request->what), err);
}

static ct_status
transfer(ct_exchange *self, const ct_transfer *wanted, ct_error *err)
{
    ct_transfer fitting = *wanted;
    const ct_transfer *t = &fitting;
    if (ct_request_check(t->request, self->world_size, NULL) != CT_OK) {
        fitting.part = fitting.total = 0;
    }
    const char *what = ct_collective_name(t->request->what);
    const uint32_t pieces = count_pieces(self, t);
    ct_status status = ct_crew_check(self->crew, what, err);
    if (status == CT_OK) {
        status = give(self, t, 0, err);
    }
    if (status == CT_OK) {
        status = ct_crew_wait(self->crew, CT_CREW_MADE, self->done + 1, what, err);
    }
    if (status != CT_OK) {
        return status;
    }
    status = read_notes(self, t, err);
    if (status != CT_OK) {
        ct_crew_raise(self->crew, CT_CREW_USED, ++self->done);
        return status;
    }
    for (uint32_t index = 0; status == CT_OK && index < pieces; index++) {
        if (index + 1 < pieces) {
            status = give(self, t, index + 1, err);
        }
        if (status == CT_OK) {
            status = take_when_made(self, t, index, err);
        }
    }
    return status == CT_OK ? finish(self, t, pieces, err) : status;
}

ct_status
ct_exchange_run(ct_exchange *self, const ct_transfer *wanted, ct_error *err)
{
    if (__atomic_exchange_n(&self->busy, true, __ATOMIC_ACQUIRE)) {
        return ct_fail(err, CT_EINVAL,
                       "%s while another thread of rank %d is in a collective of the "
                       "same group",
                       ct_collective_name(wanted->request->what), self->rank);
    }
    const ct_status status = transfer(self, wanted, err);
    __atomic_store_n(&self->busy, false, __ATOMIC_RELEASE);
    return status;
}

/* ---- beginning and end -------------------------------------------------------------
 */

size_t
ct_exchange_bytes(int world_size)
{
    return ct_crew_bytes(world_size) +
           (size_t)world_size * SLOTS * ((size_t)NOTE_BYTES + SLOT_BYTES);
}

ct_status
ct_exchange_init(ct_exchange *self, const ct_segment *segment, int rank, int world_size,
                 double timeout_seconds, ct_error *err)
{
    ct_exchange made = {.segment = segment, .rank = rank, .world_size = world_size};
    made.rows = (const void **)ct_calloc((size_t)world_size, sizeof *made.rows);
    made.direct = (const char **)ct_calloc((size_t)world_size, sizeof *made.direct);
    ct_status status = CT_OK;
    if (made.rows == NULL || made.direct == NULL) {
        status =
            ct_fail(err, CT_ENOMEM, "no memory for a group of %d ranks", world_size);
    }
    if (status == CT_OK) {
        status =
            ct_crew_join(&made.crew, segment, rank, world_size, timeout_seconds, err);
    }
    if (status != CT_OK) {
        ct_exchange_fini(&made);
        return status;
    }
    *self = made;
    return CT_OK;
}

ct_status
ct_exchange_reserve(ct_exchange *self, ct_error *err)
{
    return ct_grow((void **)&self->lanes, &self->room, self->n_lanes + 1,
                   sizeof *self->lanes, err);
}

void
ct_exchange_add(ct_exchange *self, const ct_lanes *lanes)
{
    self->lanes[self->n_lanes++] = *lanes;
}

void
ct_exchange_fini(ct_exchange *self)
{
    ct_crew_leave(self->crew);
    for (size_t i = 0; i < self->n_lanes; i++) {
        ct_segment_leave(&self->lanes[i].segment);
    }
    ct_free(self->lanes);
    ct_free((void *)self->rows);
    ct_free((void *)self->direct);
    *self = (ct_exchange){0};
}
