/* AdamW and Adam for one element of type ct_real.
 *
 * cpu/update.c loops over the formula and cuda/update.cu launches over it, so a fix
 * lands on both and a test can demand equal bits instead of a tolerance. It holds
 * because
 * + - * / and the square root are correctly rounded on both and neither compiler may
 * fuse a * b + c: the build passes -ffp-contract=off to cc and --fmad=false to nvcc.
 * Never add exp, pow or the like to the formula; compute such constants on the host.
 *
 * Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019,
 * algorithm 2; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015;
 * Reddi et al., "On the Convergence of Adam and Beyond", 2018, for amsgrad. In the
 * order of operations of torch.optim.AdamW but for one: the square root is multiplied
 * by a rounded 1 / sqrt(1 - beta2^step), not divided by the root. This adds at most one
 * rounding and saves a division, slower than memory.
 */

#ifndef CT_ADAMW_COEF
#define CT_ADAMW_COEF(REAL, FLAG)                                                      \
    REAL(grad_scale)   /* clip coefficient / loss scale: saves a pass over grads */    \
    REAL(decay)        /* 1 - lr * weight_decay; 1 unless decoupled */                 \
    REAL(weight_decay) /* added to the gradient, or 0 */                               \
    REAL(lerp)         /* the weight and the start of ct_average */                    \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(step_size) /* lr / (1 - beta1^step) */                                        \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(eps)                                                                          \
    FLAG(from_grad)
CT_COEF(ct_adamw, CT_ADAMW_COEF)
#endif
CT_ROUNDED(ct_adamw, CT_ADAMW_COEF)

/* The step from a scaled gradient; state is the moments of grad and of grad^2. A NaN or
 * Inf in grad reaches both and the parameter: the optimizer's step checks beforehand.
 * Returns the new second moment, the divisor of `root`. */
CT_HD static inline ct_real
CT_REAL(ct_adam_moments)(const CT_REAL(ct_adamw_coef) * c, ct_real g, ct_real *state)
{
    state[0] = CT_REAL(ct_average)(state[0], g, c->lerp, c->from_grad);
    state[1] = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    return state[1];
}

CT_HD static inline ct_real
CT_REAL(ct_adam_moved)(const CT_REAL(ct_adamw_coef) * c, ct_real param, ct_real m,
                       ct_real v)
{
    const ct_real denom = CT_SQRT(v) * c->inv_bias2 + c->eps;
    return param * c->decay - c->step_size * m / denom;
}

CT_HD static inline void
CT_REAL(ct_adamw_apply)(const CT_REAL(ct_adamw_coef) * c, ct_real grad, ct_real *param,
                        ct_real *state)
{
    const ct_real v = CT_REAL(ct_adam_moments)(c, grad * c->grad_scale, state);
    *param = CT_REAL(ct_adam_moved)(c, *param, state[0], v);
}

/* With the largest second moment so far, state[2], in place of the last. */
CT_HD static inline void
CT_REAL(ct_adamw_amsgrad_apply)(const CT_REAL(ct_adamw_coef) * c, ct_real grad,
                                ct_real *param, ct_real *state)
{
    const ct_real v = CT_REAL(ct_adam_moments)(c, grad * c->grad_scale, state);
    state[2] = CT_REAL(ct_larger)(state[2], v);
    *param = CT_REAL(ct_adam_moved)(c, *param, state[0], state[2]);
}

/* Adam: the weight decay is part of the gradient. */
CT_HD static inline void
CT_REAL(ct_adam_apply)(const CT_REAL(ct_adamw_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    const ct_real v = CT_REAL(ct_adam_moments)(c, g, state);
    *param = CT_REAL(ct_adam_moved)(c, *param, state[0], v);
}

CT_HD static inline void
CT_REAL(ct_adam_amsgrad_apply)(const CT_REAL(ct_adamw_coef) * c, ct_real grad,
                               ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    const ct_real v = CT_REAL(ct_adam_moments)(c, g, state);
    state[2] = CT_REAL(ct_larger)(state[2], v);
    *param = CT_REAL(ct_adam_moved)(c, *param, state[0], state[2]);
}
