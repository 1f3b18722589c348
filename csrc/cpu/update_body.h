/* One rule after the other over elements of one type, and stochastic rounding. Expanded
 * by cpu/expand.h for float and double. */
#define CT_RULE(rule, constants, n_states)                                             \
    static void CT_NAME(update_##rule)(const ct_rule_coef *coef, const operands *at,   \
                                       size_t n)                                       \
    {                                                                                  \
        const CT_REAL(ct_##constants##_coef) c =                                       \
            CT_REAL(ct_##constants##_round)(&coef->rule);                              \
        const ct_real *restrict grad = at->grad;                                       \
        ct_real *restrict param = at->param;                                           \
        ct_real *restrict s0 = at->state[0];                                           \
        ct_real *restrict s1 = at->state[1];                                           \
        ct_real *restrict s2 = at->state[2];                                           \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            ct_real next = param[i];                                                   \
            ct_real state[CT_RULE_MAX_STATES] = {                                      \
                n_states > 0 ? s0[i] : 0,                                              \
                n_states > 1 ? s1[i] : 0,                                              \
                n_states > 2 ? s2[i] : 0,                                              \
            };                                                                         \
            CT_REAL(ct_##rule##_apply)(&c, grad[i], &next, state);                     \
            param[i] = next;                                                           \
            if (n_states > 0) {                                                        \
                s0[i] = state[0];                                                      \
            }                                                                          \
            if (n_states > 1) {                                                        \
                s1[i] = state[1];                                                      \
            }                                                                          \
            if (n_states > 2) {                                                        \
                s2[i] = state[2];                                                      \
            }                                                                          \
        }                                                                              \
    }
#include "math/ct_rules.def"
#undef CT_RULE

/* To bfloat16, by the random bits of elements number, number + 1, ... The blocks are
 * worked out side by side. */
static void
CT_NAME(dither)(const void *from, uint16_t *restrict to, const ct_rounding *rounding,
                uint64_t number, size_t n)
{
    uint32_t words[CT_TILE / 8 + 1][4];
    const ct_real *restrict x = from;
    const uint64_t first = number / 8;
    const size_t blocks = (size_t)((number + n - 1) / 8 - first) + 1;
    for (size_t b = 0; b < blocks; b++) {
        ct_philox_block(rounding->seed, rounding->step, (first + b) * 8, words[b]);
    }
    for (size_t i = 0; i < n; i++) {
        const uint64_t at = number + i;
        const uint32_t random = ct_philox_half(words[at / 8 - first], at);
        to[i] = ct_bf16_from_f32_stochastic((float)x[i], random);
    }
}
