/* Passes over a batch of a list's tensors, whose pieces are in bmuf->pieces. */
#ifndef CT_BMUF_PASS_H
#define CT_BMUF_PASS_H

#include "core/bmuf/bmuf_batch.h"

/* Gives the batch memory of bmuf's own for its shares. */
CT_NODISCARD ct_status ct_bmuf_reserve_shares(ct_bmuf *bmuf, ct_bmuf_batch *batch,
                                              ct_error *err);

static inline ct_span
ct_bmuf_shares(const ct_bmuf_batch *batch)
{
    return (ct_span){.data = batch->shares, .n = batch->n, .dtype = batch->dtype};
}

/* The batch's shares of an average over the ranks: by CT_RULE_block_share of the
 * parameters, by CT_RULE_block_delta of their distance from the global model. */
CT_NODISCARD ct_status ct_bmuf_fill_shares(ct_bmuf *bmuf, ct_rule rule, int world_size,
                                           const ct_bmuf_batch *batch, ct_error *err);

/* Momentum, global model and parameters by the average distance in the shares; of a
 * block that is away the parameters keep what they have learnt since. */
CT_NODISCARD ct_status ct_bmuf_move_model(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                          const ct_bmuf_batch *batch, ct_error *err);

/* The parameters of the batch, to shares or from them; copies follow. */
CT_NODISCARD ct_status ct_bmuf_copy_params(ct_bmuf *bmuf, const ct_bmuf_batch *batch,
                                           bool from_shares, ct_error *err);

#endif
