/* Gradients of an optimizer's parameters in one list: their norms by group, and their
 * scaling and clipping in place. */
#ifndef CT_GRADS_H
#define CT_GRADS_H

#include "core/device/device.h"

CT_BEGIN_DECLS

typedef struct ct_grad_group {
    double max_norm; /* of the group alone; Inf: never clipped; 0: clipped with the
                      * rest, by the step's options */
    double coef;     /* the factor of clipping; 1 until then */
} ct_grad_group;

typedef struct ct_grads {
    const ct_device *device;
    ct_span *spans;
    uint32_t *group_of; /* of each span; < n_groups */
    ct_grad_group *groups;
    double *sums; /* of powers (ct_norm_fn): of each group, of all, and one spare */
    size_t n, n_groups;
    size_t spans_capacity, group_of_capacity, groups_capacity, sums_capacity;
    ct_scratch scratch; /* the device's, for partial sums */
    ct_scratch sum;     /* the device's, for final sums */
} ct_grads;

void ct_grads_init(ct_grads *grads, const ct_device *device); /* an empty list */
void ct_grads_fini(ct_grads *grads);

/* Reserves n spans in all, so that adding cannot fail. */
CT_NODISCARD ct_status ct_grads_reserve(ct_grads *grads, size_t n, ct_error *err);

/* Sets the number of groups; sums are lost, the rest of the remaining groups stays. */
CT_NODISCARD ct_status ct_grads_set_groups(ct_grads *grads, size_t n_groups,
                                           ct_error *err);

/* Adds a span within the reserve; its memory is borrowed. */
void ct_grads_add(ct_grads *grads, const ct_span *span, uint32_t group);

/* Fills in the sum of all gradients listed, for the p-norm (p > 0 or Inf), and with
 * by_group the sum of each group. Inf or NaN when an element is, or when a sum of
 * powers is beyond double. Waits for the stream. */
CT_NODISCARD ct_status ct_grads_sum(ct_grads *grads, void *stream, double p,
                                    bool by_group, ct_error *err);

/* The sum of each span by itself, to each[0 .. n - 1]. */
CT_NODISCARD ct_status ct_grads_sum_each(ct_grads *grads, void *stream, double p,
                                         double *each, ct_error *err);

/* The place of the sum of all. */
static inline double *
ct_grads_total(const ct_grads *grads)
{
    return &grads->sums[grads->n_groups];
}

/* Multiplies every gradient by factor and the coef of its group, then clips each
 * element to [-limit, limit] (> 0, Inf for none). */
CT_NODISCARD ct_status ct_grads_scale(ct_grads *grads, void *stream, double factor,
                                      double limit, ct_error *err);

CT_END_DECLS

#endif
