/* AdEMAMix for one element of type ct_real.
 *
 * Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster,
 * Older", 2024, algorithm 1. As in math/formula/adamw.h the root of the second moment
 * is multiplied by a rounded 1 / sqrt(1 - beta2^step). */

#ifndef CT_ADEMAMIX_COEF
#define CT_ADEMAMIX_COEF(REAL, FLAG)                                                   \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(decay)      /* 1 - lr * weight_decay */                                       \
    REAL(lr)                                                                           \
    REAL(fast) /* the weight and, below, the start of ct_average */                    \
    REAL(slow) /* the same of the slow average */                                      \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(inv_bias1) /* 1 / (1 - beta1^step) */                                         \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(alpha)                                                                        \
    REAL(eps)                                                                          \
    FLAG(fast_from_grad)                                                               \
    FLAG(slow_from_grad)
CT_COEF(ct_ademamix, CT_ADEMAMIX_COEF)
#endif
CT_ROUNDED(ct_ademamix, CT_ADEMAMIX_COEF)

/* state: the fast and the slow moment of the gradient, and the second moment. */
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
