/* LAMB for one element of type ct_real. A measured rule (math/measured.def).
 *
 * Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
 * minutes", 2020, algorithm 2, with the options of apex's FusedLAMB. */

#ifndef CT_LAMB_COEF
#define CT_LAMB_COEF(REAL, FLAG)                                                       \
    REAL(grad_scale)                                                                   \
    REAL(l2) /* weight decay that is added to the gradient */                          \
    REAL(beta1)                                                                        \
    REAL(share) /* of the gradient in the average */                                   \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(inv_bias1) /* 1 / (1 - beta1^step) */                                         \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(eps)                                                                          \
    REAL(weight_decay) /* that is added to the direction */                            \
    REAL(lr)                                                                           \
    REAL(max_grad_norm) /* of all gradients together; 0: not clipped */                \
    FLAG(trusted)       /* scale the learning rate by the norms */                     \
    REAL(step_size)     /* settled: lr * |param| / |direction| */
CT_COEF(ct_lamb, CT_LAMB_COEF)

/* A norm of 0 says nothing about the scale: the learning rate stays. */
CT_HD static inline void
ct_lamb_settle(ct_lamb_coef *c, const double *sums, double n)
{
    const double direction = sqrt(sums[0]), param = sqrt(sums[1]);
    (void)n;
    c->step_size = c->trusted && direction != 0.0 && param != 0.0
                       ? c->lr * (param / direction)
                       : c->lr;
}
#endif
CT_ROUNDED(ct_lamb, CT_LAMB_COEF)

/* state is the moments of grad and of grad^2. */
CT_HD static inline ct_real
CT_REAL(ct_lamb_direction)(const CT_REAL(ct_lamb_coef) * c, ct_real param,
                           const ct_real *state)
{
    const ct_real denom = CT_SQRT(state[1]) * c->inv_bias2 + c->eps;
    return state[0] * c->inv_bias1 / denom + c->weight_decay * param;
}

/* Updates the moments; terms: to be summed. */
CT_HD static inline void
CT_REAL(ct_lamb_measure)(const CT_REAL(ct_lamb_coef) * c, ct_real grad, ct_real param,
                         ct_real *state, ct_real *terms)
{
    const ct_real g = grad * c->grad_scale + c->l2 * param;
    state[0] = state[0] * c->beta1 + c->share * g;
    state[1] = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    terms[0] = CT_REAL(ct_lamb_direction)(c, param, state);
    terms[1] = param;
}

/* From the updated moments; computing the direction again costs less than storing it.
 */
CT_HD static inline void
CT_REAL(ct_lamb_apply)(const CT_REAL(ct_lamb_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    (void)grad;
    *param = *param - c->step_size * CT_REAL(ct_lamb_direction)(c, *param, state);
}
