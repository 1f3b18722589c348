/* An all_reduce over two levels: a share for each of the machine's ranks, reduced in
 * the machine, across machines, and handed round in the machine.
 *
 * A group's collectives have to be called in one order by all of its ranks, whatever
 * each has come to meanwhile. So a step is taken when another collective is started or
 * waited for, never because something has arrived: a start begins the first step and
 * sends those before it across, a wait does the rest. */
#include "core/base/alloc.h"
#include "core/comm/hierarchical.h"

enum {
    SHORT_BYTES = 4 << 10 /* from here on bytes cost more than the number of messages */
};

typedef enum stage {
    WITHIN,
    ACROSS,
    ENDED
} stage;

struct ct_work {
    ct_request request; /* an all_reduce */
    ct_span even, rest; /* what falls into equal shares, and the elements behind it */
    ct_span share;      /* this rank's, in memory of its own */
    void *memory;
    size_t room;
    ct_work *step; /* the level's, under way */
    stage stage;
    bool under_way; /* in the group's list */
    ct_status status;
    ct_error error;
    ct_work *next;
};

/* ---- works and their memory --------------------------------------------------------
 */

static ct_work *
take_spare(ct_levels *self)
{
    ct_work *w = self->spare;
    if (w == NULL) {
        return ct_calloc(1, sizeof *w);
    }
    self->spare = w->next;
    *w = (ct_work){.memory = w->memory, .room = w->room};
    return w;
}

static void
give_back(ct_levels *self, ct_work *w)
{
    w->next = self->spare;
    self->spare = w;
}

void
ct_levels_free_works(ct_levels *self)
{
    while (self->spare != NULL) {
        ct_work *w = self->spare;
        self->spare = w->next;
        ct_free(w->memory);
        ct_free(w);
    }
}

static void
append(ct_levels *self, ct_work *w)
{
    if (self->first == NULL) {
        self->first = w;
    }
    else {
        self->last->next = w;
    }
    self->last = w;
    w->under_way = true;
}

static ct_status
divide(const ct_levels *self, ct_work *w, const ct_request *request, ct_error *err)
{
    const ct_span *span = &request->in;
    const size_t ranks = (size_t)self->inner->world_size;
    const size_t share = span->n / ranks, even = share * ranks;
    ct_status status =
        ct_grow(&w->memory, &w->room, share * ct_dtype_size(span->dtype), 1, err);
    w->request = *request;
    w->even = ct_levels_part(span, 0, even);
    w->rest = ct_levels_part(span, even, span->n - even);
    w->share = (ct_span){w->memory, share, span->dtype};
    return status;
}

/* ---- steps -------------------------------------------------------------------------
 */

static const char name[] = "all_reduce";

static ct_status
start_within(const ct_levels *self, ct_work *w, ct_error *err)
{
    const ct_request r = {
        .what = CT_REDUCE_SCATTER, .op = w->request.op, .in = w->even, .out = w->share};
    self->inner->label = self->base.label;
    const ct_status status = ct_comm_start(self->inner, &r, &w->step, err);
    self->inner->label = NULL;
    return ct_levels_say(self, name, "within its machine", status, err);
}

static void
send_across(const ct_levels *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = w->request.op, .in = w->share};
    w->status = ct_levels_say(self, name, "within its machine",
                              ct_comm_wait(self->inner, w->step, &w->error), &w->error);
    w->step = NULL;
    if (w->status == CT_OK) {
        w->status = ct_levels_say(self, name, "across machines",
                                  ct_comm_start(self->outer, &r, &w->step, &w->error),
                                  &w->error);
    }
    w->stage = w->status == CT_OK ? ACROSS : ENDED;
}

/* Everything that is still within its machine, in order. */
static void
send_all_across(const ct_levels *self)
{
    for (ct_work *w = self->first; w != NULL; w = w->next) {
        if (w->stage == WITHIN) {
            send_across(self, w);
        }
    }
}

static void
hand_round(ct_levels *self, ct_work *w)
{
    const ct_request r = {.what = CT_ALL_GATHER, .in = w->share, .out = w->even};
    w->status = ct_levels_say(self, name, "across machines",
                              ct_comm_wait(self->outer, w->step, &w->error), &w->error);
    if (w->status == CT_OK) {
        w->status = ct_levels_within(self, name, &r, &w->error);
    }
    if (w->status == CT_OK && w->rest.n != 0) {
        w->status = ct_levels_reduce_gathered(self, &w->rest, w->request.op, &w->error);
    }
    w->stage = ENDED;
}

/* Ends the first of those under way. */
static void
end_first(ct_levels *self)
{
    ct_work *w = self->first;
    if (w->stage == ACROSS) {
        hand_round(self, w);
    }
    self->first = w->next;
    w->under_way = false;
}

/* ---- entries -----------------------------------------------------------------------
 */

static bool
goes_by_shares(const ct_request *r)
{
    return r->what == CT_ALL_REDUCE &&
           r->in.n * ct_dtype_size(r->in.dtype) > SHORT_BYTES &&
           (r->op != CT_REDUCE_MEAN || ct_dtype_is_float(r->in.dtype));
}

/* NULL, with *status and *err, on failure. */
static ct_work *
begin(ct_levels *self, const ct_request *request, ct_status *status, ct_error *err)
{
    ct_work *w = take_spare(self);
    if (w == NULL) {
        *status = ct_fail(err, CT_ENOMEM, "no memory to begin an all_reduce");
        return NULL;
    }
    *status = divide(self, w, request, err);
    if (*status == CT_OK) {
        *status = start_within(self, w, err);
    }
    if (*status != CT_OK) {
        give_back(self, w);
        return NULL;
    }
    send_all_across(self);
    append(self, w);
    return w;
}

static ct_status
end(ct_levels *self, ct_work *w, ct_error *err)
{
    send_all_across(self);
    while (w->under_way) {
        end_first(self);
    }
    const ct_status status = w->status;
    if (status != CT_OK && err != NULL) {
        *err = w->error;
    }
    give_back(self, w);
    return status;
}

ct_status
ct_levels_start(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    ct_status status = CT_OK;
    if (!goes_by_shares(request)) {
        return ct_comm_run(comm, request, err);
    }
    status = ct_levels_compare((ct_levels *)comm, request, err);
    if (status != CT_OK) {
        return status;
    }
    *work = begin((ct_levels *)comm, request, &status, err);
    return status;
}

ct_status
ct_levels_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    return end((ct_levels *)comm, work, err);
}

ct_status
ct_levels_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = op, .in = *span};
    ct_levels *self = (ct_levels *)comm;
    ct_status status = ct_levels_compare(self, &r, err);
    if (status != CT_OK) {
        return status;
    }
    if (!goes_by_shares(&r)) {
        return ct_levels_reduce_gathered(self, span, op, err);
    }
    ct_work *work = begin(self, &r, &status, err);
    return work != NULL ? end(self, work, err) : status;
}
