/* One element of type ct_real times a factor, no further from 0 than limit; a NaN stays
 * one. The only place that states the formula. */
CT_HD static inline ct_real
CT_REAL(ct_scale_apply)(ct_real x, ct_real factor, ct_real limit)
{
    const ct_real product = x * factor;
    return product > limit ? limit : product < -limit ? -limit : product;
}
