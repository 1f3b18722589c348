/* SGD for one element of type ct_real.
 *
 * Source: Sutskever et al., "On the importance of initialization and momentum in deep
 * learning", 2013, in the form and order of operations of torch.optim.SGD. */

#ifndef CT_SGD_COEF
#define CT_SGD_COEF(REAL, FLAG)                                                        \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(momentum)                                                                     \
    REAL(one_minus_dampening)                                                          \
    REAL(weight_decay)                                                                 \
    FLAG(nesterov)                                                                     \
    FLAG(first) /* the momentum buffer starts as the gradient */
CT_COEF(ct_sgd, CT_SGD_COEF)
#endif
CT_ROUNDED(ct_sgd, CT_SGD_COEF)

/* Without momentum; there is no state. */
CT_HD static inline void
CT_REAL(ct_sgd_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad, ct_real *param,
                      ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    (void)state;
    *param = *param - c->lr * g;
}

/* With momentum; state is the momentum. */
CT_HD static inline void
CT_REAL(ct_sgd_momentum_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad,
                               ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    const ct_real b =
        c->first ? g : state[0] * c->momentum + c->one_minus_dampening * g;
    const ct_real direction = c->nesterov ? g + c->momentum * b : b;

    *param = *param - c->lr * direction;
    state[0] = b;
}
