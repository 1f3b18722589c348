/* Muon's momentum for one element of type ct_real: the parameter becomes the momentum's
 * direction. A second, measured rule (math/measured.def) divides a whole matrix, given
 * as the gradient, by its norm. Newton-Schulz follows (core/optim/muon.h).
 *
 * Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024, in the form of torch.optim.Muon. */

#ifndef CT_MUON_COEF
#define CT_MUON_COEF(REAL, FLAG)                                                       \
    REAL(grad_scale)                                                                   \
    REAL(momentum)                                                                     \
    REAL(one_minus_momentum)                                                           \
    REAL(eps) /* the least norm to divide by */                                        \
    FLAG(nesterov)                                                                     \
    FLAG(from_grad) /* averages start from the gradient: momentum < 0.5 */             \
    REAL(inv_norm)  /* settled */                                                      \
    REAL(lr)        /* of the step that follows, as all below */                       \
    REAL(weight_decay)                                                                 \
    REAL(a) /* Newton-Schulz's coefficients */                                         \
    REAL(b)                                                                            \
    REAL(c)                                                                            \
    FLAG(n_steps)                                                                      \
    FLAG(adjust) /* a ct_muon_adjust */
CT_COEF(ct_muon, CT_MUON_COEF)

CT_HD static inline void
ct_muon_settle(ct_muon_coef *c, const double *sums, double n)
{
    const double norm = sqrt(sums[0]);
    (void)n;
    c->inv_norm = 1.0 / (norm > c->eps ? norm : c->eps);
}
#endif
CT_ROUNDED(ct_muon, CT_MUON_COEF)

/* momentum * average + (1 - momentum) * grad, from the nearer end. */
CT_HD static inline ct_real
CT_REAL(ct_muon_blend)(const CT_REAL(ct_muon_coef) * c, ct_real grad, ct_real average)
{
    return c->from_grad ? grad + c->momentum * (average - grad)
                        : average + c->one_minus_momentum * (grad - average);
}

CT_HD static inline ct_real
CT_REAL(ct_muon_direction)(const CT_REAL(ct_muon_coef) * c, ct_real grad,
                           ct_real average)
{
    return c->nesterov ? CT_REAL(ct_muon_blend)(c, grad * c->grad_scale, average)
                       : average;
}

/* The new momentum buffer, and the direction. */
CT_HD static inline void
CT_REAL(ct_muon_apply)(const CT_REAL(ct_muon_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    state[0] = CT_REAL(ct_muon_blend)(c, grad * c->grad_scale, state[0]);
    *param = CT_REAL(ct_muon_direction)(c, grad, state[0]);
}

CT_HD static inline void
CT_REAL(ct_muon_normalize_measure)(const CT_REAL(ct_muon_coef) * c, ct_real grad,
                                   ct_real param, ct_real *state, ct_real *terms)
{
    (void)c, (void)param, (void)state;
    terms[0] = grad;
    terms[1] = 0;
}

CT_HD static inline void
CT_REAL(ct_muon_normalize_apply)(const CT_REAL(ct_muon_coef) * c, ct_real grad,
                                 ct_real *param, ct_real *state)
{
    (void)state;
    *param = c->inv_norm * grad;
}
