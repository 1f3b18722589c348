/* The average of an element, for several kernels. */
#ifndef CT_CUDA_AVERAGE_CUH
#define CT_CUDA_AVERAGE_CUH

#include "element.cuh"
#include "math/ema.h"

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
