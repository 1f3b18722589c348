/* Muon's momentum for one element, in float and in double: a measured rule
 * (math/measured.def) whose parameter becomes the momentum's direction, divided by its
 * norm. Newton-Schulz takes it from there (core/optim/muon.h).
 *
 * Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024, in the form of torch.optim.Muon. */
#ifndef CT_MUON_MATH_H
#define CT_MUON_MATH_H

#include "math/hd.h"

#include <math.h>

/* What is constant over one step, worked out in double. */
typedef struct ct_muon_coef {
    double grad_scale;
    double momentum, one_minus_momentum;
    double eps; /* the least norm that is divided by */
    int nesterov;
    int from_grad;   /* averages start from the gradient: momentum < 0.5 */
    double inv_norm; /* settled */
    /* Of the step that follows. */
    double lr, weight_decay;
    double a, b, c;      /* Newton-Schulz's coefficients */
    int n_steps, adjust; /* adjust: a ct_muon_adjust */
} ct_muon_coef;

CT_HD static inline void
ct_muon_settle(ct_muon_coef *c, const double *sums, double n)
{
    const double norm = sqrt(sums[0]);
    (void)n;
    c->inv_norm = 1.0 / (norm > c->eps ? norm : c->eps);
}

#define CT_FORMULA "math/formula/muon.h"
#include "math/each_real.h"

#endif
