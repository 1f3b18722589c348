#include "core/optim/optim_muon.h"

#include "core/optim/optim_parts.h"
#include "core/optim/orthogonal.h"

ct_dtype
ct_optim_muon_dtype(const ct_update_span *span)
{
    const ct_dtype real = ct_update_real(span);
    return real == CT_F64 ? CT_F64 : CT_BF16;
}

static ct_orthogonal
orthogonal_of(const ct_optim_share *share, size_t i)
{
    const ct_update_span *span = &share->spans[i];
    const ct_muon_coef *coef = &share->coefs[span->coef].muon;
    return (ct_orthogonal){
        .rows = span->rows,
        .cols = span->cols,
        .dtype = ct_optim_muon_dtype(span),
        .a = coef->a,
        .b = coef->b,
        .c = coef->c,
        .n_steps = coef->n_steps,
    };
}

size_t
ct_optim_muon_bytes(const ct_optim_share *share, size_t i)
{
    const ct_orthogonal o = orthogonal_of(share, i);
    return ct_orthogonal_bytes(&o);
}

ct_status
ct_optim_muon_direction(const ct_optim_share *share, void *stream, size_t i, void *to,
                        ct_error *err)
{
    ct_update_span direction = share->spans[i];
    ct_update update = share->update;
    direction.param = to;
    direction.dtype = ct_optim_muon_dtype(&share->spans[i]);
    direction.copy = direction.ema = NULL;
    direction.rounding = NULL;
    update.spans = &direction;
    update.n_spans = 1;
    return share->device->update(stream, &update, err);
}

ct_status
ct_optim_muon_orthogonalize(const ct_optim_share *share, void *stream, size_t i,
                            void **result, ct_error *err)
{
    ct_optim_room *room = share->room;
    const ct_orthogonal o = orthogonal_of(share, i);
    return ct_orthogonal_run(share->device, stream, &room->partial, &o,
                             room->matrices.data, result, err);
}

ct_status
ct_optim_muon_descend(const ct_optim_share *share, void *stream, size_t i,
                      void *direction, ct_error *err)
{
    ct_update_span step = share->spans[i];
    const ct_muon_coef *muon = &share->coefs[step.coef].muon;
    const double factor =
        ct_muon_rate_factor((ct_muon_adjust)muon->adjust, step.rows, step.cols);
    const ct_rule_coef coef = {
        .descend = {.decay = 1.0 - muon->lr * muon->weight_decay,
                    .step_size = muon->lr * factor}
    };
    step.grad = direction;
    step.grad_dtype = ct_optim_muon_dtype(&share->spans[i]);
    step.coef = 0;
    step.settled = NULL;
    const ct_update update = {
        .rule = CT_RULE_descend,
        .coefs = &coef,
        .spans = &step,
        .n_spans = 1,
        .ema_decay = share->update.ema_decay,
    };
    return share->device->update(stream, &update, err);
}

static ct_status
run_whole(const ct_optim_share *share, void *stream, size_t i, ct_error *err)
{
    void *direction = NULL;
    ct_status status =
        ct_optim_muon_direction(share, stream, i, share->room->matrices.data, err);
    if (status == CT_OK) {
        status = ct_optim_muon_orthogonalize(share, stream, i, &direction, err);
    }
    return status == CT_OK ? ct_optim_muon_descend(share, stream, i, direction, err)
                           : status;
}

ct_status
ct_optim_muon_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_status status = ct_optim_share_measure(share, stream, err);
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = ct_optim_muon_deal(share, stream, comm, err);
        }
        else if (comm == NULL && share->spans[i].n != 0) {
            status = run_whole(share, stream, i, err);
        }
    }
    return status;
}
