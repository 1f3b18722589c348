/* Adamax for one element of type ct_real: the only place that states the formula. */

CT_ROUNDED(ct_adamax, CT_ADAMAX_COEF)

/* state is the first moment and the infinity norm. */
CT_HD static inline void
CT_REAL(ct_adamax_apply)(const CT_REAL(ct_adamax_coef) * c, ct_real grad,
                         ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    const ct_real size = CT_REAL(ct_magnitude)(g) + c->grad_eps;
    state[0] = CT_REAL(ct_average)(state[0], g, c->lerp, c->from_grad);
    state[1] = CT_REAL(ct_larger)(state[1] * c->beta2, size);
    *param = *param * c->decay - c->step_size * state[0] / (state[1] + c->norm_eps);
}
