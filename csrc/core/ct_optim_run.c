#include "core/ct_optim_run.h"

#include "core/ct_alloc.h"
#include "core/ct_optim_kind.h"
#include "core/ct_orthogonal.h"

#include <math.h>

/* ---- room --------------------------------------------------------------------------
 */

void
ct_optim_room_fini(const ct_device *device, ct_optim_room *room)
{
    device->scratch_release(&room->partial);
    device->scratch_release(&room->settled);
    device->scratch_release(&room->factors);
    device->scratch_release(&room->matrices);
    device->scratch_release(&room->sum_sq);
    ct_free(room->list);
}

ct_status
ct_optim_room_reserve(ct_optim_room *room, size_t n, ct_error *err)
{
    _Static_assert(sizeof(ct_factored) >= 2 * sizeof(ct_span), "two lists of spans");
    return ct_grow(&room->list, &room->list_capacity, n, sizeof(ct_factored), err);
}

static bool
is_adafactor(ct_rule rule)
{
    return rule == CT_RULE_adafactor || rule == CT_RULE_adafactor_momentum;
}

static size_t
matrices_of(const ct_update_span *span)
{
    return span->n / (span->rows * span->cols);
}

static bool
is_factored(const ct_optim_share *share, size_t i)
{
    const ct_update_span *span = &share->spans[i];
    return span->n != 0 && share->coefs[span->coef].adafactor.factored;
}

/* Both factors of one span, those of the columns behind those of the rows. */
static size_t
factor_bytes(const ct_update_span *span)
{
    return matrices_of(span) * (span->rows + span->cols) *
           ct_dtype_size(ct_update_real(span));
}

/* What Newton-Schulz runs in: bfloat16 as the original's, but float64 stays. */
static ct_dtype
muon_dtype(const ct_update_span *span)
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
        .dtype = muon_dtype(span),
        .a = coef->a,
        .b = coef->b,
        .c = coef->c,
        .n_steps = coef->n_steps,
    };
}

ct_status
ct_optim_share_prepare(const ct_optim_share *share, ct_error *err)
{
    const ct_device *device = share->device;
    const ct_rule rule = share->update.rule;
    const size_t n = share->update.n_spans;
    size_t factors = 0, matrices = 0;
    if (n == 0 || !ct_rule_is_measured(rule)) {
        return CT_OK;
    }
    for (size_t i = 0; i < n; i++) {
        if (is_adafactor(rule) && is_factored(share, i)) {
            factors += factor_bytes(&share->spans[i]);
        }
        else if (rule == CT_RULE_muon) {
            const ct_orthogonal o = orthogonal_of(share, i);
            const size_t bytes = ct_orthogonal_bytes(&o);
            matrices = bytes > matrices ? bytes : matrices;
        }
    }
    ct_optim_room *room = share->room;
    ct_status status =
        device->scratch_grow(&room->settled, n * sizeof(ct_rule_coef), err);
    if (status == CT_OK) {
        status = device->scratch_grow(&room->sum_sq, sizeof(double), err);
    }
    if (status == CT_OK) {
        status = device->scratch_grow(&room->factors, factors, err);
    }
    return status == CT_OK ? device->scratch_grow(&room->matrices, matrices, err)
                           : status;
}

/* ---- LAMB: all gradients together are clipped first --------------------------------
 */

static ct_status
lamb_clip(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_device *device = share->device;
    ct_span *grads = share->room->list;
    double *const sum_sq = share->room->sum_sq.data;
    bool wanted = false;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        grads[i] = (ct_span){span->grad, span->n, span->grad_dtype};
        wanted = wanted || share->coefs[span->coef].lamb.max_grad_norm > 0.0;
    }
    if (!wanted) {
        return CT_OK;
    }
    double sum = 0.0;
    ct_status status = device->norm(stream, &share->room->partial, 2.0, grads,
                                    share->update.n_spans, sum_sq, err);
    if (status == CT_OK) {
        status = device->read(stream, sum_sq, &sum, err);
    }
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_lamb_clip(&share->coefs[share->spans[i].coef].lamb, sqrt(sum));
    }
    return status;
}

/* ---- Adafactor ---------------------------------------------------------------------
 */

static ct_factored
factored_of(const ct_optim_share *share, size_t i, char *factors)
{
    const ct_update_span *span = &share->spans[i];
    const ct_optim_param *param = &share->params[share->owner[i]];
    const ct_adafactor_coef *coef = &share->coefs[span->coef].adafactor;
    const ct_dtype real = ct_update_real(span);
    return (ct_factored){
        .matrices = matrices_of(span),
        .rows = span->rows,
        .cols = span->cols,
        .grad = span->grad,
        .row = param->state[CT_ADAFACTOR_ROW],
        .col = param->state[CT_ADAFACTOR_COL],
        .row_factor = factors,
        .col_factor = factors + matrices_of(span) * span->rows * ct_dtype_size(real),
        .grad_dtype = span->grad_dtype,
        .state_dtype = span->state_dtype,
        .real = real,
        .grad_scale = coef->grad_scale,
        .decay = coef->beta2,
        .eps = coef->eps,
    };
}

static ct_status
adafactor_factor(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_factored *list = share->room->list;
    char *factors = share->room->factors.data;
    size_t n = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        ct_update_span *span = &share->spans[i];
        if (is_factored(share, i)) {
            list[n] = factored_of(share, i, factors);
            span->row = list[n].row_factor;
            span->col = list[n].col_factor;
            factors += factor_bytes(span);
            n++;
        }
    }
    return share->device->factor(stream, &share->room->partial, list, n, err);
}

/* The parameters' root mean squares, out of the settled constants into the state. */
static ct_status
adafactor_keep_rms(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_rule_coef *settled = share->room->settled.data;
    const size_t n = share->update.n_spans;
    ct_span *from = share->room->list, *to = from + n;
    for (size_t i = 0; i < n; i++) {
        const ct_optim_param *param = &share->params[share->owner[i]];
        char *const rms = (char *)&settled[i] + offsetof(ct_adafactor_coef, rms);
        from[i] = (ct_span){rms, share->spans[i].n != 0, CT_F64};
        to[i] = (ct_span){param->state[CT_ADAFACTOR_RMS], from[i].n,
                          ct_update_real(&share->spans[i])};
    }
    return share->device->copy(stream, to, from, n, err);
}

/* ---- Muon, one parameter after the other -------------------------------------------
 */

/* The momentum's direction, of norm 1, at the beginning of the room's matrices. */
static ct_status
muon_direction(ct_optim_share *share, void *stream, const ct_update_span *span,
               ct_error *err)
{
    ct_optim_room *room = share->room;
    ct_update_span direction = *span;
    ct_update update = share->update;
    direction.param = room->matrices.data;
    direction.dtype = muon_dtype(span);
    direction.copy = direction.ema = NULL;
    direction.rounding = NULL;
    update.spans = &direction;
    update.n_spans = 1;
    ct_status status = share->device->measure(stream, &room->partial, &update,
                                              room->settled.data, err);
    direction.settled = room->settled.data;
    return status == CT_OK ? share->device->update(stream, &update, err) : status;
}

static ct_status
muon_descend(ct_optim_share *share, void *stream, const ct_update_span *span,
             void *direction, ct_error *err)
{
    const ct_muon_coef *muon = &share->coefs[span->coef].muon;
    const double factor =
        ct_muon_rate_factor((ct_muon_adjust)muon->adjust, span->rows, span->cols);
    const ct_rule_coef coef = {
        .descend = {.decay = 1.0 - muon->lr * muon->weight_decay,
                    .step_size = muon->lr * factor}
    };
    ct_update_span step = *span;
    step.grad = direction;
    step.grad_dtype = muon_dtype(span);
    step.coef = 0;
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
muon_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        const ct_orthogonal o = orthogonal_of(share, i);
        void *direction = NULL;
        if (span->n == 0) {
            continue;
        }
        status = muon_direction(share, stream, span, err);
        if (status == CT_OK) {
            status = ct_orthogonal_run(share->device, stream, &share->room->partial, &o,
                                       share->room->matrices.data, &direction, err);
        }
        if (status == CT_OK) {
            status = muon_descend(share, stream, span, direction, err);
        }
    }
    return status;
}

/* ---- any rule ----------------------------------------------------------------------
 */

static ct_status
measured_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_rule_coef *settled = share->room->settled.data;
    ct_status status = share->device->measure(stream, &share->room->partial,
                                              &share->update, settled, err);
    for (size_t i = 0; i < share->update.n_spans; i++) {
        share->spans[i].settled = &settled[i];
    }
    if (status == CT_OK && is_adafactor(share->update.rule)) {
        status = adafactor_keep_rms(share, stream, err);
    }
    return status == CT_OK ? share->device->update(stream, &share->update, err)
                           : status;
}

ct_status
ct_optim_share_run(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_rule rule = share->update.rule;
    ct_status status = CT_OK;
    if (!ct_rule_is_measured(rule)) {
        return share->device->update(stream, &share->update, err);
    }
    if (rule == CT_RULE_muon) {
        return muon_run(share, stream, err);
    }
    if (rule == CT_RULE_lamb) {
        status = lamb_clip(share, stream, err);
    }
    else if (is_adafactor(rule)) {
        status = adafactor_factor(share, stream, err);
    }
    return status == CT_OK ? measured_run(share, stream, err) : status;
}
