/* Includes the header CT_FORMULA twice, once for float and once for double.
 *
 * C has no templates. A formula is written with ct_real for the type, CT_SQRT for the
 * square root, and CT_REAL(name) for name_f32 and name_f64. Not guarded: included for
 * each formula. */
#define ct_real float
#define CT_REAL(name) name##_f32
#define CT_SQRT(x) sqrtf(x)
#include CT_FORMULA
#undef ct_real
#undef CT_REAL
#undef CT_SQRT

#define ct_real double
#define CT_REAL(name) name##_f64
#define CT_SQRT(x) sqrt(x)
#include CT_FORMULA
#undef ct_real
#undef CT_REAL
#undef CT_SQRT
#undef CT_FORMULA
