/* An optimizer: groups of hyperparameters, parameters with their state, one update.
 *
 * The caller fills in the addresses of parameters, gradients and state, which may
 * change from step to step. The optimizer counts the updates of each parameter that has
 * a gradient, works out the constants of each group and count, and calls the device's
 * kernel once for every rule. Groups may be of different kinds. */
#ifndef CT_OPTIM_H
#define CT_OPTIM_H

#include "core/comm/comm.h"
#include "core/device/device.h"
#include "core/optim/grads.h"
#include "core/optim/kinds.h"

CT_BEGIN_DECLS

enum {
    CT_OPTIM_MAX_STATES = 6 /* a rule works on some of them */
};

/* The part of a sharded parameter on this rank: elements [begin, begin + n) of `whole`.
 * The parts of all ranks of the group, in rank order, make up the parameter; a part may
 * be empty. Elementwise rules ignore this. */
typedef struct ct_part {
    ct_comm *comm; /* borrowed; NULL: the whole parameter is on this rank */
    size_t begin, whole;
} ct_part;

/* Borrowed memory of one parameter; arrays have n elements unless their kind says
 * otherwise. */
typedef struct ct_optim_param {
    void *param; /* of dtype; the master copy where the model computes with a copy */
    void *grad;  /* NULL: no gradient this time, the parameter is skipped */
    void *state[CT_OPTIM_MAX_STATES];
    ct_quant quant[CT_OPTIM_MAX_STATES]; /* of the state, where state_dtype is U8 */
    void *copy;    /* the model's parameter where param is its master copy, or NULL */
    void *ema;     /* the average of the parameter, or NULL */
    void *product; /* NAdam's, of all momenta so far, in [0, 1], in host memory */
    size_t n;
    ct_part part;
    size_t ndim, rows, cols; /* of the whole parameter; rows and cols, the last two
                              * dimensions, are 1 where missing */
    uint64_t step; /* updates so far; at 0 the state is empty: zeros for most kinds,
                    * while SGD's momentum starts as the gradient */
    ct_dtype dtype, grad_dtype, state_dtype, copy_dtype, ema_dtype;
    ct_dtype product_dtype; /* F32 or F64 */
    uint32_t group;         /* < n_groups */
} ct_optim_param;

/* Options of one update of all parameters. */
typedef struct ct_optim_pass {
    double grad_scale; /* the first factor of every gradient */
    bool clip;         /* the coef of the group in ct_optim_grads is a second factor */
    bool zero_grads;
    double ema_decay; /* of the parameters with an average, in [0, 1] */
} ct_optim_pass;

typedef struct ct_optim ct_optim;

/* A new optimizer with no groups and no parameters; NULL when out of memory. */
ct_optim *ct_optim_new(const ct_device *device);
void ct_optim_free(ct_optim *optim); /* NULL is fine */

/* Sets the numbers of groups and parameters, whose arrays the caller then fills; their
 * content is kept up to the smaller number. */
CT_NODISCARD ct_status ct_optim_resize(ct_optim *optim, size_t n_groups,
                                       size_t n_params, ct_error *err);
ct_optim_group *ct_optim_groups_borrow(ct_optim *optim);
ct_optim_param *ct_optim_params_borrow(ct_optim *optim);
size_t ct_optim_n_groups(const ct_optim *optim);

/* Whether a group's rule looks at more of a parameter than an element at a time, so
 * that a part cannot be updated alone. */
bool ct_optim_group_is_whole(const ct_optim_group *group);

/* The state arrays of a parameter in this group: bit k stands for state[k]. */
unsigned ct_optim_arrays(const ct_optim_group *group, const ct_optim_param *param);

/* Lists the gradients present; the list is the optimizer's and is overwritten by the
 * next call of any function here, but for the coef of each group. */
CT_NODISCARD ct_status ct_optim_grads(ct_optim *optim, ct_grads **grads, ct_error *err);

/* Every gradient present becomes 0. */
CT_NODISCARD ct_status ct_optim_zero_grads(ct_optim *optim, void *stream,
                                           ct_error *err);

/* One update of every parameter that has a gradient. CT_EINVAL (a hyperparameter out of
 * range, a missing state array, ranks whose parts do not fit each other) changes
 * nothing. With rules that look at whole parameters and parameters in parts, all ranks
 * call this together, and the outcome of a failed collective is undefined. */
CT_NODISCARD ct_status ct_optim_update(ct_optim *optim, void *stream,
                                       const ct_optim_pass *pass, ct_error *err);

CT_END_DECLS

#endif
