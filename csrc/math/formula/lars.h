/* LARS for one element of type ct_real. A measured rule (math/measured.def).
 *
 * Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
 * 2017, algorithm 1: SGD with the gradient scaled for each parameter by
 * trust * |w| / (|g| + weight_decay * |w|), with apex's option to clip the learning
 * rate. */

#ifndef CT_LARS_COEF
#define CT_LARS_COEF(REAL, FLAG)                                                       \
    REAL(grad_scale)                                                                   \
    REAL(lr)                                                                           \
    REAL(momentum)                                                                     \
    REAL(one_minus_dampening)                                                          \
    REAL(weight_decay)                                                                 \
    REAL(trust) /* 0: the gradient is not scaled */                                    \
    REAL(eps)                                                                          \
    FLAG(clip) /* `trust` is an upper bound of lr, not a factor */                     \
    FLAG(nesterov)                                                                     \
    FLAG(first) /* the momentum buffer starts as the gradient */                       \
    REAL(ratio) /* settled: ratio * (grad + decay * param) is the gradient */          \
    REAL(decay) /* settled */
CT_COEF(ct_lars, CT_LARS_COEF)

/* With a norm of 0 the gradient is not scaled and has no weight decay. */
CT_HD static inline void
ct_lars_settle(ct_lars_coef *c, const double *sums, double n)
{
    const double grad = sqrt(sums[0]), param = sqrt(sums[1]);
    double ratio = c->trust * param / (grad + c->weight_decay * param + c->eps);
    const int scaled = c->trust != 0.0 && grad != 0.0 && param != 0.0;
    (void)n;
    if (c->clip) {
        ratio = ratio / c->lr;
        ratio = ratio < 1.0 ? ratio : 1.0;
    }
    c->ratio = scaled ? ratio : 1.0;
    c->decay = scaled || c->trust == 0.0 ? c->weight_decay : 0.0;
}
#endif
CT_ROUNDED(ct_lars, CT_LARS_COEF)

CT_HD static inline ct_real
CT_REAL(ct_lars_scaled)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real param)
{
    return c->ratio * (grad * c->grad_scale + c->decay * param);
}

/* terms: to be summed; the state is unchanged. */
CT_HD static inline void
CT_REAL(ct_lars_measure)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real param,
                         ct_real *state, ct_real *terms)
{
    (void)state;
    terms[0] = grad * c->grad_scale;
    terms[1] = param;
}

/* Without momentum; there is no state. */
CT_HD static inline void
CT_REAL(ct_lars_apply)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    (void)state;
    *param = *param - c->lr * CT_REAL(ct_lars_scaled)(c, grad, *param);
}

CT_HD static inline void
CT_REAL(ct_lars_momentum_measure)(const CT_REAL(ct_lars_coef) * c, ct_real grad,
                                  ct_real param, ct_real *state, ct_real *terms)
{
    CT_REAL(ct_lars_measure)(c, grad, param, state, terms);
}

/* With momentum; state is the momentum. */
CT_HD static inline void
CT_REAL(ct_lars_momentum_apply)(const CT_REAL(ct_lars_coef) * c, ct_real grad,
                                ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_lars_scaled)(c, grad, *param);
    const ct_real b =
        c->first ? g : state[0] * c->momentum + c->one_minus_dampening * g;

    *param = *param - c->lr * (c->nesterov ? g + c->momentum * b : b);
    state[0] = b;
}
