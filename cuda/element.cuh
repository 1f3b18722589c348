/* An element of each floating-point dtype: the stored type and the type of the
 * computation. */
#ifndef CT_CUDA_ELEMENT_CUH
#define CT_CUDA_ELEMENT_CUH

#include "core/base/span.h"
#include "launch.cuh"
#include "math/ema.h"
#include "math/half.h"

struct ct_bf16 {
    uint16_t bits;
};

struct ct_f16 {
    uint16_t bits;
};

__device__ inline float
ct_load(float stored)
{
    return stored;
}

__device__ inline double
ct_load(double stored)
{
    return stored;
}

__device__ inline float
ct_load(ct_bf16 stored)
{
    return ct_f32_from_bf16(stored.bits);
}

__device__ inline float
ct_load(ct_f16 stored)
{
    return ct_f32_from_f16(stored.bits);
}

/* Rounds to nearest, ties to even, once from either type. */
template <typename Real>
__device__ inline void
ct_store(Real value, float *to)
{
    *to = CT_COMPUTED((float)value);
}

template <typename Real>
__device__ inline void
ct_store(Real value, double *to)
{
    *to = CT_COMPUTED((double)value);
}

__device__ inline void
ct_store(float value, ct_bf16 *to)
{
    to->bits = ct_bf16_from_f32(CT_COMPUTED(value));
}

__device__ inline void
ct_store(double value, ct_bf16 *to)
{
    to->bits = ct_bf16_from_f64(CT_COMPUTED(value));
}

__device__ inline void
ct_store(float value, ct_f16 *to)
{
    to->bits = ct_f16_from_f32(CT_COMPUTED(value));
}

__device__ inline void
ct_store(double value, ct_f16 *to)
{
    to->bits = ct_f16_from_f64(CT_COMPUTED(value));
}

template <typename Element> struct ct_tag {
    typedef Element type;
    typedef decltype(ct_load(Element())) real; /* type of the computation */
};

/* Calls visit(ct_tag<Element>()) for the element type of a floating-point dtype. All
 * threads of a block have the same dtype, so no warp diverges. */
template <typename Visit>
__device__ inline void
ct_visit_float(ct_dtype dtype, Visit visit)
{
    switch (dtype) {
    case CT_F32:
        visit(ct_tag<float>());
        break;
    case CT_F64:
        visit(ct_tag<double>());
        break;
    case CT_BF16:
        visit(ct_tag<ct_bf16>());
        break;
    case CT_F16:
        visit(ct_tag<ct_f16>());
        break;
    default: /* the host let no other dtype pass */
        break;
    }
}

/* Element i of an array of any float dtype; no warp diverges. */
template <typename Real>
__device__ inline Real
ct_load_as(const void *data, ct_dtype dtype, size_t i)
{
    Real value = Real();
    ct_visit_float(dtype, [&](auto tag) {
        typedef typename decltype(tag)::type element;
        value = (Real)ct_load(ct_global((const element *)data)[i]);
    });
    return value;
}

template <typename Real>
__device__ inline void
ct_store_as(Real value, void *data, ct_dtype dtype, size_t i)
{
    ct_visit_float(dtype, [&](auto tag) {
        typedef typename decltype(tag)::type element;
        ct_store(value, &ct_global((element *)data)[i]);
    });
}

/* ---- averages -------------------------------------------------------------------- */

__device__ inline float
ct_average_of(const ct_ema_coef &coef, float average, float value)
{
    return ct_ema_apply_f32(&coef, average, value);
}

__device__ inline double
ct_average_of(const ct_ema_coef &coef, double average, double value)
{
    return ct_ema_apply_f64(&coef, average, value);
}

/* Element i of `data` takes in the value. */
template <typename Real>
__device__ inline void
ct_average_element(const ct_ema_coef &coef, Real value, void *data, ct_dtype dtype,
                   size_t i)
{
    const Real average = ct_load_as<Real>(data, dtype, i);
    ct_store_as(ct_average_of(coef, average, value), data, dtype, i);
}

#endif
