/* Compiles the kernel body in the file CT_BODY once per instruction set and dtype.
 *
 * C has no templates; this file and each_dtype.h are ours. Include it with CT_BODY set
 * to a header that defines static functions named CT_NAME(function): it gets _f32_base,
 * _bf16_v4 and so on (with CT_ONLY_F32_F64 no 16-bit types, with CT_NO_F16 no float16),
 * and in the body
 *
 *     ct_elem              what lies in memory
 *     ct_real              what is computed with: double for F64, else float
 *     CT_LOAD, CT_STORE    between the two; CT_STORE_F64 from a double
 *     CT_PAIRS             defined for bfloat16, which math/half.h has in pairs
 *     CT_REAL(name)        name_f32 or name_f64, by ct_real
 *
 * Every function that a body inlines was compiled for the base set, which is a part
 * of the others. Features are listed instead of arch=x86-64-v3 because GCC inlines
 * across a difference in features but not across one in arch. */
#include "cpu/isa.h"
#include "math/half.h"

#define CT_SET base
#include "cpu/each_dtype.h"
#undef CT_SET

#ifdef CT_HAVE_X86_LEVELS
#pragma GCC push_options
#pragma GCC target("sse4.2,popcnt,cx16,sahf,avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe")
#define CT_SET v3
#include "cpu/each_dtype.h"
#undef CT_SET
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#pragma GCC target("prefer-vector-width=512")
#define CT_SET v4
#include "cpu/each_dtype.h"
#undef CT_SET
#pragma GCC pop_options
#endif
