#include "core/bmuf/bmuf_pass.h"

typedef ct_bmuf_batch batch;

static void *
share_at(const batch *s, const ct_bmuf_piece *piece)
{
    return (char *)s->shares + (piece->at - s->start) * ct_dtype_size(s->dtype);
}

/* The batch's shares are in memory of our own. */
ct_status
ct_bmuf_reserve_shares(ct_bmuf *b, batch *s, ct_error *err)
{
    ct_status status =
        b->device->scratch_grow(&b->shares, s->n * ct_dtype_size(s->dtype), err);
    s->shares = b->shares.data;
    return status;
}

static ct_status
run_rule(ct_bmuf *b, ct_rule rule, const ct_rule_coef *coef, const batch *s,
         ct_error *err)
{
    const ct_update update = {
        .rule = rule, .coefs = coef, .spans = b->spans, .n_spans = s->n_pieces};
    return b->device->update(b->stream, &update, err);
}

ct_status
ct_bmuf_fill_shares(ct_bmuf *b, ct_rule rule, int world_size, const batch *s,
                    ct_error *err)
{
    ct_rule_coef coef;
    coef.block_share = ct_block_share_of(world_size);
    for (size_t i = 0; i < s->n_pieces; i++) {
        const ct_bmuf_piece *piece = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = piece->span.n,
            .grad = piece->span.data,
            .param = share_at(s, piece),
            .dtype = s->dtype,
            .grad_dtype = piece->span.dtype,
            .state_dtype = s->dtype,
        };
        if (rule == CT_RULE_block_delta) {
            b->spans[i].state[0] = ct_bmuf_flat_at(&b->global, s->dtype, piece->at);
        }
    }
    return run_rule(b, rule, &coef, s, err);
}

ct_status
ct_bmuf_move_model(ct_bmuf *b, const ct_bmuf_config *config, const batch *s,
                   ct_error *err)
{
    ct_rule_coef coef;
    coef.block_momentum = (ct_block_momentum_coef){
        .momentum = config->momentum,
        .lr = config->lr,
        .reach = config->reach,
        .look = (int)config->look,
    };
    for (size_t i = 0; i < s->n_pieces; i++) {
        const ct_bmuf_piece *piece = &b->pieces[i];
        b->spans[i] = (ct_update_span){
            .n = piece->span.n,
            .grad = share_at(s, piece),
            .param = piece->span.data,
            .state = {ct_bmuf_flat_at(&b->global, s->dtype, piece->at),
                      ct_bmuf_flat_at(&b->momentum, s->dtype, piece->at),
                      b->is_away ? ct_bmuf_flat_at(&b->left, s->dtype, piece->at)
                                 : NULL},
            .copy = piece->copy.data,
            .dtype = piece->span.dtype,
            .grad_dtype = s->dtype,
            .state_dtype = s->dtype,
            .copy_dtype = piece->copy.dtype,
        };
    }
    return run_rule(b, b->is_away ? CT_RULE_block_rejoin : CT_RULE_block_momentum,
                    &coef, s, err);
}

/* The parameters of the batch, to shares or from them; copies follow. */
ct_status
ct_bmuf_copy_params(ct_bmuf *b, const batch *s, bool from_shares, ct_error *err)
{
    size_t n_copies = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        ct_span share = b->pieces[i].span;
        share.data = share_at(s, &b->pieces[i]);
        share.dtype = s->dtype;
        b->to[i] = from_shares ? b->pieces[i].span : share;
        b->from[i] = from_shares ? share : b->pieces[i].span;
    }
    ct_status status = b->device->copy(b->stream, b->to, b->from, s->n_pieces, err);
    for (size_t i = 0; from_shares && i < s->n_pieces; i++) {
        if (b->pieces[i].copy.data != NULL) {
            b->to[n_copies] = b->pieces[i].copy;
            b->from[n_copies++] = b->pieces[i].span;
        }
    }
    return status == CT_OK ? b->device->copy(b->stream, b->to, b->from, n_copies, err)
                           : status;
}
