/* Gradients of an optimizer's parameters in one list: their norms by group, and their
 * scaling and clipping in place. */
#ifndef CT_GRADS_H
#define CT_GRADS_H

#include "core/device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_grad_group {
    double max_norm; /* to what it is clipped by its own norm; Inf: not at all; 0: it is
                      * treated as the step says */
    double coef;     /* what clipping multiplies it by; 1 until that is known */
} ct_grad_group;

typedef struct ct_grads {
    const ct_device *device;
    ct_span *spans;
    uint32_t *group_of; /* each span's; < n_groups */
    ct_grad_group *groups;
    double *sums; /* what the norm of each group is the root of, see ct_norm_fn; behind
                   * them that of all, and room for one more */
    size_t n, n_groups;
    size_t spans_capacity, group_of_capacity, groups_capacity, sums_capacity;
    ct_scratch scratch; /* the device's, for partial sums */
    ct_scratch sum;     /* the device's, what is summed up */
} ct_grads;

void ct_grads_init(ct_grads *grads, const ct_device *device); /* an empty list */
void ct_grads_fini(ct_grads *grads);

/* Makes room for n spans in all, so that adding them cannot fail. */
CT_NODISCARD ct_status ct_grads_reserve(ct_grads *grads, size_t n, ct_error *err);

/* Sets the number of groups; sums are forgotten. What else is known of those that stay
 * is kept. */
CT_NODISCARD ct_status ct_grads_set_groups(ct_grads *grads, size_t n_groups,
                                           ct_error *err);

/* Adds the span to the list, for which there is room. It borrows its memory. */
void ct_grads_add(ct_grads *grads, const ct_span *span, uint32_t group);

/* Fills in the sum of all gradients listed, for the p-norm (p > 0 or Inf), and with
 * by_group that of each group. Inf or NaN when an element is, or when a sum of powers
 * is beyond double. Waits for the stream. */
CT_NODISCARD ct_status ct_grads_sum(ct_grads *grads, void *stream, double p,
                                    bool by_group, ct_error *err);

/* The sum of each span by itself, to each[0 .. n - 1]. */
CT_NODISCARD ct_status ct_grads_sum_each(ct_grads *grads, void *stream, double p,
                                         double *each, ct_error *err);

/* The sum of all: its place in sums. */
static inline double *
ct_grads_total(const ct_grads *grads)
{
    return &grads->sums[grads->n_groups];
}

/* Multiplies every gradient by factor and the coef of its group; what is then further
 * from 0 than limit (> 0, Inf for none) becomes limit with its sign. */
CT_NODISCARD ct_status ct_grads_scale(ct_grads *grads, void *stream, double factor,
                                      double limit, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
