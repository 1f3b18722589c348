/* Parts of formulas for one element of type ct_real. */

/* The scaled gradient plus the weight decay. Without weight decay the parameter does
 * not enter, not even as 0 * Inf. */
CT_HD static inline ct_real
CT_REAL(ct_l2_grad)(ct_real grad, ct_real grad_scale, ct_real weight_decay,
                    ct_real param)
{
    const ct_real g = grad * grad_scale;
    return weight_decay != (ct_real)0 ? g + weight_decay * param : g;
}

/* The computation of a moving average is exact at its starting end, so it starts from
 * the nearer end: keep = 0 gives exactly the new value. */
CT_HD static inline ct_real
CT_REAL(ct_average)(ct_real old, ct_real value, ct_real weight, int from_new)
{
    const ct_real start = from_new ? value : old;
    return start + weight * (value - old);
}

/* The larger, or NaN if either is NaN. */
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
