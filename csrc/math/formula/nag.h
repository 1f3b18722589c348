/* NAG for one element of type ct_real: the only place that states the formula. */

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
