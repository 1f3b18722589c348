/* When workers meet, and the ranges of the options. */
#include "core/ct_bmuf.h"
#include "core/ct_hyper.h"

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
