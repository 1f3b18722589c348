/* Adagrad for one element of type ct_real.
 *
 * Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
 * and Stochastic Optimization", 2011, in the form and order of operations of
 * torch.optim.Adagrad. */

#ifndef CT_ADAGRAD_COEF
#define CT_ADAGRAD_COEF(REAL, FLAG)                                                    \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(weight_decay)                                                                 \
    REAL(step_size) /* lr / (1 + (step - 1) * lr_decay) */                             \
    REAL(eps)
CT_COEF(ct_adagrad, CT_ADAGRAD_COEF)
#endif
CT_ROUNDED(ct_adagrad, CT_ADAGRAD_COEF)

/* state is the sum of squared gradients. */
CT_HD static inline void
CT_REAL(ct_adagrad_apply)(const CT_REAL(ct_adagrad_coef) * c, ct_real grad,
                          ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    state[0] = state[0] + g * g;
    *param = *param - c->step_size * g / (CT_SQRT(state[0]) + c->eps);
}
