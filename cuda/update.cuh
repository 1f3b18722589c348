/* What the two halves of an update share: operands, rules, elements of any dtype. */
#ifndef CT_CUDA_UPDATE_CUH
#define CT_CUDA_UPDATE_CUH

#include "element.cuh"
#include "launch.cuh"

#include "core/device/update.h"

struct ct_cuda_update_operand : ct_update_span {
    ct_rule_coef constants;
    ct_rounding key; /* *rounding lies in the host's memory */
};

static inline ct_cuda_update_operand
ct_cuda_operand_of(const ct_update &update, size_t i)
{
    const ct_update_span &span = update.spans[i];
    return {span, update.coefs[span.coef],
            span.rounding == NULL ? ct_rounding() : *span.rounding};
}

/* A rule for both types of computation. */
#define CT_RULE(rule, constants, states)                                               \
    struct ct_rule_##rule {                                                            \
        static const int n_states = states;                                            \
        __device__ static ct_##constants##_coef_f32                                    \
        rounded(const ct_rule_coef *c, float)                                          \
        {                                                                              \
            return ct_##constants##_round_f32(&c->rule);                               \
        }                                                                              \
        __device__ static ct_##constants##_coef_f64                                    \
        rounded(const ct_rule_coef *c, double)                                         \
        {                                                                              \
            return ct_##constants##_round_f64(&c->rule);                               \
        }                                                                              \
        __device__ static void apply(const ct_##constants##_coef_f32 *c, float grad,   \
                                     float *param, float *state)                       \
        {                                                                              \
            ct_##rule##_apply_f32(c, grad, param, state);                              \
        }                                                                              \
        __device__ static void apply(const ct_##constants##_coef_f64 *c, double grad,  \
                                     double *param, double *state)                     \
        {                                                                              \
            ct_##rule##_apply_f64(c, grad, param, state);                              \
        }                                                                              \
    };
#include "math/rules.def"
#undef CT_RULE

__device__ static inline const ct_rule_coef *
ct_constants(const ct_cuda_update_operand &operand)
{
    return operand.settled != NULL ? operand.settled : &operand.constants;
}

/* State k of element i, stored or not. */
template <typename Real>
__device__ static inline Real
ct_load_state(const ct_cuda_update_operand &operand, int k, size_t i)
{
    if (k == 0 && operand.row != NULL) {
        const size_t at = operand.begin + i;
        const size_t row = at / operand.cols, col = at % operand.cols;
        return ((const Real *)operand.row)[row] *
               ((const Real *)operand.col)[row / operand.rows * operand.cols + col];
    }
    return ct_load_as<Real>(operand.state[k], operand.state_dtype, i);
}

template <typename Real>
__device__ static inline void
ct_store_state(Real value, const ct_cuda_update_operand &operand, int k, size_t i)
{
    if (k != 0 || operand.row == NULL) {
        ct_store_as(value, operand.state[k], operand.state_dtype, i);
    }
}

#endif
