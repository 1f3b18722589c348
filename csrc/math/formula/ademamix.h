/* AdEMAMix for one element of type ct_real: the only place that states the formula. */

CT_ROUNDED(ct_ademamix, CT_ADEMAMIX_COEF)

/* state is the fast and the slow moment of the gradient, and its second moment. */
CT_HD static inline void
CT_REAL(ct_ademamix_apply)(const CT_REAL(ct_ademamix_coef) * c, ct_real grad,
                           ct_real *param, ct_real *state)
{
    const ct_real g = grad * c->grad_scale;
    state[0] = CT_REAL(ct_average)(state[0], g, c->fast, c->fast_from_grad);
    state[1] = CT_REAL(ct_average)(state[1], g, c->slow, c->slow_from_grad);
    state[2] = state[2] * c->beta2 + c->one_minus_beta2 * g * g;
    const ct_real denom = CT_SQRT(state[2]) * c->inv_bias2 + c->eps;
    const ct_real mixed = state[0] * c->inv_bias1 + c->alpha * state[1];

    *param = *param * c->decay - c->lr * mixed / denom;
}
