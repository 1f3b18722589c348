/* Adadelta for one element of type ct_real.
 *
 * Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, algorithm 1, with
 * the learning rate and in the order of operations of torch.optim.Adadelta. */

#ifndef CT_ADADELTA_COEF
#define CT_ADADELTA_COEF(REAL, FLAG)                                                   \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(rho)                                                                          \
    REAL(one_minus_rho)                                                                \
    REAL(eps)
CT_COEF(ct_adadelta, CT_ADADELTA_COEF)
#endif
CT_ROUNDED(ct_adadelta, CT_ADADELTA_COEF)

/* state is the averages of squared gradients and of squared updates. */
CT_HD static inline void
CT_REAL(ct_adadelta_apply)(const CT_REAL(ct_adadelta_coef) * c, ct_real grad,
                           ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    state[0] = state[0] * c->rho + c->one_minus_rho * g * g;
    const ct_real delta = CT_SQRT(state[1] + c->eps) / CT_SQRT(state[0] + c->eps) * g;
    state[1] = state[1] * c->rho + c->one_minus_rho * delta * delta;
    *param = *param - c->lr * delta;
}
