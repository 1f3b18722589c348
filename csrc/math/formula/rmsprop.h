/* RMSprop for one element of type ct_real: the only place that states the formula. */

CT_ROUNDED(ct_rmsprop, CT_RMSPROP_COEF)

/* The gradient as the rule sees it, and its square into the average. */
CT_HD static inline ct_real
CT_REAL(ct_rmsprop_grad)(const CT_REAL(ct_rmsprop_coef) * c, ct_real grad,
                         ct_real param, ct_real *square_avg)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, param);
    *square_avg = *square_avg * c->alpha + c->one_minus_alpha * g * g;
    return g;
}

/* What the gradient is divided by in the centred form, and it into its average. */
CT_HD static inline ct_real
CT_REAL(ct_rmsprop_deviation)(const CT_REAL(ct_rmsprop_coef) * c, ct_real g,
                              ct_real square_avg, ct_real *grad_avg)
{
    *grad_avg = CT_REAL(ct_average)(*grad_avg, g, c->lerp, c->from_grad);
    const ct_real variance = square_avg - *grad_avg * *grad_avg;
    return CT_SQRT(variance < (ct_real)0 ? (ct_real)0 : variance) + c->eps;
}

CT_HD static inline void
CT_REAL(ct_rmsprop_apply)(const CT_REAL(ct_rmsprop_coef) * c, ct_real grad,
                          ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_rmsprop_grad)(c, grad, *param, &state[0]);
    *param = *param - c->lr * g / (CT_SQRT(state[0]) + c->eps);
}

/* state[1] is the momentum buffer. */
CT_HD static inline void
CT_REAL(ct_rmsprop_momentum_apply)(const CT_REAL(ct_rmsprop_coef) * c, ct_real grad,
                                   ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_rmsprop_grad)(c, grad, *param, &state[0]);
    state[1] = state[1] * c->momentum + g / (CT_SQRT(state[0]) + c->eps);
    *param = *param - c->lr * state[1];
}

/* state[1] is the average of the gradient. */
CT_HD static inline void
CT_REAL(ct_rmsprop_centered_apply)(const CT_REAL(ct_rmsprop_coef) * c, ct_real grad,
                                   ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_rmsprop_grad)(c, grad, *param, &state[0]);
    const ct_real avg = CT_REAL(ct_rmsprop_deviation)(c, g, state[0], &state[1]);
    *param = *param - c->lr * g / avg;
}

/* state[1] is the momentum buffer, state[2] the average of the gradient. */
CT_HD static inline void
CT_REAL(ct_rmsprop_centered_momentum_apply)(const CT_REAL(ct_rmsprop_coef) * c,
                                            ct_real grad, ct_real *param,
                                            ct_real *state)
{
    const ct_real g = CT_REAL(ct_rmsprop_grad)(c, grad, *param, &state[0]);
    const ct_real avg = CT_REAL(ct_rmsprop_deviation)(c, g, state[0], &state[2]);
    state[1] = state[1] * c->momentum + g / avg;
    *param = *param - c->lr * state[1];
}
