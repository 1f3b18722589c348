/* AdamW for one element of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_adamw_coef) {
    ct_real grad_scale;
    ct_real decay;
    ct_real lerp;
    ct_real beta2;
    ct_real one_minus_beta2;
    ct_real step_size;
    ct_real inv_bias2;
    ct_real eps;
    int from_grad;
} CT_REAL(ct_adamw_coef);

CT_HD static inline CT_REAL(ct_adamw_coef)
    CT_REAL(ct_adamw_round)(const ct_adamw_coef *c)
{
    CT_REAL(ct_adamw_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.decay = (ct_real)c->decay;
    r.lerp = (ct_real)c->lerp;
    r.beta2 = (ct_real)c->beta2;
    r.one_minus_beta2 = (ct_real)c->one_minus_beta2;
    r.step_size = (ct_real)c->step_size;
    r.inv_bias2 = (ct_real)c->inv_bias2;
    r.eps = (ct_real)c->eps;
    r.from_grad = c->from_grad;
    return r;
}

/* state is the moments of grad and of grad^2. A NaN or Inf in grad reaches both and the
 * parameter: finding it beforehand is the step's job. The
 * average m + (1 - beta1) * (grad - m) is exact at the end it starts from, so it starts
 * from the nearer one: beta1 = 0 gives the gradient and not a rounded one. */
CT_HD static inline void
CT_REAL(ct_adamw_apply)(const CT_REAL(ct_adamw_coef) * c, ct_real grad, ct_real *param,
                        ct_real *state)
{
    const ct_real g = grad * c->grad_scale;
    const ct_real start = c->from_grad ? g : state[0];
    const ct_real m = start + c->lerp * (g - state[0]);
    const ct_real v = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    const ct_real denom = CT_SQRT(v) * c->inv_bias2 + c->eps;

    *param = *param * c->decay - c->step_size * m / denom;
    state[0] = m;
    state[1] = v;
}
