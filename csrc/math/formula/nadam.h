/* NAdam for one element of type ct_real.
 *
 * Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016, algorithm 2 with
 * the momenta of its section 2; in the form of torch.optim.NAdam, but with the gradient
 * and its average added before the division.
 */

#ifndef CT_NADAM_COEF
/* The constants of a step of a parameter, computed in double. With mu(t) for the
 * momentum of step t and M(t) for mu(1) ... mu(t): */
#define CT_NADAM_COEF(REAL, FLAG)                                                      \
    REAL(grad_scale)   /* clip coefficient / loss scale: saves a pass over grads */    \
    REAL(decay)        /* 1 - lr * weight_decay; 1 unless decoupled */                 \
    REAL(weight_decay) /* added to the gradient, or 0 */                               \
    REAL(lerp)         /* the weight and the start of ct_average */                    \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(grad_step)   /* lr * (1 - mu(t)) / (1 - M(t)) */                              \
    REAL(moment_step) /* lr * mu(t + 1) / (1 - M(t + 1)) */                            \
    REAL(inv_bias2)   /* 1 / sqrt(1 - beta2^step) */                                   \
    REAL(eps)                                                                          \
    FLAG(from_grad)
CT_COEF(ct_nadam, CT_NADAM_COEF)
#endif
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
