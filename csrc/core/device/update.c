/* Checks of updates, for the kernels of every device.
 *
 * A GPU's kernel has no way to report a bad operand, and part of an update cannot be
 * taken back: every span is checked on the host before the first kernel is enqueued. */
#include "core/device/update.h"

#include "math/compact.h"

static const struct {
    const char *name;
    size_t n_states;
} rules[CT_RULE_COUNT] = {
#define CT_RULE(rule, constants, n_states) {#rule, n_states},
#include "math/rules.def"
#undef CT_RULE
};

size_t
ct_rule_n_states(ct_rule rule)
{
    return rules[rule].n_states;
}

/* Messages say which array: one span has up to five with dtypes of their own. */
static ct_status
check_dtype(const ct_update *update, size_t i, const char *array, ct_dtype dtype,
            ct_error *err)
{
    return ct_dtype_is_float(dtype)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "%s: span %zu has %s of %s, and only float dtypes work",
                         rules[update->rule].name, i, array, ct_dtype_name(dtype));
}

static bool
can_be_compact(ct_rule rule)
{
    switch (rule) {
#define CT_COMPACT(rule, n_states) case CT_RULE_##rule:
#include "math/compact.def"
#undef CT_COMPACT
        return true;
    default:
        return false;
    }
}

/* State of I8, and a correction, which needs that. */
static ct_status
check_compact(const ct_update *update, size_t i, ct_error *err)
{
    const ct_update_span *span = &update->spans[i];
    const char *rule = rules[update->rule].name;
    if (!can_be_compact(update->rule) || span->dtype == CT_F64 || span->row != NULL) {
        return ct_fail(err, CT_EINVAL,
                       "%s: span %zu has compact state, which this rule cannot have "
                       "beside parameters of %s",
                       rule, i, ct_dtype_name(span->dtype));
    }
    if (span->correction != NULL &&
        (span->dtype != CT_BF16 || span->rounding != NULL)) {
        return ct_fail(err, CT_EINVAL,
                       "%s: span %zu has corrections, which need parameters of "
                       "bfloat16, rounded to nearest",
                       rule, i);
    }
    if (span->state_dtype != CT_I8) {
        return ct_fail(err, CT_EINVAL,
                       "%s: span %zu has corrections, which need compact state", rule,
                       i);
    }
    for (size_t k = 0; span->n != 0 && k < ct_rule_n_states(update->rule); k++) {
        if (span->quant[k].scales == NULL) {
            return ct_fail(err, CT_EINVAL,
                           "%s: span %zu lacks the scales of state array %zu, which is "
                           "compact",
                           rule, i, k);
        }
    }
    return CT_OK;
}

/* A float dtype; or quantized, of rules that look at one element after the other. */
static ct_status
check_state(const ct_update *update, size_t i, ct_error *err)
{
    const ct_update_span *span = &update->spans[i];
    const char *rule = rules[update->rule].name;
    if (span->state_dtype == CT_I8 || span->correction != NULL) {
        return check_compact(update, i, err);
    }
    if (span->state_dtype != CT_U8) {
        return check_dtype(update, i, "state", span->state_dtype, err);
    }
    if (ct_rule_is_measured(update->rule) || span->row != NULL) {
        return ct_fail(err, CT_EINVAL,
                       "%s: span %zu has state of uint8, which this rule cannot have",
                       rule, i);
    }
    /* An empty span, a rank's share of a short parameter, may lack all memory. */
    for (size_t k = 0; span->n != 0 && k < ct_rule_n_states(update->rule); k++) {
        if (span->quant[k].map == NULL || span->quant[k].absmax == NULL) {
            return ct_fail(err, CT_EINVAL,
                           "%s: span %zu lacks the map or the scales of state array "
                           "%zu, which is uint8",
                           rule, i, k);
        }
    }
    return CT_OK;
}

static ct_status
check_span(const ct_update *update, size_t i, ct_error *err)
{
    const ct_update_span *span = &update->spans[i];
    const size_t n_states = ct_rule_n_states(update->rule);
    ct_status status = check_dtype(update, i, "parameters", span->dtype, err);
    if (status == CT_OK) {
        status = check_dtype(update, i, "gradients", span->grad_dtype, err);
    }
    if (status == CT_OK && n_states != 0) {
        status = check_state(update, i, err);
    }
    if (status == CT_OK && span->copy != NULL) {
        status = check_dtype(update, i, "a copy", span->copy_dtype, err);
    }
    if (status == CT_OK && span->ema != NULL) {
        status = check_dtype(update, i, "an average", span->ema_dtype, err);
    }
    for (size_t k = 0; status == CT_OK && span->n != 0 && k < n_states; k++) {
        /* The first state array may be computed from row and column factors instead. */
        if (span->state[k] == NULL && !(k == 0 && span->row != NULL)) {
            status =
                ct_fail(err, CT_EINVAL, "%s: span %zu lacks state array %zu of %zu",
                        rules[update->rule].name, i, k, n_states);
        }
    }
    return status;
}

ct_status
ct_update_check(const ct_update *update, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < update->n_spans; i++) {
        status = check_span(update, i, err);
    }
    return status;
}

ct_status
ct_check_pairs(const char *kernel, const ct_span *spans, const ct_span *values,
               size_t n_spans, ct_error *err)
{
    for (size_t i = 0; i < n_spans; i++) {
        const ct_dtype both[] = {spans[i].dtype, values[i].dtype};
        if (spans[i].n != values[i].n) {
            return ct_fail(err, CT_EINVAL,
                           "%s: span %zu has %zu elements for %zu values", kernel, i,
                           spans[i].n, values[i].n);
        }
        for (int k = 0; k < 2; k++) {
            if (!ct_dtype_is_float(both[k])) {
                return ct_fail(err, CT_EINVAL,
                               "%s: span %zu is %s, and only float dtypes work", kernel,
                               i, ct_dtype_name(both[k]));
            }
        }
    }
    return CT_OK;
}

/* Rules that are not measured have no step one and two: `update` alone serves them. */
ct_status
ct_measure_check(const ct_update *update, ct_error *err)
{
    if (!ct_rule_is_measured(update->rule)) {
        return ct_fail(err, CT_EINVAL, "%s: there is nothing to measure for this rule",
                       rules[update->rule].name);
    }
    return ct_update_check(update, err);
}

/* ---- factored second moments ----------------------------------------------------- */

static bool
is_real(ct_dtype dtype)
{
    return dtype == CT_F32 || dtype == CT_F64;
}

ct_status
ct_factor_check(const ct_factored *list, size_t n, ct_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const ct_factored *f = &list[i];
        if (f->matrices == 0 || f->rows == 0 || f->cols == 0) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu is %zu matrices of %zu x %zu; each has "
                           "to be at least 1",
                           i, f->matrices, f->rows, f->cols);
        }
        const size_t all = f->matrices * f->rows * f->cols;
        /* In this order, so that no sum can wrap around. */
        if (f->begin > all || f->n > all - f->begin) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has gradients of %zu elements from "
                           "number %zu on, of %zu",
                           i, f->n, f->begin, all);
        }
        if (!ct_dtype_is_float(f->grad_dtype)) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has gradients of %s, and only float "
                           "dtypes work",
                           i, ct_dtype_name(f->grad_dtype));
        }
        if (!is_real(f->state_dtype) || !is_real(f->real)) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has averages of %s and factors of %s; "
                           "expected float32 or float64",
                           i, ct_dtype_name(f->state_dtype), ct_dtype_name(f->real));
        }
    }
    return CT_OK;
}
