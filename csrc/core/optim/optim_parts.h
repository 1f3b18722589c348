/* What ranks do together about parameters of which each has a part, for
 * core/optim/run.c. Whole parameters are passed over. */
#ifndef CT_OPTIM_PARTS_H
#define CT_OPTIM_PARTS_H

#include "core/optim/run.h"

/* The group of spans[i]; NULL where the parameter is whole. */
static inline ct_comm *
ct_optim_comm_borrow(const ct_optim_share *share, size_t i)
{
    return share->params[share->owner[i]].part.comm;
}

/* Is spans[i] the first of its group, or the first that is whole? */
bool ct_optim_is_first(const ct_optim_share *share, size_t i);

/* A part as a rank tells of it. */
typedef struct ct_optim_part {
    uint64_t owner; /* the parameter's number */
    uint64_t begin, n, whole;
} ct_optim_part;

/* All parts of one group, of n parameters. Lies in the room, up to the next call. */
typedef struct ct_optim_parts {
    size_t n;
    const size_t *spans;      /* their numbers in the share */
    const ct_optim_part *all; /* [rank][n] */
} ct_optim_parts;

static inline const ct_optim_part *
ct_optim_part_of(const ct_optim_parts *parts, size_t rank, size_t number)
{
    return &parts->all[rank * parts->n + number];
}

/* Brings together what the ranks have, a collective of the group. */
CT_NODISCARD ct_status ct_optim_parts_gather(const ct_optim_share *share, ct_comm *comm,
                                             ct_optim_parts *parts, ct_error *err);

/* CT_EINVAL, on all ranks, unless they have parts of the same parameters, which follow
 * each other in rank order and are all of them; and where the group cannot reach the
 * device's memory. Ranks with other numbers of parameters fail as the group's
 * collective does. */
CT_NODISCARD ct_status ct_optim_parts_agree(const ct_optim_share *share, ct_error *err);

/* sums[i], of CT_F64 and maybe empty, becomes what it is on all ranks of the group of
 * spans[i] together. In the device's memory; room->exchange holds as many. */
CT_NODISCARD ct_status ct_optim_parts_add(const ct_optim_share *share, void *stream,
                                          const ct_span *sums, ct_error *err);

/* A sum of one group in the device's memory becomes that of all its ranks. */
CT_NODISCARD ct_status ct_optim_sum_add(const ct_optim_share *share, void *stream,
                                        ct_comm *comm, double *sums, size_t n,
                                        ct_error *err);

#endif
