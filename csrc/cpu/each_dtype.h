/* The part of expand.h that one instruction set, CT_SET, needs: CT_BODY per dtype. */
#define CT_PASTE3(a, b, c) a##_##b##_##c
#define CT_PASTE3_EXPANDED(a, b, c) CT_PASTE3(a, b, c)
#define CT_NAME(function) CT_PASTE3_EXPANDED(function, CT_TYPE, CT_SET)

#define CT_TYPE f32
#define ct_elem float
#define ct_real float
#define CT_REAL(name) name##_f32
#define CT_LOAD(x) (x)
#define CT_STORE(x) (x)
#define CT_STORE_F64(x) ((float)(x))
#include CT_BODY
#undef CT_TYPE
#undef ct_elem
#undef CT_LOAD
#undef CT_STORE
#undef CT_STORE_F64

#if !defined(CT_ONLY_F32_F64) && !defined(CT_ONLY_F32)
#define CT_TYPE bf16
#define ct_elem uint16_t
#define CT_LOAD(x) ct_f32_from_bf16(x)
#define CT_STORE(x) ct_bf16_from_f32(x)
#define CT_STORE_F64(x) ct_bf16_from_f64(x)
#define CT_PAIRS
#include CT_BODY
#undef CT_PAIRS
#undef CT_TYPE
#undef CT_LOAD
#undef CT_STORE
#undef CT_STORE_F64

#ifndef CT_NO_F16
#define CT_TYPE f16
#define CT_LOAD(x) ct_f32_from_f16(x)
#define CT_STORE(x) ct_f16_from_f32(x)
#define CT_STORE_F64(x) ct_f16_from_f64(x)
#include CT_BODY
#undef CT_TYPE
#undef CT_LOAD
#undef CT_STORE
#undef CT_STORE_F64
#endif
#undef ct_elem
#endif
#undef ct_real
#undef CT_REAL

#ifndef CT_ONLY_F32
#define CT_TYPE f64
#define ct_elem double
#define ct_real double
#define CT_REAL(name) name##_f64
#define CT_LOAD(x) (x)
#define CT_STORE(x) (x)
#define CT_STORE_F64(x) (x)
#include CT_BODY
#undef CT_TYPE
#undef ct_elem
#undef ct_real
#undef CT_REAL
#undef CT_LOAD
#undef CT_STORE
#undef CT_STORE_F64
#endif

#undef CT_PASTE3
#undef CT_PASTE3_EXPANDED
#undef CT_NAME
