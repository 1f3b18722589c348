/* Parts of formulas for one element of type ct_real. */

/* The scaled gradient with the weight decay added to it. Without one the parameter does
 * not enter, not even as 0 * Inf. */
CT_HD static inline ct_real
CT_REAL(ct_l2_grad)(ct_real grad, ct_real grad_scale, ct_real weight_decay,
                    ct_real param)
{
    const ct_real g = grad * grad_scale;
    return weight_decay != (ct_real)0 ? g + weight_decay * param : g;
}

/* A moving average is exact at the end it starts from, so it starts from the nearer
 * one: keep = 0 gives the new value and not a rounded one. */
CT_HD static inline ct_real
CT_REAL(ct_average)(ct_real old, ct_real value, ct_real weight, int from_new)
{
    const ct_real start = from_new ? value : old;
    return start + weight * (value - old);
}

/* The larger one, or NaN where either is. */
CT_HD static inline ct_real
CT_REAL(ct_larger)(ct_real a, ct_real b)
{
    return a >= b || a != a ? a : b;
}

CT_HD static inline ct_real
CT_REAL(ct_magnitude)(ct_real x)
{
    return x < (ct_real)0 ? -x : x;
}
