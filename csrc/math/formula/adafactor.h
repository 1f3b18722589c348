/* Adafactor for one element of type ct_real. Measured rules
 * (math/measured.def).
 *
 * Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
 * Cost", 2018, algorithms 4 to 6, with the options of transformers' and fairseq's. */

#ifndef CT_ADAFACTOR_COEF
#define CT_ADAFACTOR_COEF(REAL, FLAG)                                                  \
    REAL(grad_scale)                                                                   \
    REAL(beta2) /* of this step: 1 - step^decay_rate */                                \
    REAL(one_minus_beta2)                                                              \
    REAL(beta1)                                                                        \
    REAL(one_minus_beta1)                                                              \
    REAL(eps)     /* added to the squared gradient */                                  \
    REAL(rms_low) /* the least root mean square that a parameter counts with */        \
    REAL(clip)    /* the root mean square that an update may have */                   \
    REAL(lr)      /* before the scaling by the parameter */                            \
    REAL(weight_decay)                                                                 \
    FLAG(scaled)   /* scale the learning rate by the parameter's root mean square */   \
    FLAG(factored) /* the first state is 1 / sqrt(second moment), of factor_sums */    \
    REAL(rms)      /* settled: root mean square of the parameter */                    \
    REAL(factor)   /* settled: of the direction */                                     \
    REAL(decay)    /* settled: of the parameter */
CT_COEF(ct_adafactor, CT_ADAFACTOR_COEF)

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
#endif
CT_ROUNDED(ct_adafactor, CT_ADAFACTOR_COEF)

CT_HD static inline ct_real
CT_REAL(ct_adafactor_direction)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                                ct_real moment)
{
    const ct_real g = grad * c->grad_scale;
    return c->factored ? g * moment : g / CT_SQRT(moment);
}

/* Updates the second moment, unless factored; terms: to be summed. */
CT_HD static inline void
CT_REAL(ct_adafactor_measure)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                              ct_real param, ct_real *state, ct_real *terms)
{
    const ct_real g = grad * c->grad_scale;
    const ct_real v = state[0] * c->beta2 + c->one_minus_beta2 * (g * g + c->eps);
    state[0] = c->factored ? state[0] : v;
    terms[0] = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    terms[1] = param;
}

/* Without the first moment. */
CT_HD static inline void
CT_REAL(ct_adafactor_apply)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                            ct_real *param, ct_real *state)
{
    const ct_real u = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    *param = *param * c->decay - c->factor * u;
}

CT_HD static inline void
CT_REAL(ct_adafactor_momentum_measure)(const CT_REAL(ct_adafactor_coef) * c,
                                       ct_real grad, ct_real param, ct_real *state,
                                       ct_real *terms)
{
    CT_REAL(ct_adafactor_measure)(c, grad, param, state, terms);
}

/* With the first moment, of the scaled updates, as the second state. */
CT_HD static inline void
CT_REAL(ct_adafactor_momentum_apply)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                                     ct_real *param, ct_real *state)
{
    const ct_real u = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    state[1] = state[1] * c->beta1 + c->one_minus_beta1 * (c->factor * u);
    *param = *param * c->decay - state[1];
}
