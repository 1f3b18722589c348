/* A step along a direction that is given as the gradient: param * decay - step * grad,
 * in float and in double. */

#ifndef CT_DESCEND_COEF
#define CT_DESCEND_COEF(REAL, FLAG)                                                    \
    REAL(decay)                                                                        \
    REAL(step_size)
CT_COEF(ct_descend, CT_DESCEND_COEF)
#endif
CT_ROUNDED(ct_descend, CT_DESCEND_COEF)

CT_HD static inline void
CT_REAL(ct_descend_apply)(const CT_REAL(ct_descend_coef) * c, ct_real grad,
                          ct_real *param, ct_real *state)
{
    (void)state;
    *param = *param * c->decay - c->step_size * grad;
}
