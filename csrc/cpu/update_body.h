/* One rule after the other over elements of one type. Expanded by cpu/expand.h for all
 * but float16. */
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
        for (size_t i = 0; i < n; i++) {                                               \
            ct_real next = CT_LOAD(param[i]);                                          \
            ct_real state[CT_RULE_MAX_STATES] = {                                      \
                (n_states) > 0 ? CT_LOAD(s0[i]) : 0,                                   \
                (n_states) > 1 ? CT_LOAD(s1[i]) : 0,                                   \
                (n_states) > 2 ? CT_LOAD(s2[i]) : 0,                                   \
            };                                                                         \
            CT_REAL(ct_##rule##_apply)(&c, CT_LOAD(grad[i]), &next, state);            \
            param[i] = CT_STORE(next);                                                 \
            if ((n_states) > 0) {                                                      \
                s0[i] = CT_STORE(state[0]);                                            \
            }                                                                          \
            if ((n_states) > 1) {                                                      \
                s1[i] = CT_STORE(state[1]);                                            \
            }                                                                          \
            if ((n_states) > 2) {                                                      \
                s2[i] = CT_STORE(state[2]);                                            \
            }                                                                          \
        }                                                                              \
    }
#include "math/ct_rules.def"
#undef CT_RULE
