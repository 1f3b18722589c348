/* An element of type ct_real times a factor, with |x| <= limit; NaN stays NaN. The only
 * statement of the formula. */
CT_HD static inline ct_real
CT_REAL(ct_scale_apply)(ct_real x, ct_real factor, ct_real limit)
{
    const ct_real product = x * factor;
    return product > limit ? limit : product < -limit ? -limit : product;
}
