/* Lion for one element of type ct_real.
 *
 * Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
 * algorithm 2. */

#ifndef CT_LION_COEF
#define CT_LION_COEF(REAL, FLAG)                                                       \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(decay) /* 1 - lr * weight_decay */                                            \
    REAL(beta1)                                                                        \
    REAL(one_minus_beta1)                                                              \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)
CT_COEF(ct_lion, CT_LION_COEF)
#endif
CT_ROUNDED(ct_lion, CT_LION_COEF)

/* state is the moment of the gradient. Only the sign of the update reaches the
 * parameter; with a sign of 0 or NaN the parameter stays. */
CT_HD static inline void
CT_REAL(ct_lion_apply)(const CT_REAL(ct_lion_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    const ct_real g = grad * c->grad_scale;
    const ct_real direction = state[0] * c->beta1 + c->one_minus_beta1 * g;
    const ct_real up = direction > (ct_real)0 ? c->lr : (ct_real)0;
    const ct_real step = direction < (ct_real)0 ? -c->lr : up;

    *param = *param * c->decay - step;
    state[0] = state[0] * c->beta2 + c->one_minus_beta2 * g;
}
