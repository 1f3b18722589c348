#include "core/comm/hierarchical.h"

#include "core/base/alloc.h"
#include "core/comm/reduce.h"

#include <string.h>

/* ---- the two levels ----------------------------------------------------------------
 */

ct_status
ct_levels_say(const ct_levels *self, const char *what, const char *where,
              ct_status status, ct_error *err)
{
    char text[sizeof err->message];
    if (status == CT_OK || status == CT_EHOST || err == NULL) {
        return status;
    }
    memcpy(text, err->message, sizeof text);
    return ct_fail(err, status, "%s on rank %d of %d, %s: %s", what, self->base.rank,
                   self->base.world_size, where, text);
}

ct_status
ct_levels_compare(const ct_levels *self, const ct_request *r, ct_error *err)
{
    const ct_request own = ct_request_labelled(&self->base, r);
    return self->compares ? ct_requests_exchange(self->whole, &own, err) : CT_OK;
}

static ct_status
run_labelled(const ct_levels *self, ct_comm *level, const ct_request *r, ct_error *err)
{
    level->label = self->base.label;
    const ct_status status = ct_comm_run(level, r, err);
    level->label = NULL;
    return status;
}

ct_status
ct_levels_within(ct_levels *self, const char *what, const ct_request *r, ct_error *err)
{
    return ct_levels_say(self, what, "within its machine",
                         run_labelled(self, self->inner, r, err), err);
}

ct_status
ct_levels_across(ct_levels *self, const char *what, const ct_request *r, ct_error *err)
{
    return ct_levels_say(self, what, "across machines",
                         run_labelled(self, self->outer, r, err), err);
}

ct_status
ct_levels_make_room(ct_levels *self, size_t bytes, ct_error *err)
{
    return ct_grow(&self->scratch, &self->room, bytes, 1, err);
}

ct_span
ct_levels_part(const ct_span *span, size_t at, size_t n)
{
    const size_t offset = at * ct_dtype_size(span->dtype);
    return (ct_span){n == 0 ? span->data : (char *)span->data + offset, n, span->dtype};
}

ct_span
ct_levels_scratch(const ct_levels *self, size_t at, size_t n, ct_dtype dtype)
{
    const ct_span all = {self->scratch, at + n, dtype};
    return ct_levels_part(&all, at, n);
}

/* ---- what several collectives are made of ------------------------------------------
 */

/* Each rank fetches the parts of those with its place on the other machines; a
 * machine's parts then come together in the block of that machine. */
ct_status
ct_levels_gather(ct_levels *self, const char *what, const ct_span *out,
                 const ct_span *in, ct_error *err)
{
    const size_t machines = (size_t)self->outer->world_size;
    const size_t block = in->n * (size_t)self->inner->world_size;
    ct_status status =
        ct_levels_make_room(self, machines * in->n * ct_dtype_size(in->dtype), err);
    if (status == CT_OK) {
        const ct_request r = {
            .what = CT_ALL_GATHER,
            .in = *in,
            .out = ct_levels_scratch(self, 0, machines * in->n, in->dtype)};
        status = ct_levels_across(self, what, &r, err);
    }
    for (size_t m = 0; status == CT_OK && m < machines; m++) {
        const ct_request r = {.what = CT_ALL_GATHER,
                              .in =
                                  ct_levels_scratch(self, m * in->n, in->n, in->dtype),
                              .out = ct_levels_part(out, m * block, block)};
        status = ct_levels_within(self, what, &r, err);
    }
    return status;
}

/* Reduces rows of span->n elements, one of each rank, into the span. */
static ct_status
reduce_rows(const char *rows, size_t ranks, const ct_span *span, ct_reduce_op op,
            ct_error *err)
{
    const void **at = (const void **)ct_calloc(ranks, sizeof *at);
    if (at == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the rows of %zu ranks", ranks);
    }
    for (size_t rank = 0; rank < ranks; rank++) {
        at[rank] = rows + rank * span->n * ct_dtype_size(span->dtype);
    }
    ct_reduce(span->data, at, ranks, span->n, span->dtype, op);
    ct_free((void *)at);
    return CT_OK;
}

ct_status
ct_levels_reduce_gathered(ct_levels *self, const ct_span *span, ct_reduce_op op,
                          ct_error *err)
{
    const size_t ranks = (size_t)self->base.world_size;
    const ct_span rows = {ct_alloc(ranks * span->n * ct_dtype_size(span->dtype)),
                          ranks * span->n, span->dtype};
    if (rows.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu elements", rows.n);
    }
    ct_status status = ct_levels_gather(self, "all_reduce", &rows, span, err);
    if (status == CT_OK) {
        status = reduce_rows(rows.data, ranks, span, op, err);
    }
    ct_free(rows.data);
    return status;
}
