/* The average of elements of one type. Expanded by cpu/expand.h for float and double.
 */
static void
CT_NAME(average)(void *average, const void *value, double decay, size_t n)
{
    const ct_ema_coef coef = ct_ema_coef_of(decay);
    ct_real *restrict a = average;
    const ct_real *restrict x = value;
    for (size_t i = 0; i < n; i++) {
        a[i] = CT_REAL(ct_ema_apply)(&coef, a[i], x[i]);
    }
}
