/* Schedule-free AdamW and SGD for one element of type ct_real.
 *
 * Source: Defazio et al., "The Road Less Scheduled", 2024, algorithm 1, in
 * the form of the package schedulefree: y and z are kept, not x. The parameter is y,
 * the point of the gradients; the package's ckp1 is the weight of the new iterate z in
 * the average x. */

#ifndef CT_SCHEDULE_FREE_COEF
#define CT_SCHEDULE_FREE_COEF(REAL, FLAG)                                              \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(lerp)      /* the weight and the start of ct_average, of y and z */           \
    REAL(grad_step) /* lr * (beta1 * (1 - ckp1) - 1) */                                \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(eps)                                                                          \
    FLAG(from_z)
CT_COEF(ct_schedule_free, CT_SCHEDULE_FREE_COEF)
#endif
CT_ROUNDED(ct_schedule_free, CT_SCHEDULE_FREE_COEF)

/* Moves y and z by a gradient that is normalised and has no weight decay yet. */
CT_HD static inline void
CT_REAL(ct_schedule_free_move)(const CT_REAL(ct_schedule_free_coef) * c, ct_real grad,
                               ct_real *y, ct_real *z)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, (ct_real)1, c->weight_decay, *y);
    *y = CT_REAL(ct_average)(*y, *z, c->lerp, c->from_z) + c->grad_step * g;
    *z = *z - c->lr * g;
}

/* state is z. */
CT_HD static inline void
CT_REAL(ct_schedule_free_sgd_apply)(const CT_REAL(ct_schedule_free_coef) * c,
                                    ct_real grad, ct_real *param, ct_real *state)
{
    CT_REAL(ct_schedule_free_move)(c, grad * c->grad_scale, param, &state[0]);
}

/* state is z and the second moment. */
CT_HD static inline void
CT_REAL(ct_schedule_free_adamw_apply)(const CT_REAL(ct_schedule_free_coef) * c,
                                      ct_real grad, ct_real *param, ct_real *state)
{
    const ct_real g = grad * c->grad_scale;
    state[1] = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    const ct_real denom = CT_SQRT(state[1]) * c->inv_bias2 + c->eps;
    CT_REAL(ct_schedule_free_move)(c, g / denom, param, &state[0]);
}
