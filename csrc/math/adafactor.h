/* Adafactor for one element, in float and in double. Measured rules
 * (math/measured.def).
 *
 * Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
 * Cost", 2018, algorithms 4 to 6, with the options of transformers' and fairseq's. */
#ifndef CT_ADAFACTOR_MATH_H
#define CT_ADAFACTOR_MATH_H

#include "math/hd.h"

#include <math.h>

/* What is constant over one step, worked out in double. */
typedef struct ct_adafactor_coef {
    double grad_scale;
    double beta2, one_minus_beta2; /* of this step: 1 - step^decay_rate */
    double beta1, one_minus_beta1;
    double eps;     /* added to the squared gradient */
    double rms_low; /* the least root mean square that a parameter counts with */
    double clip;    /* the root mean square that an update may have */
    double lr;      /* before it is scaled by the parameter */
    double weight_decay;
    int scaled;   /* the rate is scaled by the parameter's root mean square */
    int factored; /* the first state is 1 / sqrt(second moment), and not ours */
    /* settled: */
    double rms;    /* of the parameter */
    double factor; /* of the direction */
    double decay;  /* of the parameter */
} ct_adafactor_coef;

CT_HD static inline void
ct_adafactor_settle(ct_adafactor_coef *c, const double *sums, double n)
{
    const double excess = sqrt(sums[0] / n) / c->clip;
    c->rms = sqrt(sums[1] / n);
    const double scale = c->rms > c->rms_low ? c->rms : c->rms_low;
    const double lr = c->scaled ? scale * c->lr : c->lr;
    c->factor = excess > 1.0 ? lr / excess : lr;
    c->decay = 1.0 - c->weight_decay * lr;
}

#define CT_FORMULA "math/formula/adafactor.h"
#include "math/each_real.h"

#endif
