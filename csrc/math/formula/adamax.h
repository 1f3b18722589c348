/* Adamax for one element of type ct_real.
 *
 * Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015,
 * algorithm 2. torch.optim.Adamax adds eps to the magnitude of the gradient before the
 * maximum is taken, fairseq's Adamax to the maximum; the other eps is 0. */

#ifndef CT_ADAMAX_COEF
#define CT_ADAMAX_COEF(REAL, FLAG)                                                     \
    REAL(grad_scale)   /* clip coefficient / loss scale: saves a pass over grads */    \
    REAL(decay)        /* 1 - lr * weight_decay; 1 unless decoupled */                 \
    REAL(weight_decay) /* added to the gradient, or 0 */                               \
    REAL(lerp)         /* the weight and the start of ct_average */                    \
    REAL(beta2)                                                                        \
    REAL(step_size) /* lr / (1 - beta1^step), or lr */                                 \
    REAL(grad_eps)                                                                     \
    REAL(norm_eps)                                                                     \
    FLAG(from_grad)
CT_COEF(ct_adamax, CT_ADAMAX_COEF)
#endif
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
