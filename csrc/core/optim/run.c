#include "core/optim/run.h"

#include "core/base/alloc.h"
#include "core/optim/kinds.h"
#include "core/optim/optim_muon.h"
#include "core/optim/optim_parts.h"

#include <math.h>

/* ---- room --------------------------------------------------------------------------
 */

void
ct_optim_room_fini(const ct_device *device, ct_optim_room *room)
{
    device->scratch_release(&room->partial);
    device->scratch_release(&room->sums);
    device->scratch_release(&room->settled);
    device->scratch_release(&room->factors);
    device->scratch_release(&room->factor_sums);
    device->scratch_release(&room->matrices);
    device->scratch_release(&room->exchange);
    ct_free(room->list);
    ct_free(room->places);
    ct_free(room->pairs);
    ct_free(room->described);
    ct_free(room->numbers);
}

ct_status
ct_optim_room_reserve(ct_optim_room *room, size_t n, ct_error *err)
{
    _Static_assert(sizeof(ct_factored) >= 2 * sizeof(ct_span), "two lists of spans");
    ct_status status =
        ct_grow(&room->list, &room->list_capacity, n, sizeof(ct_factored), err);
    if (status == CT_OK) {
        status =
            ct_grow(&room->places, &room->places_capacity, n, sizeof(ct_span), err);
    }
    return status == CT_OK ? ct_grow(&room->pairs, &room->pairs_capacity, n,
                                     2 * sizeof(ct_span), err)
                           : status;
}

static bool
is_adafactor(ct_rule rule)
{
    return rule == CT_RULE_adafactor || rule == CT_RULE_adafactor_momentum;
}

static size_t
matrices_of(const ct_update_span *span)
{
    return ct_update_whole(span) / (span->rows * span->cols);
}

static bool
is_factored(const ct_optim_share *share, size_t i)
{
    const ct_update_span *span = &share->spans[i];
    return ct_update_whole(span) != 0 && share->coefs[span->coef].adafactor.factored;
}

static size_t
factor_elems(const ct_update_span *span)
{
    return matrices_of(span) * (span->rows + span->cols);
}

/* Both factors of one span, those of the columns behind those of the rows. */
static size_t
factor_bytes(const ct_update_span *span)
{
    return factor_elems(span) * ct_dtype_size(ct_update_real(span));
}

/* How much of the device's memory a share takes. */
typedef struct needs {
    size_t factors, factor_sums, matrices; /* in bytes */
} needs;

static needs
needs_of(const ct_optim_share *share)
{
    needs most = {0};
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (share->update.rule == CT_RULE_muon) {
            const size_t bytes = ct_optim_muon_bytes(share, i);
            most.matrices = bytes > most.matrices ? bytes : most.matrices;
        }
        else if (is_adafactor(share->update.rule) && is_factored(share, i)) {
            most.factors += factor_bytes(span);
            most.factor_sums += factor_elems(span) * sizeof(double);
        }
    }
    return most;
}

static ct_status
reserve(const ct_optim_share *share, ct_error *err)
{
    ct_optim_room *room = share->room;
    const needs most = needs_of(share);
    const size_t sums = CT_MEASURES * share->update.n_spans * sizeof(double);
    const struct {
        ct_scratch *scratch;
        size_t bytes;
    } all[] = {
        {&room->sums,        sums                                             },
        {&room->settled,     share->update.n_spans * sizeof(ct_rule_coef)     },
        {&room->factors,     most.factors                                     },
        {&room->factor_sums, most.factor_sums                                 },
        {&room->matrices,    most.matrices                                    },
        {&room->exchange,    most.factor_sums > sums ? most.factor_sums : sums},
    };
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < sizeof all / sizeof *all; i++) {
        status = share->device->scratch_grow(all[i].scratch, all[i].bytes, err);
    }
    return status;
}

ct_status
ct_optim_share_prepare(const ct_optim_share *share, ct_error *err)
{
    if (share->update.n_spans == 0 || !ct_rule_is_measured(share->update.rule)) {
        return CT_OK;
    }
    ct_status status = reserve(share, err);
    return status == CT_OK ? ct_optim_parts_agree(share, err) : status;
}

/* ---- LAMB: all gradients together are clipped first --------------------------------
 */

/* The sum of squares of the gradients of one group, or of those that are whole. */
static ct_status
lamb_add(const ct_optim_share *share, void *stream, ct_comm *comm, double *total,
         ct_error *err)
{
    const ct_device *device = share->device;
    ct_span *grads = share->room->list;
    double *const on_device = share->room->sums.data;
    size_t n = 0;
    double sum = 0.0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (ct_optim_comm_borrow(share, i) == comm) {
            grads[n++] = (ct_span){span->grad, span->n, span->grad_dtype};
        }
    }
    ct_status status =
        device->norm(stream, &share->room->partial, 2.0, grads, n, on_device, err);
    if (status == CT_OK && comm != NULL) {
        status = ct_optim_sum_add(share, stream, comm, on_device, 1, err);
    }
    if (status == CT_OK) {
        status = device->read(stream, on_device, &sum, err);
    }
    *total += sum;
    return status;
}

static ct_status
lamb_clip(ct_optim_share *share, void *stream, ct_error *err)
{
    const size_t n = share->update.n_spans;
    double sum = 0.0;
    bool wanted = false;
    ct_status status = CT_OK;
    for (size_t i = 0; i < n; i++) {
        wanted = wanted || share->coefs[share->spans[i].coef].lamb.max_grad_norm > 0.0;
    }
    if (!wanted) {
        return CT_OK;
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        if (ct_optim_is_first(share, i)) {
            status = lamb_add(share, stream, ct_optim_comm_borrow(share, i), &sum, err);
        }
    }
    for (size_t i = 0; status == CT_OK && i < n; i++) {
        ct_lamb_clip(&share->coefs[share->spans[i].coef].lamb, sqrt(sum));
    }
    return status;
}

/* ---- Adafactor ---------------------------------------------------------------------
 */

static ct_factored
factored_of(const ct_optim_share *share, size_t i, char *factors, double *sums)
{
    const ct_update_span *span = &share->spans[i];
    const ct_optim_param *param = &share->params[share->owner[i]];
    const ct_adafactor_coef *coef = &share->coefs[span->coef].adafactor;
    const ct_dtype real = ct_update_real(span);
    return (ct_factored){
        .matrices = matrices_of(span),
        .rows = span->rows,
        .cols = span->cols,
        .begin = span->begin,
        .n = span->n,
        .grad = span->grad,
        .sums = sums,
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

/* Lists the parameters that are factored, and where their sums are, span by span. */
static size_t
adafactor_list(ct_optim_share *share, ct_factored *list, ct_span *sums)
{
    char *factors = share->room->factors.data;
    double *at = share->room->factor_sums.data;
    size_t n = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        ct_update_span *span = &share->spans[i];
        sums[i] = (ct_span){at, 0, CT_F64};
        if (is_factored(share, i)) {
            list[n] = factored_of(share, i, factors, at);
            span->row = list[n].row_factor;
            span->col = list[n].col_factor;
            sums[i].n = factor_elems(span);
            factors += factor_bytes(span);
            at += sums[i].n;
            n++;
        }
    }
    return n;
}

static ct_status
adafactor_factor(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_device *device = share->device;
    ct_factored *list = share->room->list;
    ct_span *sums = share->room->places;
    const size_t n = adafactor_list(share, list, sums);
    ct_status status = device->factor_sums(stream, &share->room->partial, list, n, err);
    if (status == CT_OK) {
        status = ct_optim_parts_add(share, stream, sums, err);
    }
    return status == CT_OK ? device->factor(stream, list, n, err) : status;
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
        from[i] = (ct_span){rms, ct_update_whole(&share->spans[i]) != 0, CT_F64};
        to[i] = (ct_span){param->state[CT_ADAFACTOR_RMS], from[i].n,
                          ct_update_real(&share->spans[i])};
    }
    return share->device->copy(stream, to, from, n, err);
}

/* ---- any rule ----------------------------------------------------------------------
 */

ct_status
ct_optim_share_measure(ct_optim_share *share, void *stream, ct_error *err)
{
    const ct_device *device = share->device;
    double *const sums = share->room->sums.data;
    ct_rule_coef *const settled = share->room->settled.data;
    ct_span *const places = share->room->places;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        places[i] = (ct_span){sums + CT_MEASURES * i, CT_MEASURES, CT_F64};
        share->spans[i].settled = &settled[i];
    }
    ct_status status =
        device->measure(stream, &share->room->partial, &share->update, sums, err);
    if (status == CT_OK) {
        status = ct_optim_parts_add(share, stream, places, err);
    }
    return status == CT_OK ? device->settle(stream, &share->update, sums, settled, err)
                           : status;
}

static ct_status
measured_run(ct_optim_share *share, void *stream, ct_error *err)
{
    ct_status status = ct_optim_share_measure(share, stream, err);
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
        return ct_optim_muon_run(share, stream, err);
    }
    if (rule == CT_RULE_lamb) {
        status = lamb_clip(share, stream, err);
    }
    else if (is_adafactor(rule)) {
        status = adafactor_factor(share, stream, err);
    }
    return status == CT_OK ? measured_run(share, stream, err) : status;
}
