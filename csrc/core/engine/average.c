/* The rhythm of averages; their arithmetic is part of the optimizer's pass.
 *
 * Updates count from 1. An exponential average due before `start` has
 * decay 0: a copy of the weights. */
#include "core/engine/average.h"

#include <inttypes.h>

ct_status
ct_average_init(ct_average *average, const ct_average_config *config, ct_error *err)
{
    if (!(config->decay >= 0.0 && config->decay <= 1.0)) {
        return ct_fail(err, CT_EINVAL, "decay must be in [0, 1], got %g",
                       config->decay);
    }
    if (config->start < 0) {
        return ct_fail(err, CT_EINVAL, "start must be >= 0, got %" PRId64,
                       config->start);
    }
    if (config->every < 1) {
        return ct_fail(err, CT_EINVAL, "every must be >= 1, got %" PRId64,
                       config->every);
    }
    *average = (ct_average){.config = *config};
    return CT_OK;
}

bool
ct_average_due(const ct_average *average, double *decay)
{
    const ct_average_config *config = &average->config;
    const int64_t update = average->num_updates + 1;
    const bool started = update >= config->start;
    if (config->kind == CT_AVERAGE_EMA) {
        *decay = started ? config->decay : 0.0;
        return update % config->every == 0;
    }
    *decay = (double)average->n_averaged / (double)(average->n_averaged + 1);
    return started && (update - config->start) % config->every == 0;
}

void
ct_average_count(ct_average *average, bool averaged)
{
    average->num_updates++;
    average->n_averaged += averaged;
}

void
ct_average_take_back(ct_average *average, bool averaged)
{
    average->num_updates--;
    average->n_averaged -= averaged;
}
