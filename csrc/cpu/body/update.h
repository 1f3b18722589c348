/* The loop of each rule over elements of a type. Expanded by cpu/expand.h for all
 * dtypes but float16. */
#ifdef CT_PAIRS
#define CT_UPDATE_PAIRS(rule, n_states)                                                \
    for (; i + 2 <= n; i += 2) {                                                       \
        const uint32_t g = ct_bf16_pair(grad + i), p = ct_bf16_pair(param + i);        \
        const uint32_t a = (n_states) > 0 ? ct_bf16_pair(s0 + i) : 0;                  \
        const uint32_t b = (n_states) > 1 ? ct_bf16_pair(s1 + i) : 0;                  \
        const uint32_t d = (n_states) > 2 ? ct_bf16_pair(s2 + i) : 0;                  \
        float low = ct_f32_from_bf16_low(p), high = ct_f32_from_bf16_high(p);          \
        float lows[CT_RULE_MAX_STATES] = {ct_f32_from_bf16_low(a),                     \
                                          ct_f32_from_bf16_low(b),                     \
                                          ct_f32_from_bf16_low(d)};                    \
        float highs[CT_RULE_MAX_STATES] = {ct_f32_from_bf16_high(a),                   \
                                           ct_f32_from_bf16_high(b),                   \
                                           ct_f32_from_bf16_high(d)};                  \
        ct_##rule##_apply_f32(&c, ct_f32_from_bf16_low(g), &low, lows);                \
        ct_##rule##_apply_f32(&c, ct_f32_from_bf16_high(g), &high, highs);             \
        ct_bf16_pair_store(param + i, low, high);                                      \
        if ((n_states) > 0) {                                                          \
            ct_bf16_pair_store(s0 + i, lows[0], highs[0]);                             \
        }                                                                              \
        if ((n_states) > 1) {                                                          \
            ct_bf16_pair_store(s1 + i, lows[1], highs[1]);                             \
        }                                                                              \
        if ((n_states) > 2) {                                                          \
            ct_bf16_pair_store(s2 + i, lows[2], highs[2]);                             \
        }                                                                              \
    }
#else
#define CT_UPDATE_PAIRS(rule, n_states)
#endif
#define CT_RULE(rule, constants, n_states)                                             \
    static void CT_NAME(update_##rule)(const ct_rule_coef *coef,                       \
                                       const ct_operands *at, size_t n)                \
    {                                                                                  \
        const CT_REAL(ct_##constants##_coef) c =                                       \
            CT_REAL(ct_##constants##_round)(&coef->rule);                              \
        const ct_elem *restrict grad = at->grad;                                       \
        ct_elem *restrict param = at->param;                                           \
        ct_elem *restrict s0 = at->state[0];                                           \
        ct_elem *restrict s1 = at->state[1];                                           \
        ct_elem *restrict s2 = at->state[2];                                           \
                                                                                       \
        size_t i = 0;                                                                  \
        CT_UPDATE_PAIRS(rule, n_states)                                                \
        for (; i < n; i++) {                                                           \
            ct_real next = CT_LOAD(param[i]);                                          \
            ct_real state[CT_RULE_MAX_STATES] = {                                      \
                (n_states) > 0 ? CT_LOAD(s0[i]) : 0,                                   \
                (n_states) > 1 ? CT_LOAD(s1[i]) : 0,                                   \
                (n_states) > 2 ? CT_LOAD(s2[i]) : 0,                                   \
            };                                                                         \
            CT_REAL(ct_##rule##_apply)(&c, CT_LOAD(grad[i]), &next, state);            \
            if ((n_states) > 0) {                                                      \
                s0[i] = CT_STORE(state[0]);                                            \
            }                                                                          \
            if ((n_states) > 1) {                                                      \
                s1[i] = CT_STORE(state[1]);                                            \
            }                                                                          \
            if ((n_states) > 2) {                                                      \
                s2[i] = CT_STORE(state[2]);                                            \
            }                                                                          \
            param[i] = CT_STORE(next);                                                 \
        }                                                                              \
    }
#include "math/rules.def"
#undef CT_RULE
#undef CT_UPDATE_PAIRS
