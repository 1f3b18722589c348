/* exp(x) for x <= 0; 0 below the smallest normal number, NaN for NaN. The polynomial's
 * next term is below 2^-27 of the result in float, below 2^-57 in double. */
CT_HD static inline ct_real
CT_REAL(ct_exp_below)(ct_real x)
{
    const int is_double = sizeof(ct_real) == 8;
    const ct_real least = (ct_real)(is_double ? -708.39 : -87.33);
    const ct_real shift = (ct_real)(is_double ? 6755399441055744.0 : 12582912.0);
    const ct_real high = (ct_real)(is_double ? 0.6931471803691238 : 0.693145751953125);
    const ct_real low =
        (ct_real)(is_double ? 1.9082149292705877e-10 : 1.4286068203094173e-06);

    const ct_real shifted = x * (ct_real)1.4426950408889634 + shift;
    const ct_real k = shifted - shift;
    const ct_real r = (x - k * high) - k * low;
    ct_real p = (ct_real)(1.0 / 5040.0);
    if (is_double) {
        p = (ct_real)(1.0 / 6227020800.0);
        p = p * r + (ct_real)(1.0 / 479001600.0);
        p = p * r + (ct_real)(1.0 / 39916800.0);
        p = p * r + (ct_real)(1.0 / 3628800.0);
        p = p * r + (ct_real)(1.0 / 362880.0);
        p = p * r + (ct_real)(1.0 / 40320.0);
        p = p * r + (ct_real)(1.0 / 5040.0);
    }
    p = p * r + (ct_real)(1.0 / 720.0);
    p = p * r + (ct_real)(1.0 / 120.0);
    p = p * r + (ct_real)(1.0 / 24.0);
    p = p * r + (ct_real)(1.0 / 6.0);
    p = p * r + (ct_real)0.5;
    p = p * r + (ct_real)1.0;
    p = p * r + (ct_real)1.0;
    return x < least ? (ct_real)0.0 : p * CT_REAL(ct_power_of_two)(shifted);
}

/* The derivative by a logit that is no target's: the probability times the scale, less
 * the smoothed share. factor: scale / the sum of exponentials. */
CT_HD static inline ct_real
CT_REAL(ct_softmax_grad)(ct_real logit, ct_real most, ct_real factor, ct_real share)
{
    return CT_REAL(ct_exp_below)(logit - most) * factor - share;
}
