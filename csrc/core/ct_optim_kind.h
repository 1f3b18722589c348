/* What differs between kinds of optimizers, for ct_optim.c alone: a table of a few
 * functions. A new kind is an entry here, a kernel and its math. */
#ifndef CT_OPTIM_KIND_H
#define CT_OPTIM_KIND_H

#include "core/ct_optim.h"

/* `coefs` and `spans` are arrays of the kind's own types. */
typedef struct ct_optim_ops {
    size_t coef_size, span_size;
    size_t (*n_states)(const ct_optim_group *group);
    /* Parameters of a group with the same key have the same constants. */
    uint64_t (*key)(const ct_optim_param *param);
    ct_status (*coef_init)(void *coefs, size_t i, const ct_optim_group *group,
                           uint64_t key, double grad_scale, ct_error *err);
    void (*span_init)(void *spans, size_t i, const ct_optim_param *param, uint32_t coef,
                      size_t n_states);
    ct_status (*run)(const ct_device *device, void *stream, const void *coefs,
                     const void *spans, size_t n_spans, bool zero_grads, ct_error *err);
} ct_optim_ops;

extern const ct_optim_ops *const ct_optim_kinds[CT_OPTIM_KIND_COUNT];

#endif
