/* The insides of a group over two others, for the files that implement it. */
#ifndef CT_LEVELS_H
#define CT_LEVELS_H

#include "core/comm/comm.h"

typedef struct ct_levels {
    ct_comm base; /* first: a ct_comm * of ours is a ct_levels * */
    ct_comm *inner, *outer, *whole;
    bool compares; /* all ranks' requests, over `whole`, before each collective */
    void *scratch;
    size_t room;
    ct_work *first, *last; /* all_reduces under way, in the order of their starts */
    ct_work *spare;        /* to be used again, with their memory */
} ct_levels;

/* Says in *err where a failure was: "all_reduce on rank 5 of 8, across machines: ...".
 */
ct_status ct_levels_say(const ct_levels *self, const char *what, const char *where,
                        ct_status status, ct_error *err);

/* CT_EINVAL on all ranks unless they ask for the same, where that is compared. */
CT_NODISCARD ct_status ct_levels_compare(const ct_levels *self, const ct_request *r,
                                         ct_error *err);

/* Runs a step of the collective `what` on one of the levels. */
CT_NODISCARD ct_status ct_levels_within(ct_levels *self, const char *what,
                                        const ct_request *r, ct_error *err);
CT_NODISCARD ct_status ct_levels_across(ct_levels *self, const char *what,
                                        const ct_request *r, ct_error *err);

/* n elements of the span from `at` on. */
ct_span ct_levels_part(const ct_span *span, size_t at, size_t n);

/* Makes room for as many bytes in the group's own memory; what lies there. */
CT_NODISCARD ct_status ct_levels_make_room(ct_levels *self, size_t bytes,
                                           ct_error *err);
ct_span ct_levels_scratch(const ct_levels *self, size_t at, size_t n, ct_dtype dtype);

/* all_gather, named `what` in messages. */
CT_NODISCARD ct_status ct_levels_gather(ct_levels *self, const char *what,
                                        const ct_span *out, const ct_span *in,
                                        ct_error *err);

/* all_reduce in one rounding: all ranks' elements on every rank, in their order. */
CT_NODISCARD ct_status ct_levels_reduce_gathered(ct_levels *self, const ct_span *span,
                                                 ct_reduce_op op, ct_error *err);

/* core/comm/levels_reduce.c, entries of the table: an all_reduce of shares works while the
 * caller does; other requests have ended when they have been started. */
ct_status ct_levels_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op,
                               ct_error *err);
ct_status ct_levels_start(ct_comm *comm, const ct_request *request, ct_work **work,
                          ct_error *err);
ct_status ct_levels_wait(ct_comm *comm, ct_work *work, ct_error *err);
void ct_levels_free_works(ct_levels *self); /* none is under way */

#endif
