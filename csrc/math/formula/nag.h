/* Nesterov's accelerated gradient for an element, in fairseq's form, in float and in
 * double.
 *
 * Source: Nesterov's method with the parameter kept at the point ahead
 * (Bengio, Boulanger-Lewandowski and Pascanu, "Advances in Optimizing Recurrent
 * Networks", 2013, eq. 6 and 7), in the order of operations of fairseq's
 * optim/nag.py. The momentum is of updates, not of gradients, so a change of the
 * learning rate rescales the momentum. */

#ifndef CT_NAG_COEF
#define CT_NAG_COEF(REAL, FLAG)                                                        \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(decay)      /* 1 - lr * weight_decay */                                       \
    REAL(carry)      /* momentum * lr / the last lr */                                 \
    REAL(ahead)      /* momentum * carry */                                            \
    REAL(grad_step)  /* (1 + momentum) * lr */                                         \
    REAL(lr)
CT_COEF(ct_nag, CT_NAG_COEF)
#endif
CT_ROUNDED(ct_nag, CT_NAG_COEF)

/* state is the momentum: a decaying sum of updates. */
CT_HD static inline void
CT_REAL(ct_nag_apply)(const CT_REAL(ct_nag_coef) * c, ct_real grad, ct_real *param,
                      ct_real *state)
{
    const ct_real g = grad * c->grad_scale;
    *param = *param * c->decay + c->ahead * state[0] - c->grad_step * g;
    state[0] = state[0] * c->carry - c->lr * g;
}
