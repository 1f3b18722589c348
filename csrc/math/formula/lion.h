/* Lion for one element of type ct_real: the only place that states the formula. */

CT_ROUNDED(ct_lion, CT_LION_COEF)

/* state is the moment of the gradient. Its update does not reach the parameter but by
 * its sign, so where that is 0 or NaN the parameter does not move. */
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
