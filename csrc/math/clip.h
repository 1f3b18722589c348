/* Clipping by the norm of all gradients: the factor, and whether the update takes
 * place.
 *
 * Roots and quotients in double are exact to the last bit on every device, so a GPU
 * finds the factor that the host would. */
#ifndef CT_CLIP_MATH_H
#define CT_CLIP_MATH_H

#include "math/hd.h"
#include "math/norm.h"

#include <stddef.h>

typedef struct ct_clip_request {
    double norm_type;  /* p of the norm: 1, 2 or Inf */
    double max_norm;   /* 0 or Inf: no clipping */
    double loss_scale; /* > 0: the factor of the loss, and of the gradients */
    int keep;          /* gradients that are not finite update all the same */
    /* Unless NULL, in the device's memory: becomes the factor of the next loss, clean
     * or, after gradients that are not finite, overflow. */
    float *next_scale;
    float clean, overflow;
} ct_clip_request;

typedef struct ct_clip_outcome {
    double grad_norm; /* of all gradients, after unscaling, before clipping */
    double coef;      /* a factor of every gradient */
    int finite;       /* on all ranks */
    int skip;         /* the update writes nothing */
} ct_clip_outcome;

/* max_norm / (norm + 1e-6) clamped to 1, as in torch.nn.utils.clip_grad_norm_; 1 when
 * max_norm is 0 or Inf; NaN when norm is NaN, as `coef > 1` is false for NaN. */
CT_HD static inline double
ct_clip_coef(double max_norm, double norm)
{
    if (max_norm == 0.0 || max_norm == (double)INFINITY) {
        return 1.0;
    }
    const double coef = max_norm / (norm + 1e-6);
    return coef > 1.0 ? 1.0 : coef;
}

/* Of an outcome that may be NULL: whether an update by that writes nothing, and a
 * factor of gradients together with the outcome's. */
CT_HD static inline int
ct_clip_skips(const ct_clip_outcome *clip)
{
    return clip != NULL && clip->skip;
}

CT_HD static inline double
ct_clip_scaled(const ct_clip_outcome *clip, double grad_scale)
{
    return clip != NULL ? grad_scale * clip->coef : grad_scale;
}

/* From the sum of a norm of kind CT_NORM_ONE, _TWO or _MAX. all: a number that is
 * finite if the sums of all ranks are. */
CT_HD static inline void
ct_clip_decide_outcome(const ct_clip_request *request, ct_norm_kind kind, double sum,
                       double all, ct_clip_outcome *to)
{
    const double norm = kind == CT_NORM_TWO ? sqrt(sum) : sum;
    ct_clip_outcome outcome;
    outcome.grad_norm = norm / request->loss_scale;
    outcome.coef = ct_clip_coef(request->max_norm, outcome.grad_norm);
    outcome.finite = norm < (double)INFINITY && all < (double)INFINITY;
    outcome.skip = !outcome.finite && !request->keep;
    *to = outcome;
    if (request->next_scale != NULL) {
        *request->next_scale = outcome.finite ? request->clean : request->overflow;
    }
}

#endif
