/* Which of the compiled instruction sets the kernels use. */
#ifndef CT_CPU_ISA_H
#define CT_CPU_ISA_H

#include "core/base/span.h"
#include "core/base/status.h"

typedef enum ct_isa {
    CT_ISA_BASE,
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CT_HAVE_X86_LEVELS 1
    CT_ISA_V3,
    CT_ISA_V4,
#endif
    CT_ISA_COUNT
} ct_isa;

/* The set in use, chosen at the first call. CT_EINVAL when CTRAINER_ISA names a set
 * that is unknown or missing in this processor. */
CT_NODISCARD ct_status ct_isa_get(ct_isa *isa, ct_error *err);

/* CT_EINVAL, naming the kernel and the span, unless dtype is a float. */
CT_NODISCARD ct_status ct_check_float(const char *kernel, size_t span, ct_dtype dtype,
                                      ct_error *err);

/* The initialiser of a table [instruction set][float dtype] of a function
 * compiled by expand.h: for all dtypes, for all but float16 (CT_NO_F16), or for float32
 * and float64 alone (CT_ONLY_F32_F64). */
#define CT_BODIES(function) CT_EACH_SET(CT_BODIES_OF, function)
#define CT_BODIES_NO_F16(function) CT_EACH_SET(CT_BODIES_NO_F16_OF, function)
#define CT_REAL_BODIES(function) CT_EACH_SET(CT_REAL_BODIES_OF, function)

#define CT_REALS_OF(function, set)                                                     \
    [CT_F32] = function##_f32_##set, [CT_F64] = function##_f64_##set
#define CT_REAL_BODIES_OF(function, set) {CT_REALS_OF(function, set)}
#define CT_BODIES_NO_F16_OF(function, set)                                             \
    {CT_REALS_OF(function, set), [CT_BF16] = function##_bf16_##set}
#define CT_BODIES_OF(function, set)                                                    \
    {CT_REALS_OF(function, set), [CT_BF16] = function##_bf16_##set,                    \
     [CT_F16] = function##_f16_##set}
#ifdef CT_HAVE_X86_LEVELS
#define CT_EACH_SET(of, function)                                                      \
    {[CT_ISA_BASE] = of(function, base),                                               \
     [CT_ISA_V3] = of(function, v3),                                                   \
     [CT_ISA_V4] = of(function, v4)}
#else
#define CT_EACH_SET(of, function) {[CT_ISA_BASE] = of(function, base)}
#endif

enum {
    CT_FLOAT_DTYPES = CT_F16 + 1 /* the float dtypes come first in ct_dtype */
};

#endif
