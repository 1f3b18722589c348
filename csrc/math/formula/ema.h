/* The average for one element of type ct_real: the only place that states the formula.
 */
CT_HD static inline ct_real
CT_REAL(ct_ema_apply)(const ct_ema_coef *c, ct_real ema, ct_real param)
{
    return ema * (ct_real)c->decay + (ct_real)c->rest * param;
}
