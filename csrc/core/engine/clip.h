/* Clipping of gradients: by norm, of all or of each group, and then by value. */
#ifndef CT_CLIP_H
#define CT_CLIP_H

#include "core/optim/grads.h"

CT_BEGIN_DECLS

/* {0} clips nothing. */
typedef struct ct_clip {
    double max_norm;  /* to this norm; 0 or Inf: not; < 0 is rejected */
    double norm_type; /* p of the norm, > 0 or Inf; 0 stands for 2 */
    double value;     /* after that each element to [-value, value]; 0 or Inf: not */
    bool by_group;    /* max_norm holds for each group by itself */
} ct_clip;

/* CT_EINVAL names the value that is out of range. */
CT_NODISCARD ct_status ct_clip_check(const ct_clip *clip, ct_error *err);

/* max_norm / (norm + 1e-6) clamped to 1, as in torch.nn.utils.clip_grad_norm_; 1 when
 * max_norm is 0 or Inf; NaN when norm is NaN. */
double ct_clip_coef(double max_norm, double norm);

/* Whether elements are clipped by value. */
bool ct_clip_by_value(const ct_clip *clip);

/* Whether clipping needs the norm of each group: by_group, or a group has a max_norm of
 * its own. */
bool ct_clip_by_group(const ct_clip *clip, const ct_grads *grads);

/* Computes the sums for the norms that clipping needs. Waits for the stream. */
CT_NODISCARD ct_status ct_clip_measure(const ct_clip *clip, ct_grads *grads,
                                       void *stream, ct_error *err);

/* The norm that a sum in grads->sums is of. */
double ct_clip_norm(const ct_clip *clip, double sum);

/* Sets the coef of every group from the sums. A group with a max_norm of its own is
 * clipped by its own norm to that max_norm; each other group by its own norm (by_group)
 * or all by their common norm. Returns the norm of all gradients divided by loss_scale,
 * before clipping. */
double ct_clip_decide(const ct_clip *clip, ct_grads *grads, double loss_scale);

/* The least coef of all groups; NaN if any coef is NaN, 1 without groups. */
double ct_clip_least(const ct_grads *grads);

/* Divides the gradients by loss_scale and clips, in place. */
CT_NODISCARD ct_status ct_clip_apply(const ct_clip *clip, ct_grads *grads, void *stream,
                                     double loss_scale, ct_error *err);

CT_END_DECLS

#endif
