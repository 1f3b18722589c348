/* Muon's share of an update, for core/optim/run.c: momentum, then for each matrix its
 * direction, made orthogonal, then the step. */
#ifndef CT_OPTIM_MUON_H
#define CT_OPTIM_MUON_H

#include "core/optim/run.h"

/* Bytes of room->matrices that spans[i] takes. */
size_t ct_optim_muon_bytes(const ct_optim_share *share, size_t i);

/* What directions are in: bfloat16 as the original's, but float64 stays. */
ct_dtype ct_optim_muon_dtype(const ct_update_span *span);

CT_NODISCARD ct_status ct_optim_muon_run(ct_optim_share *share, void *stream,
                                         ct_error *err);

/* The three steps of one matrix or part of one, from the momentum on. */

/* The direction of what is here of spans[i], of norm 1 as a whole, at `to`. */
CT_NODISCARD ct_status ct_optim_muon_direction(const ct_optim_share *share,
                                               void *stream, size_t i, void *to,
                                               ct_error *err);
/* Makes the matrix of spans[i] at the beginning of room->matrices orthogonal; *result
 * is where in them it is then. */
CT_NODISCARD ct_status ct_optim_muon_orthogonalize(const ct_optim_share *share,
                                                   void *stream, size_t i,
                                                   void **result, ct_error *err);
/* Steps spans[i] along what is here of such a matrix. */
CT_NODISCARD ct_status ct_optim_muon_descend(const ct_optim_share *share, void *stream,
                                             size_t i, void *direction, ct_error *err);

/* core/optim/optim_muon_parts.c: these steps for the matrices of which the ranks of a group
 * have parts. Each rank makes some of them orthogonal, of which it is sent all parts
 * and sends back all. */
CT_NODISCARD ct_status ct_optim_muon_deal(ct_optim_share *share, void *stream,
                                          ct_comm *comm, ct_error *err);

#endif
