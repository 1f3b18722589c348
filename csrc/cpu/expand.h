/* Compiles the kernel body in the file CT_BODY once per instruction set and dtype.
 *
 * This file and each_dtype.h take the place of templates. Include it with CT_BODY set
 * to a header that defines static functions named CT_NAME(function): the suffix is
 * _f32_base, _bf16_v4 and so on (with CT_ONLY_F32_F64 no bf16 nor fp16, with
 * CT_ONLY_F32 no float64 either, with CT_NO_F16 no float16), and in the body
 *
 *     ct_elem              the type in memory
 *     ct_real              the type of the computation: double for F64, else float
 *     CT_LOAD, CT_STORE    between the two; CT_STORE_F64 from a double
 *     CT_PAIRS             defined for bfloat16: math/half.h converts pairs
 *     CT_REAL(name)        name_f32 or name_f64, by ct_real
 *
 * Every function inlined by a body was compiled for the base set, a part of the other
 * sets. Features are listed instead of arch=x86-64-v3 because GCC inlines across a
 * difference in features but not in arch. */
#include "cpu/kernels.h"
#include "math/half.h"

#define CT_SET base
#include "cpu/each_dtype.h"
#undef CT_SET

#ifdef CT_COMPILE_X86_LEVELS
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

#undef CT_BODY
#undef CT_NO_F16
#undef CT_ONLY_F32_F64
#undef CT_ONLY_F32
