#include "core/ct_exchange.h"

#include "core/ct_alloc.h"
#include "core/ct_exchange_slots.h"

#include <stdint.h>

static uint32_t
count_pieces(const ct_transfer *t)
{
    return t->part == 0 ? 1 : (uint32_t)((t->part + t->piece - 1) / t->piece);
}

/* What the rank's first note says of where its data lies; NULL: in the slots. */
static char *
located(const ct_exchange *self, int rank)
{
    return ct_lanes_at(&self->lanes, rank, ct_slot_note(self, rank, self->done)->place);
}

/* ---- giving ------------------------------------------------------------------------
 */

static bool
gives(const ct_exchange *self, const ct_transfer *t)
{
    return t->sink != CT_SINK_COPY || self->rank == t->request->root;
}

/* Others may not read what is being reduced, unless each reduces a share for all. */
static bool
may_be_read_alone(const ct_transfer *t)
{
    return t->each_own || t->sink != CT_SINK_REDUCE;
}

static void
write_note(const ct_exchange *self, const ct_transfer *t, ct_note *n)
{
    const size_t parts = t->each_own ? (size_t)self->world_size : 1;
    const size_t given = parts * t->part < t->total ? parts * t->part : t->total;
    *n = (ct_note){
        .request = *t->request, .place = {-1, 0}
    };
    if (gives(self, t)) {
        n->place = ct_lanes_find(&self->lanes, t->from, given * t->item);
    }
}

static ct_status
give(const ct_exchange *self, const ct_transfer *t, uint32_t index, ct_error *err)
{
    const int rank = self->rank;
    const uint32_t piece = self->done + index;
    const bool in_place = index != 0 && self->direct[rank] != NULL;
    if (!in_place) {
        ct_status status = ct_crew_wait(self->crew, CT_CREW_USED, piece + 1 - CT_SLOTS,
                                        ct_collective_name(t->request->what), err);
        if (status != CT_OK) {
            return status;
        }
    }
    if (index == 0) {
        write_note(self, t, ct_slot_note(self, rank, piece));
        self->direct[rank] = may_be_read_alone(t) ? located(self, rank) : NULL;
    }
    if (self->direct[rank] == NULL && gives(self, t)) {
        ct_slot_fill(self, t, piece, index * t->piece);
    }
    ct_crew_raise(self->crew, CT_CREW_MADE, piece + 1);
    return CT_OK;
}

/* ---- an exchange -------------------------------------------------------------------
 */

/* The same on every rank: all compare with rank 0. */
static ct_status
check_alike(const ct_exchange *self, ct_error *err)
{
    const ct_request *first = &ct_slot_note(self, 0, self->done)->request;
    for (int rank = 1; rank < self->world_size; rank++) {
        const ct_request *other = &ct_slot_note(self, rank, self->done)->request;
        if (!ct_request_is_like(first, other)) {
            return ct_fail(err, CT_EINVAL,
                           "all ranks must call the same: rank 0 called %s, rank %d %s",
                           ct_request_describe(first).text, rank,
                           ct_request_describe(other).text);
        }
    }
    return CT_OK;
}

/* Finds what is given in lanes; true when all of it is. */
static bool
find_direct(ct_exchange *self, const ct_transfer *t)
{
    bool all = t->part != 0;
    for (int rank = 0; rank < self->world_size; rank++) {
        self->direct[rank] = located(self, rank);
        const bool gives_it = t->sink != CT_SINK_COPY || rank == t->request->root;
        all = all && (self->direct[rank] != NULL || !gives_it);
    }
    for (int rank = 0; !all && !may_be_read_alone(t) && rank < self->world_size;
         rank++) {
        self->direct[rank] = NULL;
    }
    return all;
}

static ct_status
take_when_made(ct_exchange *self, const ct_transfer *t, uint32_t index, ct_error *err)
{
    const uint32_t piece = self->done + index;
    ct_status status = ct_crew_wait(self->crew, CT_CREW_MADE, piece + 1,
                                    ct_collective_name(t->request->what), err);
    if (status == CT_OK) {
        ct_slots_take(self, t, piece, index * t->piece);
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

/* The first slots say what each rank wants; nobody goes on before all have compared. */
static ct_status
meet(ct_exchange *self, const ct_transfer *t, ct_error *err)
{
    const char *what = ct_collective_name(t->request->what);
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
    status = check_alike(self, err);
    if (status == CT_OK) {
        status = ct_request_check(t->request, self->world_size, err);
    }
    if (status != CT_OK) {
        ct_crew_raise(self->crew, CT_CREW_USED, ++self->done);
    }
    return status;
}

static ct_status
move_in_place(ct_exchange *self, ct_transfer *t, ct_error *err)
{
    if (t->request->what == CT_ALL_REDUCE && t->sink == CT_SINK_REDUCE) {
        ct_lanes_reduce(self, t->request);
    }
    else {
        t->piece = t->part;
        ct_slots_take(self, t, self->done, 0);
    }
    ct_crew_raise(self->crew, CT_CREW_USED, self->done + 1);
    return finish(self, t, 1, err);
}

static ct_status
move_in_pieces(ct_exchange *self, const ct_transfer *t, ct_error *err)
{
    const uint32_t pieces = count_pieces(t);
    ct_status status = CT_OK;
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

static ct_status
transfer(ct_exchange *self, const ct_transfer *wanted, bool *in_place, ct_error *err)
{
    ct_transfer t = *wanted;
    if (ct_request_check(t.request, self->world_size, NULL) != CT_OK) {
        t.part = t.total = 0;
    }
    t.piece = ct_slot_length(self, &t);
    ct_status status = meet(self, &t, err);
    if (status != CT_OK) {
        return status;
    }
    *in_place = find_direct(self, &t);
    return *in_place ? move_in_place(self, &t, err) : move_in_pieces(self, &t, err);
}

ct_status
ct_exchange_run(ct_exchange *self, const ct_transfer *wanted, bool *in_place,
                ct_error *err)
{
    bool is_in_place = false;
    if (__atomic_exchange_n(&self->busy, true, __ATOMIC_ACQUIRE)) {
        return ct_fail(err, CT_EINVAL,
                       "%s while another thread of rank %d is in a collective of the "
                       "same group",
                       ct_collective_name(wanted->request->what), self->rank);
    }
    const ct_status status = transfer(self, wanted, &is_in_place, err);
    __atomic_store_n(&self->busy, false, __ATOMIC_RELEASE);
    if (in_place != NULL) {
        *in_place = is_in_place;
    }
    return status;
}

/* ---- beginning and end -------------------------------------------------------------
 */

size_t
ct_exchange_bytes(int world_size)
{
    return ct_crew_bytes(world_size) + ct_slots_bytes(world_size);
}

ct_status
ct_exchange_init(ct_exchange *self, const ct_segment *segment, int rank, int world_size,
                 double timeout_seconds, ct_error *err)
{
    ct_exchange made = {.segment = segment, .rank = rank, .world_size = world_size};
    made.rows = (const void **)ct_calloc((size_t)world_size, sizeof *made.rows);
    made.direct = (char **)ct_calloc((size_t)world_size, sizeof *made.direct);
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

void
ct_exchange_fini(ct_exchange *self)
{
    ct_crew_leave(self->crew);
    ct_lanes_fini(&self->lanes);
    ct_free((void *)self->rows);
    ct_free((void *)self->direct);
    *self = (ct_exchange){0};
}
