/* What the two halves of an update share: operands, rules, elements of any dtype. */
#ifndef CT_CUDA_UPDATE_CUH
#define CT_CUDA_UPDATE_CUH

#include "element.cuh"
#include "launch.cuh"
#include "vector.cuh"

#include "core/device/update.h"

struct ct_cuda_update_operand : ct_update_span {
    uint64_t wide; /* 1: all arrays can be loaded as ct_bits */
};

static inline bool
ct_cuda_is_wide(const void *data, ct_dtype dtype, ct_dtype real, size_t elems)
{
    return data == NULL ||
           ((real == CT_F64) == (dtype == CT_F64) && ct_dtype_is_float(dtype) &&
            (uintptr_t)data % (elems * ct_dtype_size(dtype)) == 0);
}

static inline ct_cuda_update_operand
ct_cuda_operand_of(ct_rule rule, const ct_update_span &span)
{
    const ct_dtype real = ct_update_real(&span);
    const bool compact = span.state_dtype == CT_I8; /* a vector is of eight elements */
    const size_t elems = compact ? 8 : 16 / ct_dtype_size(real);
    bool wide = ct_cuda_is_wide(span.grad, span.grad_dtype, real, elems) &&
                ct_cuda_is_wide(span.param, span.dtype, real, elems) &&
                ct_cuda_is_wide(span.copy, span.copy_dtype, real, elems) &&
                ct_cuda_is_wide(span.ema, span.ema_dtype, real, elems) &&
                (uintptr_t)span.correction % elems == 0 &&
                (span.rounding == NULL || span.first % elems == 0);
    for (size_t k = 0; k < ct_rule_n_states(rule); k++) {
        wide = wide && (compact ? (uintptr_t)span.state[k] % elems == 0
                                : ct_cuda_is_wide(span.state[k], span.state_dtype, real,
                                                  elems));
    }
    return {span, wide};
}

template <typename A, typename B> struct ct_same {
    static const bool value = false;
};
template <typename A> struct ct_same<A, A> {
    static const bool value = true;
};

/* A rule for both types of computation. */
#define CT_RULE(rule, constants, states)                                               \
    struct ct_rule_##rule {                                                            \
        static const int n_states = states;                                            \
        static const bool is_factored =                                                \
            ct_same<ct_##constants##_coef, ct_adafactor_coef>::value;                  \
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

/* State k of element i, stored or not. */
template <typename Real>
__device__ static inline Real
ct_load_state(const ct_cuda_update_operand &operand, int k, size_t i)
{
    if (k == 0 && operand.row != NULL) {
        const size_t at = operand.begin + i;
        const size_t row = at / operand.cols, col = at % operand.cols;
        return ct_global((const Real *)operand.row)[row] *
               ct_global(
                   (const Real *)operand.col)[row / operand.rows * operand.cols + col];
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

/* ---- vectors --------------------------------------------------------------------- */

/* As many elements as there are of type Real in 16 bytes: of doubles if that is double,
 * else of floats or, in x and y, of a type of 2 bytes. The dtype is the same for the
 * whole block, so all arrays of a thread can be loaded before the first is converted,
 * whatever their dtypes. */
typedef uint4 ct_bits;

template <typename Real> using ct_reals = ct_vector<Real, 16 / sizeof(Real)>;

template <typename Real>
__device__ static inline ct_bits
ct_load_bits(const void *data, ct_dtype dtype, size_t i)
{
    if (sizeof(Real) == 4 && dtype != CT_F32) {
        const uint2 half = *ct_global((const uint2 *)((const uint16_t *)data + i));
        return make_uint4(half.x, half.y, 0, 0);
    }
    return *ct_global((const uint4 *)((const Real *)data + i));
}

template <typename Real>
__device__ static inline void
ct_store_bits(const ct_bits &bits, void *data, ct_dtype dtype, size_t i)
{
    if (sizeof(Real) == 4 && dtype != CT_F32) {
        __stwb(ct_global((uint2 *)((uint16_t *)data + i)), make_uint2(bits.x, bits.y));
    }
    else {
        __stwb(ct_global((uint4 *)((Real *)data + i)), bits);
    }
}

__device__ static inline ct_reals<double>
ct_widen(const ct_bits &bits, ct_dtype, double)
{
    ct_reals<double> x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

__device__ static inline ct_reals<float>
ct_widen(const ct_bits &bits, ct_dtype dtype, float)
{
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    ct_reals<float> x;
    CT_UNROLL
    for (unsigned j = 0; j < 4; j++) {
        const uint16_t half = (uint16_t)(words[j / 2] >> (16 * (j % 2)));
        x.of[j] = dtype == CT_F32    ? ct_f32_from_bits(words[j])
                  : dtype == CT_BF16 ? ct_f32_from_bf16(half)
                                     : ct_f32_from_f16(half);
    }
    return x;
}

template <typename Reals>
__device__ static inline ct_bits
ct_bits_of(Reals x)
{
    ct_bits bits;
    CT_UNROLL
    for (unsigned j = 0; j < sizeof x.of / sizeof *x.of; j++) {
        x.of[j] = CT_COMPUTED(x.of[j]);
    }
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

__device__ static inline ct_bits
ct_narrow(const ct_reals<double> &x, ct_dtype)
{
    return ct_bits_of(x);
}

__device__ static inline ct_bits
ct_pack(const uint16_t (&half)[4])
{
    return make_uint4(half[0] | (uint32_t)half[1] << 16,
                      half[2] | (uint32_t)half[3] << 16, 0, 0);
}

__device__ static inline ct_bits
ct_narrow(const ct_reals<float> &x, ct_dtype dtype)
{
    uint16_t half[4];
    if (dtype == CT_F32) {
        return ct_bits_of(x);
    }
    CT_UNROLL
    for (unsigned j = 0; j < 4; j++) {
        half[j] = dtype == CT_BF16 ? ct_bf16_from_f32(CT_COMPUTED(x.of[j]))
                                   : ct_f16_from_f32(CT_COMPUTED(x.of[j]));
    }
    return ct_pack(half);
}

#endif
