#include "core/engine/noise.h"

#include <math.h>

void
ct_noise_see(ct_noise_sample *sample, double share, double sum_sq)
{
    if (share > 0.0) {
        sample->small += sum_sq / share;
        sample->n++;
    }
}

/* With micro-batches of sizes s_i * batch the expectation of small is
 * |G|^2 + n T / batch, that of big |G|^2 + T / batch. */
bool
ct_noise_add(ct_noise *noise, const ct_noise_sample *sample, double big, double batch)
{
    const double share_of_trace = (sample->small - big) / ((double)sample->n - 1.0);
    if (sample->n < 2 || !isfinite(share_of_trace)) {
        return false;
    }
    const double kept = CT_NOISE_KEPT, taken = 1.0 - CT_NOISE_KEPT;
    noise->trace = kept * noise->trace + taken * batch * share_of_trace;
    noise->signal = kept * noise->signal + taken * (big - share_of_trace);
    noise->weight = kept * noise->weight + taken;
    return true;
}

double
ct_noise_scale(const ct_noise *noise)
{
    return noise->signal > 0.0 ? noise->trace / noise->signal : (double)INFINITY;
}
