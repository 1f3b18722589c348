/* Which of the compiled instruction sets the kernels use. */
#ifndef CT_CPU_ISA_H
#define CT_CPU_ISA_H

#include "core/ct_dtype.h"
#include "core/ct_status.h"

typedef enum ct_isa {
    CT_ISA_BASE,
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CT_HAVE_X86_LEVELS 1
    CT_ISA_V3,
    CT_ISA_V4,
#endif
    CT_ISA_COUNT
} ct_isa;

/* The set in use, chosen at the first call. CT_EINVAL when CTRAINER_ISA names one that
 * is unknown or that this processor lacks. */
CT_NODISCARD ct_status ct_isa_get(ct_isa *isa, ct_error *err);

/* CT_EINVAL, naming the kernel and the span, unless dtype is a float. */
CT_NODISCARD ct_status ct_check_float(const char *kernel, size_t span, ct_dtype dtype,
                                      ct_error *err);

/* The initialiser of a table [instruction set][float dtype] of a function that
 * expand.h has compiled. */
#define CT_BODIES_OF(function, set)                                                    \
    {[CT_F32] = function##_f32_##set,                                                  \
     [CT_F64] = function##_f64_##set,                                                  \
     [CT_BF16] = function##_bf16_##set,                                                \
     [CT_F16] = function##_f16_##set}
#ifdef CT_HAVE_X86_LEVELS
#define CT_BODIES(function)                                                            \
    {[CT_ISA_BASE] = CT_BODIES_OF(function, base),                                     \
     [CT_ISA_V3] = CT_BODIES_OF(function, v3),                                         \
     [CT_ISA_V4] = CT_BODIES_OF(function, v4)}
#else
#define CT_BODIES(function) {[CT_ISA_BASE] = CT_BODIES_OF(function, base)}
#endif

/* The same of a function that was compiled with CT_ONLY_F32_F64. */
#define CT_REAL_BODIES_OF(function, set)                                               \
    {[CT_F32] = function##_f32_##set, [CT_F64] = function##_f64_##set}
#ifdef CT_HAVE_X86_LEVELS
#define CT_REAL_BODIES(function)                                                       \
    {[CT_ISA_BASE] = CT_REAL_BODIES_OF(function, base),                                \
     [CT_ISA_V3] = CT_REAL_BODIES_OF(function, v3),                                    \
     [CT_ISA_V4] = CT_REAL_BODIES_OF(function, v4)}
#else
#define CT_REAL_BODIES(function) {[CT_ISA_BASE] = CT_REAL_BODIES_OF(function, base)}
#endif

enum {
    CT_FLOAT_DTYPES = CT_F16 + 1 /* the float dtypes come first in ct_dtype */
};

#endif
