/* When workers meet, and the ranges of the options. */
#include "core/bmuf/bmuf.h"
#include "core/optim/hyper.h"

#include <math.h>

ct_status
ct_bmuf_check(const ct_bmuf_config *config, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"block_momentum", config->momentum, 0.0, HUGE_VAL},
        {"block_lr",       config->lr,       0.0, HUGE_VAL},
    };
    if (config->sync_iter < 1) {
        return ct_fail(err, CT_EINVAL, "global_sync_iter must be at least 1, got %lld",
                       (long long)config->sync_iter);
    }
    if (config->warmup < 0) {
        return ct_fail(err, CT_EINVAL, "warmup_iterations must be at least 0, got %lld",
                       (long long)config->warmup);
    }
    for (int i = 0; i < 2; i++) {
        if (isinf(numbers[i].value)) {
            return ct_fail(err, CT_EINVAL, "%s must be finite, got %g", numbers[i].name,
                           numbers[i].value);
        }
    }
    if (config->overlap < 0 || config->overlap >= config->sync_iter) {
        return ct_fail(err, CT_EINVAL,
                       "overlap_steps must be at least 0 and below global_sync_iter, "
                       "which is %lld; got %lld",
                       (long long)config->sync_iter, (long long)config->overlap);
    }
    if (config->overlap > 0 && (config->momentum == 0.0 || ct_bmuf_is_coded(config))) {
        return ct_fail(err, CT_EINVAL,
                       "overlap_steps is %lld, which needs block_momentum above 0 and "
                       "delta_bits 32; got %g and %d",
                       (long long)config->overlap, config->momentum,
                       config->delta_bits);
    }
    if (config->delta_bits != 32 && !ct_bmuf_is_coded(config)) {
        return ct_fail(err, CT_EINVAL, "delta_bits must be 32, 8 or 4, got %d",
                       config->delta_bits);
    }
    if (ct_bmuf_is_coded(config) && config->momentum == 0.0) {
        return ct_fail(err, CT_EINVAL,
                       "delta_bits is %d with block_momentum 0, which averages models "
                       "and knows no distances: set block_momentum above 0, or "
                       "delta_bits to 32",
                       config->delta_bits);
    }
    return ct_hyper_check(numbers, 2, err);
}

ct_bmuf_event
ct_bmuf_after(const ct_bmuf_config *config, int64_t num_updates)
{
    if (num_updates == config->warmup) {
        return CT_BMUF_WARMUP_END;
    }
    return num_updates > config->warmup && num_updates % config->sync_iter == 0
               ? CT_BMUF_BLOCK_END
               : CT_BMUF_NOTHING;
}
