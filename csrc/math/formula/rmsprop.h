/* RMSprop for one element of type ct_real.
 *
 * Source: Hinton, "Neural Networks for Machine Learning", 2012, lecture 6, and Graves,
 * "Generating Sequences With Recurrent Neural Networks", 2013, for the centred form, in
 * the form and order of operations of torch.optim.RMSprop. A difference: a centred
 * variance that is negative by rounding counts as 0; torch's root gives NaN. */

#ifndef CT_RMSPROP_COEF
#define CT_RMSPROP_COEF(REAL, FLAG)                                                    \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(alpha)                                                                        \
    REAL(one_minus_alpha)                                                              \
    REAL(lerp) /* the weight and the start of ct_average */                            \
    REAL(momentum)                                                                     \
    REAL(eps)                                                                          \
    FLAG(from_grad)
CT_COEF(ct_rmsprop, CT_RMSPROP_COEF)
#endif
CT_ROUNDED(ct_rmsprop, CT_RMSPROP_COEF)

/* The gradient with weight decay; adds the square to the average. */
CT_HD static inline ct_real
CT_REAL(ct_rmsprop_grad)(const CT_REAL(ct_rmsprop_coef) * c, ct_real grad,
                         ct_real param, ct_real *square_avg)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, param);
    *square_avg = *square_avg * c->alpha + c->one_minus_alpha * g * g;
    return g;
}

/* The divisor of the centred form; adds the gradient to its average. */
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
