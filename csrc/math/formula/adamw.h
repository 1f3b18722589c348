/* AdamW and Adam for one element of type ct_real: the only place that states them. */

CT_ROUNDED(ct_adamw, CT_ADAMW_COEF)

/* The step from a gradient that is scaled; state is the moments of grad and of grad^2.
 * A NaN or Inf in grad reaches both and the parameter: finding it beforehand is the
 * step's job. Returns the new second moment, by which `root` divides. */
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

/* With the largest second moment so far, state[2], in place of the last one. */
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
