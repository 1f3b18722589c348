#include "core/comm/exchange_slots.h"

#include "core/base/copy_far.h"
#include "core/comm/reduce.h"

#include <stdint.h>
#include <string.h>

enum {
    SLOT_BYTES = 128 << 10, /* fits a core's cache with the slots of another rank */
    NOTE_BYTES = 256
};

_Static_assert(sizeof(ct_note) <= NOTE_BYTES, "a note fits before a slot's data");

/* ---- where things are --------------------------------------------------------------
 */

size_t
ct_slots_bytes(int world_size)
{
    return (size_t)world_size * CT_SLOTS * ((size_t)NOTE_BYTES + SLOT_BYTES);
}

static char *
slot_of(const ct_exchange *self, int rank, uint32_t piece)
{
    const size_t slot = (size_t)rank * CT_SLOTS + piece % CT_SLOTS;
    return (char *)self->segment->base + ct_crew_bytes(self->world_size) +
           slot * (NOTE_BYTES + SLOT_BYTES);
}

ct_note *
ct_slot_note(const ct_exchange *self, int rank, uint32_t piece)
{
    void *slot = slot_of(self, rank, piece);
    return slot;
}

size_t
ct_slot_length(const ct_exchange *self, const ct_transfer *t)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    return SLOT_BYTES / (t->item * parts);
}

/* Elements of part `index` from its element `at` on, up to a piece. */
static size_t
length_at(const ct_transfer *t, int index, size_t at)
{
    const size_t begin = (size_t)index * t->part + at;
    const size_t in_part = t->part - at < t->piece ? t->part - at : t->piece;
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
    return slot_of(self, rank, piece) + NOTE_BYTES + receiver * t->piece * t->item;
}

/* ---- giving and taking -------------------------------------------------------------
 */

void
ct_slot_fill(const ct_exchange *self, const ct_transfer *t, uint32_t index, size_t at)
{
    char *slot = slot_of(self, self->rank, index) + NOTE_BYTES;
    const int rank = self->rank;
    const size_t piece = t->piece * t->item;
    if (!t->each_own) {
        const size_t n = length_at(t, rank, at);
        if (t->stream != NULL && n != 0) {
            t->stream->fill(t->stream->arg, at, n, slot);
        }
        else if (n != 0) {
            memcpy(slot, t->from + at * t->item, n * t->item);
        }
        return;
    }
    for (int other = 0; other < self->world_size; other++) {
        const size_t n = length_at(t, other, at);
        if (other != rank && n != 0) {
            const size_t begin = (size_t)other * t->part + at;
            memcpy(slot + (size_t)other * piece, t->from + begin * t->item,
                   n * t->item);
        }
    }
}

static bool
overlap(const void *a, const void *b, size_t bytes)
{
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return (x < y ? y - x : x - y) < bytes;
}

/* A part of a result of `whole` bytes. */
static void
copy(void *to, const void *from, size_t bytes, size_t whole)
{
    if (bytes == 0 || to == from) {
        return;
    }
    if (whole >= CT_FAR_BYTES && !overlap(to, from, bytes)) {
        ct_copy_far(to, from, bytes);
    }
    else {
        memmove(to, from, bytes);
    }
}

static void
gather(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    for (int rank = 0; rank < self->world_size; rank++) {
        copy(t->to + ((size_t)rank * t->part + at) * t->item,
             given_by(self, t, rank, piece, at), length_at(t, rank, at) * t->item,
             t->total * t->item);
    }
}

static void
reduce(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    const size_t own = length_at(t, self->rank, at);
    for (int rank = 0; rank < self->world_size; rank++) {
        self->rows[rank] = given_by(self, t, rank, piece, at);
    }
    if (t->stream != NULL && own != 0) {
        t->stream->use(t->stream->arg, at, own, self->rows);
    }
    else if (own != 0) {
        ct_reduce(t->to + at * t->item, self->rows, (size_t)self->world_size, own,
                  t->request->in.dtype, t->request->op);
    }
}

void
ct_slots_take(const ct_exchange *self, const ct_transfer *t, uint32_t piece, size_t at)
{
    const int root = t->request->root;
    switch (t->sink) {
    case CT_SINK_GATHER:
        gather(self, t, piece, at);
        return;
    case CT_SINK_REDUCE:
        reduce(self, t, piece, at);
        return;
    case CT_SINK_ROOT:
        if (self->rank == root) {
            reduce(self, t, piece, at);
        }
        return;
    case CT_SINK_COPY:
        if (self->rank != root) {
            copy(t->to + at * t->item, given_by(self, t, root, piece, at),
                 length_at(t, self->rank, at) * t->item, t->part * t->item);
        }
        return;
    }
}

void
ct_lanes_reduce(const ct_exchange *self, const ct_request *r)
{
    const size_t ranks = (size_t)self->world_size, n = r->in.n;
    const size_t item = ct_dtype_size(r->in.dtype);
    const size_t share = (n + ranks - 1) / ranks, block = SLOT_BYTES / item;
    const size_t begin = (size_t)self->rank * share;
    const size_t end = begin + share < n ? begin + share : n;
    for (size_t at = begin; at < end; at += block) {
        const size_t length = end - at < block ? end - at : block;
        char *own = self->direct[self->rank] + at * item;
        for (size_t rank = 0; rank < ranks; rank++) {
            self->rows[rank] = self->direct[rank] + at * item;
        }
        ct_reduce(own, self->rows, ranks, length, r->in.dtype, r->op);
        for (size_t rank = 0; rank < ranks; rank++) {
            copy(self->direct[rank] + at * item, own, length * item, n * item);
        }
    }
}
