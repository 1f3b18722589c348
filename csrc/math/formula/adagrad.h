/* Adagrad for one element of type ct_real: the only place that states the formula. */

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
