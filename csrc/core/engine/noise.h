/* The simple gradient noise scale, from the gradients of the micro-batches of updates.
 *
 * The squared norm of the mean gradient of b examples is |G|^2 + T / b in expectation,
 * G being the true gradient and T the trace of the covariance of single examples'. Seen
 * at two sizes of batch it gives both, and T / |G|^2 is about the batch size, in
 * examples, up to which larger batches pay off.
 *
 * Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
 * appendix A.1, with micro-batches of unequal sizes. */
#ifndef CORE_ENGINE_NOISE_H
#define CORE_ENGINE_NOISE_H

#include "core/base/span.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The micro-batches of one update. Starts as {0}. */
typedef struct ct_noise_sample {
    double small; /* sum of share * |mean gradient|^2 */
    size_t n;
} ct_noise_sample;

/* Averages over updates, each of unbiased estimates. Starts as {0}. */
typedef struct ct_noise {
    double trace;  /* of T, times weight */
    double signal; /* of |G|^2, times weight */
    double weight; /* 1 - CT_NOISE_KEPT^(updates seen) */
} ct_noise;

/* What an average keeps of itself at each update; the ratio of two averages is less
 * biased than an average of ratios. */
#define CT_NOISE_KEPT 0.9

/* A micro-batch that holds `share` of the update's examples, in [0, 1]; sum_sq is the
 * sum of squares of share * its mean gradient, as it is added to the others'. One with
 * a share of 0 is left out. */
void ct_noise_see(ct_noise_sample *sample, double share, double sum_sq);

/* The update that these micro-batches make: big is the sum of squares of the sum of
 * their gradients, batch its number of examples. False, nothing changed, for fewer than
 * two micro-batches and for sums that are not finite. */
bool
ct_noise_add(ct_noise *noise, const ct_noise_sample *sample, double big, double batch);

/* T / |G|^2 in examples, for a weight > 0; Inf where the average of |G|^2 is not above
 * 0 and the noise drowns the gradient. Estimates may be below 0 while there are few. */
double ct_noise_scale(const ct_noise *noise);

/* The norm of what each micro-batch adds to gradients that are summed in place. It
 * keeps a copy of all of them, in host memory, float32 or float64, and changes none. */

typedef struct ct_probe ct_probe;

ct_probe *ct_probe_new(void);        /* NULL when out of memory */
void ct_probe_free(ct_probe *probe); /* NULL is fine */

/* Before the first micro-batch of an update: there are no gradients yet. */
void ct_probe_begin(ct_probe *probe);

/* After a micro-batch, for each gradient that is there: the sum as it is now. `number`
 * says whose it is, the same at every call. The span borrows its memory until
 * ct_probe_measure has returned. */
CT_NODISCARD ct_status ct_probe_set(ct_probe *probe, size_t number, const ct_span *grad,
                                    ct_error *err);

/* The sum of squares of what these gradients have grown by since the call before; Inf
 * or NaN when an element has. */
CT_NODISCARD ct_status ct_probe_measure(ct_probe *probe, double *sum_sq, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
