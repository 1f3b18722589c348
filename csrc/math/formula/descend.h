/* A step along a direction, of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_descend_coef) {
    ct_real decay;
    ct_real step_size;
} CT_REAL(ct_descend_coef);

CT_HD static inline CT_REAL(ct_descend_coef)
    CT_REAL(ct_descend_round)(const ct_descend_coef *c)
{
    CT_REAL(ct_descend_coef) r;
    r.decay = (ct_real)c->decay;
    r.step_size = (ct_real)c->step_size;
    return r;
}

CT_HD static inline void
CT_REAL(ct_descend_apply)(const CT_REAL(ct_descend_coef) * c, ct_real grad,
                          ct_real *param, ct_real *state)
{
    (void)state;
    *param = *param * c->decay - c->step_size * grad;
}
