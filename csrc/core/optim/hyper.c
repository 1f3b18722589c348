#include "core/optim/hyper.h"

#include <math.h>
#include <stdbool.h>

/* Written so that NaN fails. */
static bool
is_within(const ct_hyper *number)
{
    return number->value >= number->low &&
           (isinf(number->below) || number->value < number->below);
}

ct_status
ct_hyper_check(const ct_hyper *numbers, size_t n, ct_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const ct_hyper *number = &numbers[i];
        if (is_within(number)) {
            continue;
        }
        if (isinf(number->low)) {
            return ct_fail(err, CT_EINVAL, "%s must be a number, got %g", number->name,
                           number->value);
        }
        if (isinf(number->below)) {
            return ct_fail(err, CT_EINVAL, "%s must be >= %g, got %g", number->name,
                           number->low, number->value);
        }
        return ct_fail(err, CT_EINVAL, "%s must be in [%g, %g), got %g", number->name,
                       number->low, number->below, number->value);
    }
    return CT_OK;
}

ct_status
ct_hyper_check_step(uint64_t step, ct_error *err)
{
    return step >= 1 ? CT_OK : ct_fail(err, CT_EINVAL, "step counts from 1, got 0");
}

double
ct_hyper_bias(double keep, uint64_t step)
{
    return 1.0 - pow(keep, (double)step);
}
