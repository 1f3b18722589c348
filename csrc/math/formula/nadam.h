/* NAdam for one element of type ct_real. */

CT_ROUNDED(ct_nadam, CT_NADAM_COEF)

/* state is the moments of grad and of grad^2. */
CT_HD static inline void
CT_REAL(ct_nadam_apply)(const CT_REAL(ct_nadam_coef) * c, ct_real grad, ct_real *param,
                        ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    state[0] = CT_REAL(ct_average)(state[0], g, c->lerp, c->from_grad);
    state[1] = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    const ct_real denom = CT_SQRT(state[1]) * c->inv_bias2 + c->eps;
    const ct_real ahead = c->grad_step * g + c->moment_step * state[0];
    *param = *param * c->decay - ahead / denom;
}
