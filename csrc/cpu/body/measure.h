/* The loop of each measured rule. Expanded by cpu/expand.h for float and double. The
 * squares go to two consecutive lists of lanes. */
#define CT_MEASURED(rule, constants, n_states)                                         \
    CT_ALWAYS_INLINE static void CT_NAME(measure_some_##rule)(                         \
        const CT_REAL(ct_##constants##_coef) * c, const ct_operands *at, size_t from,  \
        size_t n, double *restrict lanes)                                              \
    {                                                                                  \
        const ct_real *restrict grad = (const ct_real *)at->grad + from;               \
        const ct_real *restrict param = (const ct_real *)at->param + from;             \
        ct_real *restrict s0 = (n_states) > 0 ? (ct_real *)at->state[0] + from : NULL; \
        ct_real *restrict s1 = (n_states) > 1 ? (ct_real *)at->state[1] + from : NULL; \
        ct_real first[LANES], second[LANES];                                           \
                                                                                       \
        for (size_t k = 0; k < n; k++) {                                               \
            ct_real terms[CT_MEASURES];                                                \
            ct_real state[CT_RULE_MAX_STATES] = {                                      \
                (n_states) > 0 ? s0[k] : 0,                                            \
                (n_states) > 1 ? s1[k] : 0,                                            \
            };                                                                         \
            CT_REAL(ct_##rule##_measure)(c, grad[k], param[k], state, terms);          \
            if ((n_states) > 0) {                                                      \
                s0[k] = state[0];                                                      \
            }                                                                          \
            if ((n_states) > 1) {                                                      \
                s1[k] = state[1];                                                      \
            }                                                                          \
            first[k] = terms[0];                                                       \
            second[k] = terms[1];                                                      \
        }                                                                              \
        for (size_t k = 0; k < n; k++) {                                               \
            lanes[k] += (double)first[k] * (double)first[k];                           \
            lanes[LANES + k] += (double)second[k] * (double)second[k];                 \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    static void CT_NAME(measure_##rule)(const ct_rule_coef *coef,                      \
                                        const ct_operands *at, size_t n,               \
                                        double *restrict lanes)                        \
    {                                                                                  \
        const CT_REAL(ct_##constants##_coef) c =                                       \
            CT_REAL(ct_##constants##_round)(&coef->rule);                              \
        size_t i = 0;                                                                  \
        for (; i + LANES <= n; i += LANES) {                                           \
            CT_NAME(measure_some_##rule)(&c, at, i, LANES, lanes);                     \
        }                                                                              \
        CT_NAME(measure_some_##rule)(&c, at, i, n - i, lanes);                         \
    }
#include "math/measured.def"
#undef CT_MEASURED
