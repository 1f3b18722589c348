/* An optimizer: groups of hyperparameters, parameters with their state, one update.
 *
 * The caller fills in where each parameter, gradient and state array lies, which may
 * change from step to step; the optimizer counts steps per parameter (one without a
 * gradient is left alone, and its count too), works out the constants of each (group,
 * step) pair and calls the device's kernel once for every rule. Groups may be of
 * different kinds. */
#ifndef CT_OPTIM_H
#define CT_OPTIM_H

#include "core/optim/adagrad.h"
#include "core/optim/adafactor.h"
#include "core/optim/adam.h"
#include "core/comm/comm.h"
#include "core/device/device.h"
#include "core/optim/grads.h"
#include "core/optim/layerwise.h"
#include "core/optim/sgd.h"
#include "core/optim/muon.h"
#include "core/optim/schedule_free.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ct_optim_kind {
    CT_OPTIM_ADAMW,
    CT_OPTIM_SGD,
    CT_OPTIM_ADADELTA,
    CT_OPTIM_ADAGRAD,
    CT_OPTIM_ADAM,
    CT_OPTIM_ADAMAX,
    CT_OPTIM_ADEMAMIX,
    CT_OPTIM_FAIRSEQ_ADAM,
    CT_OPTIM_FAIRSEQ_ADAMAX,
    CT_OPTIM_LION,
    CT_OPTIM_NADAM,
    CT_OPTIM_NAG,
    CT_OPTIM_RADAM,
    CT_OPTIM_RMSPROP,
    CT_OPTIM_SCHEDULE_FREE_ADAMW,
    CT_OPTIM_SCHEDULE_FREE_RADAM,
    CT_OPTIM_SCHEDULE_FREE_SGD,
    CT_OPTIM_ADAFACTOR,
    CT_OPTIM_LAMB,
    CT_OPTIM_LARS,
    CT_OPTIM_MUON,
    CT_OPTIM_ADAMW_8BIT, /* these keep large state in CT_U8 */
    CT_OPTIM_ADEMAMIX_8BIT,
    CT_OPTIM_LION_8BIT,
    CT_OPTIM_KIND_COUNT
} ct_optim_kind;

enum {
    CT_OPTIM_MAX_STATES = 6 /* not all of them a rule's */
};

typedef struct ct_optim_group {
    ct_optim_kind kind;
    union {
        ct_adadelta_config adadelta;
        ct_adagrad_config adagrad;
        ct_adamax_config adamax; /* and of fairseq_adamax */
        ct_adamw_config adamw;   /* and of adam, fairseq_adam, radam and adamw_8bit */
        ct_ademamix_config ademamix; /* and of ademamix_8bit */
        ct_lion_config lion;         /* and of lion_8bit */
        ct_nadam_config nadam;
        ct_nag_config nag;
        ct_rmsprop_config rmsprop;
        ct_schedule_free_config schedule_free; /* of all three */
        ct_adafactor_config adafactor;
        ct_lamb_config lamb;
        ct_lars_config lars;
        ct_muon_config muon;
        ct_sgd_config sgd;
    };
    double max_norm; /* as in ct_grad_group */
    bool maximize;   /* step up the gradient */
    bool stochastic; /* what is stored as BF16 is rounded stochastically, by this: */
    ct_rounding rounding;
    /* Of 16-bit parameters, for whoever fills in ct_optim_param: an fp32 copy is what
     * is updated; the state is fp32. */
    bool master_weights, fp32_state;
} ct_optim_group;

/* What is here of a parameter that is spread over ranks: elements [begin, begin + n) of
 * `whole`. The parts of all ranks of the group, in rank order, are the parameter; a
 * part may be empty. Elementwise rules pass over it. */
typedef struct ct_part {
    ct_comm *comm; /* borrowed; NULL: the whole parameter is here */
    size_t begin, whole;
} ct_part;

/* Borrowed memory of one parameter; arrays have n elements unless their kind says
 * otherwise. */
typedef struct ct_optim_param {
    void *param; /* of dtype: what is updated, the master copy where there is one */
    void *grad;  /* NULL: no gradient this time, the parameter is skipped */
    void *state[CT_OPTIM_MAX_STATES];
    ct_quant quant[CT_OPTIM_MAX_STATES]; /* of the state, where state_dtype is U8 */
    void *copy;      /* what the model computes with, where param is its master copy */
    void *ema;       /* the average of the parameter, or NULL */
    void *product;   /* NAdam's: of its momenta so far, in [0, 1], in host memory */
    float *step_out; /* host memory where the new count is written too, or NULL */
    size_t n;
    ct_part part;
    size_t ndim, rows, cols; /* of the whole parameter: dimensions, and the last two; 1
                              * where there is none */
    uint64_t step; /* updates this parameter has had; 0: its state holds nothing yet,
                    * most kinds' are zeros, SGD's momentum starts as the gradient */
    ct_dtype dtype, grad_dtype, state_dtype, copy_dtype, ema_dtype;
    ct_dtype product_dtype; /* F32 or F64 */
    uint32_t group;         /* < n_groups */
} ct_optim_param;

/* What holds for one update of all parameters. */
typedef struct ct_optim_pass {
    double grad_scale; /* every gradient is multiplied by it first */
    bool clip;         /* and by the coef of its group in ct_optim_grads */
    bool zero_grads;
    double ema_decay; /* of the parameters that have an average, in [0, 1] */
} ct_optim_pass;

typedef struct ct_optim ct_optim;

/* A new optimizer with no groups and no parameters; NULL when out of memory. */
ct_optim *ct_optim_new(const ct_device *device);
void ct_optim_free(ct_optim *optim); /* NULL is fine */

/* Sets the numbers of groups and parameters and returns the arrays for the caller to
 * fill; what they held is kept up to the smaller number. */
CT_NODISCARD ct_status ct_optim_resize(ct_optim *optim, size_t n_groups,
                                       size_t n_params, ct_error *err);
ct_optim_group *ct_optim_groups_borrow(ct_optim *optim);
ct_optim_param *ct_optim_params_borrow(ct_optim *optim);
size_t ct_optim_n_groups(const ct_optim *optim);
size_t ct_optim_n_params(const ct_optim *optim);

const char *ct_optim_kind_name(ct_optim_kind kind); /* "adamw", "sgd", ... */

/* Whether a group's updates look at more of a parameter than an element at a time, so
 * that parts of it cannot be updated by themselves. */
bool ct_optim_group_is_whole(const ct_optim_group *group);

/* The kind of that name, or CT_OPTIM_KIND_COUNT. */
ct_optim_kind ct_optim_kind_from_name(const char *name);

/* CT_EINVAL names a hyperparameter that is out of its range. */
CT_NODISCARD ct_status ct_optim_check_group(const ct_optim_group *group, ct_error *err);

/* Lists the gradients present; the list is the optimizer's and is made anew by the next
 * call of any function here. What is set as the coef of a group stays. */
CT_NODISCARD ct_status ct_optim_grads(ct_optim *optim, ct_grads **grads, ct_error *err);
/* Which state arrays the rule of this group works on: bit k says state[k]. */
unsigned ct_optim_states(const ct_optim_group *group);

/* Which arrays a parameter has in this group: those, unless it is a matter of shape. */
unsigned ct_optim_arrays(const ct_optim_group *group, const ct_optim_param *param);

/* The L2 norm of all gradients present, before any scaling, summed in double; Inf or
 * NaN when an element is. Waits for the stream. */
CT_NODISCARD ct_status ct_optim_norm(ct_optim *optim, void *stream, double *norm,
                                     ct_error *err);

/* Every gradient present becomes 0. */
CT_NODISCARD ct_status ct_optim_zero_grads(ct_optim *optim, void *stream,
                                           ct_error *err);

/* One update of every parameter that has a gradient. CT_EINVAL (a hyperparameter out
 * of range, a missing state array, ranks whose parts do not fit each other) changes
 * nothing. Where rules look at whole parameters of which ranks have parts, all ranks
 * call it together, and what comes of a failed collective is undefined. */
CT_NODISCARD ct_status ct_optim_update(ct_optim *optim, void *stream,
                                       const ct_optim_pass *pass, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
