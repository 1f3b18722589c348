#include "core/ct_greedy.h"

#include "core/ct_alloc.h"

#include <inttypes.h>
#include <math.h>

/* ---- window ------------------------------------------------------------------------
 */

static const int64_t MOST_VALUES = INT64_C(1) << 24; /* 128 MiB */

ct_status
ct_window_init(ct_window *window, int64_t size, ct_error *err)
{
    if (size < 1 || size > MOST_VALUES) {
        return ct_fail(err, CT_EINVAL,
                       "window_size must be from 1 to %" PRId64 ", got %" PRId64,
                       MOST_VALUES, size);
    }
    double *values = ct_calloc((size_t)size, sizeof *values);
    if (values == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a window of %" PRId64 " metrics",
                       size);
    }
    ct_window_fini(window);
    *window = (ct_window){.values = values, .size = size};
    return CT_OK;
}

void
ct_window_fini(ct_window *window)
{
    ct_free(window->values);
    *window = (ct_window){.values = NULL};
}

double
ct_window_at(const ct_window *window, int64_t i)
{
    return window
        ->values[(window->next - window->count + window->size + i) % window->size];
}

double
ct_window_mean(ct_window *window, double metric)
{
    const int full = window->count == window->size;
    const double oldest = full ? window->values[window->next] : 0.0;
    window->values[window->next] = metric;
    window->next = (window->next + 1) % window->size;
    window->count += !full;
    window->sum += metric;
    if (full) {
        window->sum -= oldest;
    }
    return window->sum / (double)window->count;
}

static void
forget_values(ct_window *window)
{
    window->count = window->next = 0;
    window->sum = 0.0;
}

/* ---- settings ----------------------------------------------------------------------
 */

ct_greedy
ct_greedy_defaults(void)
{
    ct_greedy g = {
        .rule = {.absolute = 1, .threshold = 1e-6},
        .factor = 0.95,
        .eps = 1e-8,
        .patience = 10,
        .reset_start = 500,
        .reset_start_original = 500
    };
    g.best = ct_metric_worst(&g.rule);
    return g;
}

ct_status
ct_greedy_check(const ct_greedy *g, ct_error *err)
{
    const struct {
        const char *name;
        int64_t value;
    } counts[] = {
        {"patience",    g->patience            },
        {"cooldown",    g->cooldown            },
        {"warmup",      g->warmup              },
        {"reset_start", g->reset_start_original},
    };
    if (!(g->factor > 0.0 && g->factor < 1.0)) {
        return ct_fail(err, CT_EINVAL, "factor must be above 0 and below 1, got %g",
                       g->factor);
    }
    if (!isfinite(g->rule.threshold)) {
        return ct_fail(err, CT_EINVAL, "threshold must be finite, got %g",
                       g->rule.threshold);
    }
    if (!(g->eps >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "eps must be >= 0, got %g", g->eps);
    }
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (counts[i].value < 0) {
            return ct_fail(err, CT_EINVAL, "%s must be >= 0, got %" PRId64,
                           counts[i].name, counts[i].value);
        }
    }
    return CT_OK;
}

/* ---- stepping ----------------------------------------------------------------------
 */

static void
reset(ct_greedy *g, const ct_greedy_rates *rates)
{
    for (size_t i = 0; i < rates->n; i++) {
        rates->now[i] = rates->initial[i];
    }
    g->best = ct_metric_worst(&g->rule);
    g->num_bad_epochs = g->num_good_epochs = 0;
    g->cooldown_counter = g->warmup_counter = 0;
    g->reset_start = g->reset_start_original;
    if (g->smooth) {
        forget_values(&g->window);
    }
}

/* Rates that are all at their least count down to a new start. */
static int
lower(ct_greedy *g, const ct_greedy_rates *rates)
{
    int all_at_least = 1;
    for (size_t i = 0; i < rates->n; i++) {
        double rate = rates->now[i] * g->factor;
        rate = rates->least[i] > rate ? rates->least[i] : rate;
        if (rates->now[i] - rate > g->eps) {
            rates->now[i] = rate;
        }
        all_at_least = all_at_least && !(rates->now[i] > rates->least[i]);
    }
    if (!all_at_least || --g->reset_start > 0) {
        return 0;
    }
    reset(g, rates);
    return 1;
}

static void
increase(ct_greedy *g, const ct_greedy_rates *rates)
{
    for (size_t i = 0; i < rates->n; i++) {
        double rate = rates->now[i] / g->factor;
        rate = rates->most[i] < rate ? rates->most[i] : rate;
        if (rate - rates->now[i] > g->eps) {
            rates->now[i] = rate;
        }
    }
    g->reset_start = g->reset_start_original;
}

static void
count(ct_greedy *g, double metric)
{
    if (ct_metric_is_better(&g->rule, metric, g->best)) {
        g->best = metric;
        g->num_bad_epochs = 0;
        g->num_good_epochs++;
    }
    else {
        g->num_bad_epochs++;
        g->num_good_epochs = 0;
    }
}

/* After a change of the rates the metric is not judged for a while. */
static int
is_waiting(ct_greedy *g)
{
    int64_t *counter = g->cooldown_counter > 0 ? &g->cooldown_counter
                       : g->warmup_counter > 0 ? &g->warmup_counter
                                               : NULL;
    if (counter != NULL) {
        --*counter;
        g->num_bad_epochs = g->num_good_epochs = 0;
    }
    return counter != NULL;
}

int
ct_greedy_step(ct_greedy *g, double metric, const ct_greedy_rates *rates)
{
    int has_reset = 0;
    if (g->smooth) {
        metric = ct_window_mean(&g->window, metric);
    }
    if (is_waiting(g)) {
        return 0;
    }
    count(g, metric);
    if (g->num_good_epochs > g->patience) {
        increase(g, rates);
        g->warmup_counter = g->warmup;
        g->num_good_epochs = 0;
    }
    else if (g->num_bad_epochs > g->patience) {
        has_reset = lower(g, rates);
        g->cooldown_counter = g->cooldown;
        g->num_bad_epochs = 0;
    }
    return has_reset;
}
