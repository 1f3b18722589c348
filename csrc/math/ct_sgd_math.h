/* SGD with momentum for one element: the only place that states the formula.
 *
 * Source: Sutskever et al., "On the importance of initialization and momentum in deep
 * learning", 2013, in the form and order of operations of torch.optim.SGD. */
#ifndef CT_SGD_MATH_H
#define CT_SGD_MATH_H

#include "math/ct_hd.h"

/* What is constant over one step, worked out in double. */
typedef struct ct_sgd_coef {
    double grad_scale; /* clip coefficient / loss scale: saves a pass over grads */
    double lr;
    double momentum;
    double one_minus_dampening;
    double weight_decay;
    int nesterov;
    int first; /* the momentum buffer starts as the gradient */
} ct_sgd_coef;

/* Defines, for one real type, the constants rounded to it and two updates: with a
 * momentum buffer, and without one for momentum 0.
 *
 * grad is read; *param and *buf are updated. Without weight decay the parameter does
 * not enter the gradient, not even as 0 * Inf. */
#define CT_SGD_DEFINE(real, suffix)                                                    \
    typedef struct ct_sgd_coef_##suffix {                                              \
        real grad_scale, lr, momentum, one_minus_dampening, weight_decay;              \
        int nesterov, first;                                                           \
    } ct_sgd_coef_##suffix;                                                            \
                                                                                       \
    CT_HD static inline ct_sgd_coef_##suffix ct_sgd_round_##suffix(                    \
        const ct_sgd_coef *c)                                                          \
    {                                                                                  \
        ct_sgd_coef_##suffix r;                                                        \
        r.grad_scale = (real)c->grad_scale;                                            \
        r.lr = (real)c->lr;                                                            \
        r.momentum = (real)c->momentum;                                                \
        r.one_minus_dampening = (real)c->one_minus_dampening;                          \
        r.weight_decay = (real)c->weight_decay;                                        \
        r.nesterov = c->nesterov;                                                      \
        r.first = c->first;                                                            \
        return r;                                                                      \
    }                                                                                  \
                                                                                       \
    CT_HD static inline real ct_sgd_decayed_##suffix(const ct_sgd_coef_##suffix *c,    \
                                                     real grad, real param)            \
    {                                                                                  \
        const real g = grad * c->grad_scale;                                           \
        return c->weight_decay != (real)0 ? g + c->weight_decay * param : g;           \
    }                                                                                  \
                                                                                       \
    CT_HD static inline void ct_sgd_plain_##suffix(const ct_sgd_coef_##suffix *c,      \
                                                   real grad, real *param)             \
    {                                                                                  \
        *param = *param - c->lr * ct_sgd_decayed_##suffix(c, grad, *param);            \
    }                                                                                  \
                                                                                       \
    CT_HD static inline void ct_sgd_momentum_##suffix(                                 \
        const ct_sgd_coef_##suffix *c, real grad, real *param, real *buf)              \
    {                                                                                  \
        const real g = ct_sgd_decayed_##suffix(c, grad, *param);                       \
        const real b = c->first ? g : *buf * c->momentum + c->one_minus_dampening * g; \
        const real direction = c->nesterov ? g + c->momentum * b : b;                  \
                                                                                       \
        *param = *param - c->lr * direction;                                           \
        *buf = b;                                                                      \
    }

CT_SGD_DEFINE(float, f32)
CT_SGD_DEFINE(double, f64)

#endif
