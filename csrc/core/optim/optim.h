/* An optimizer: groups of hyperparameters, parameters with their state, one update.
 *
 * The caller fills in the addresses of parameters, gradients and state, which may
 * change from step to step. The optimizer counts the updates of each parameter that has
 * a gradient, works out the constants of each group and count, and calls the device's
 * kernel once for every rule. Groups may be of different kinds. Its list of gradients
 * is a structure of its own, for gradients that are clipped without an optimizer. */
#ifndef CT_OPTIM_H
#define CT_OPTIM_H

#include "core/base/disk_memory.h"
#include "core/comm/comm.h"
#include "core/device/device.h"
#include "core/optim/kinds.h"

CT_BEGIN_DECLS

/* ---- gradients in one list: their norms by group, scaling and clipping in place -- */

typedef struct ct_grad_group {
    double max_norm; /* of the group alone; Inf: never clipped; 0: clipped with the
                      * rest, by the step's options */
    double coef;     /* the factor of clipping; 1 until then */
} ct_grad_group;

typedef struct ct_grads {
    const ct_device *device;
    int ordinal; /* of a GPU, for the caller */
    ct_span *spans;
    uint32_t *group_of; /* of each span; < n_groups */
    ct_grad_group *groups;
    double *sums; /* of powers (ct_norm_fn): of each group, of all, and one spare */
    size_t n, n_groups;
    size_t spans_capacity, group_of_capacity, groups_capacity, sums_capacity;
    ct_scratch scratch; /* the device's, for partial sums */
    ct_scratch sum;     /* the device's, for final sums */
} ct_grads;

void ct_grads_init(ct_grads *grads, const ct_device *device); /* an empty list */
void ct_grads_fini(ct_grads *grads);

/* Reserves n spans in all, so that adding cannot fail. */
CT_NODISCARD ct_status ct_grads_reserve(ct_grads *grads, size_t n, ct_error *err);

/* Sets the number of groups; sums are lost, the rest of the remaining groups stays. */
CT_NODISCARD ct_status ct_grads_set_groups(ct_grads *grads, size_t n_groups,
                                           ct_error *err);

/* Adds a span within the reserve; its memory is borrowed. */
void ct_grads_add(ct_grads *grads, const ct_span *span, uint32_t group);

/* Fills in the sum of all gradients listed, for the p-norm (p > 0 or Inf), and with
 * by_group the sum of each group. Inf or NaN when an element is, or when a sum of
 * powers is beyond double. Waits for the stream. */
CT_NODISCARD ct_status ct_grads_sum(ct_grads *grads, void *stream, double p,
                                    bool by_group, ct_error *err);

/* The place of the sum of all. */
static inline double *
ct_grads_total(const ct_grads *grads)
{
    return &grads->sums[grads->n_groups];
}

/* Multiplies every gradient by factor and the coef of its group, then clips each
 * element to [-limit, limit] (> 0, Inf for none). */
CT_NODISCARD ct_status ct_grads_scale(ct_grads *grads, void *stream, double factor,
                                      double limit, ct_error *err);

/* ---- the optimizer --------------------------------------------------------------- */

enum {
    CT_OPTIM_MAX_STATES = 6 /* a rule works on some of them */
};

/* The part of a sharded parameter on this rank: elements [begin, begin + n) of `whole`.
 * The parts of all ranks of the group, in rank order, make up the parameter; a part may
 * be empty. Elementwise rules ignore this. */
typedef struct ct_part {
    ct_comm *comm; /* borrowed; NULL: the whole parameter is on this rank */
    size_t begin, whole;
    ct_comm *of_hosts; /* borrowed: the same ranks, to compare parts without a wait for
                        * the device; NULL: comm */
} ct_part;

/* Borrowed memory of one parameter; arrays have n elements unless their kind says
 * otherwise. */
typedef struct ct_optim_param {
    void *param; /* of dtype; the master copy where the model computes with a copy */
    void *grad;  /* NULL: no gradient this time, the parameter is skipped */
    void *state[CT_OPTIM_MAX_STATES];
    ct_quant quant[CT_OPTIM_MAX_STATES]; /* of state that is U8, or I8: compact */
    int8_t *correction; /* of a BF16 param with compact state, or NULL */
    void *copy;    /* the model's parameter where param is its master copy, or NULL */
    void *ema;     /* the average of the parameter, or NULL */
    void *product; /* NAdam's, of all momenta so far, in [0, 1], in host memory */
    double last_product; /* the bytes of *product before the last update */
    size_t n;
    ct_part part;
    /* For random bits of stochastic rounding: element 0 is element `number` of a
     * parameter of `numbered` elements; 0: of n elements. */
    size_t number, numbered;
    size_t ndim, rows, cols; /* of the whole parameter; rows and cols, the last two
                              * dimensions, are 1 where missing */
    uint64_t step; /* updates so far; at 0 the state is empty: zeros for most kinds,
                    * while SGD's momentum starts as the gradient */
    ct_dtype dtype, grad_dtype, state_dtype, copy_dtype, ema_dtype;
    ct_dtype product_dtype; /* F32 or F64 */
    uint32_t group;         /* < n_groups */
} ct_optim_param;

/* What an update has to do with a graph of the device. */
typedef enum ct_capture {
    CT_CAPTURE_NEVER,
    CT_CAPTURE_LATER, /* constants are read from the device's memory */
    CT_CAPTURE_NOW    /* the stream is captured: kernels are enqueued, and nothing is
                         updated or counted */
} ct_capture;

/* Options of one update of all parameters. */
typedef struct ct_optim_pass {
    double grad_scale; /* the first factor of every gradient */
    bool clip;         /* the coef of the group in ct_optim_grads is a second factor */
    bool zero_grads;
    double ema_decay;               /* of the parameters with an average, in [0, 1] */
    const ct_clip_outcome *outcome; /* unless NULL, of ct_optim_clip: a third factor,
                                       and whether anything is updated */
    ct_capture capture;             /* for ct_optim_can_capture alone */
} ct_optim_pass;

typedef struct ct_optim ct_optim;

/* A new optimizer with no groups and no parameters; NULL when out of memory. */
ct_optim *ct_optim_new(const ct_device *device);
void ct_optim_free(ct_optim *optim); /* NULL is fine */

/* Where it works; and to work on `device`, or on another GPU of it, from now on. */
void ct_optim_move(ct_optim *optim, const ct_device *device);

/* Sets the numbers of groups and parameters, whose arrays the caller then fills; their
 * content is kept up to the smaller number. */
CT_NODISCARD ct_status ct_optim_resize(ct_optim *optim, size_t n_groups,
                                       size_t n_params, ct_error *err);
ct_optim_group *ct_optim_groups_borrow(ct_optim *optim);
ct_optim_param *ct_optim_params_borrow(ct_optim *optim);
size_t ct_optim_n_groups(const ct_optim *optim);

/* State that lies in `memory` is updated piece by piece, n_buffers > 0 pieces being in
 * memory at once, and never touched at its addresses. Such an array begins at a page
 * and has its last page to itself. The memory is borrowed; NULL: none. 0 buffers: no
 * file is known any more, of parameters either. */
void ct_optim_set_disk(ct_optim *optim, const ct_disk_memory *memory, size_t n_buffers);

/* Likewise parameters, or copies of parameters, in some of the files; arrays there may
 * share pages; 4 pieces unless set above. CT_ENOMEM, with nothing changed. */
CT_NODISCARD ct_status ct_optim_set_shards(ct_optim *optim,
                                           const ct_disk_memory *const *files, size_t n,
                                           ct_error *err);

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

/* ---- an update by a norm on the device ------------------------------------------- */

/* Whether an update of such groups can be enqueued before the outcome of clipping is
 * known: all are clipped together, and no kind clips by a norm of its own. */
bool ct_optim_can_defer(const ct_optim *optim);

/* The ranks of an update that is enqueued: all update, or none. */
typedef struct ct_optim_ranks {
    ct_comm *comm;    /* for the device's memory; NULL: a single rank */
    bool global_norm; /* of p = 1 or 2, over the gradients of all ranks */
} ct_optim_ranks;

/* Enqueues the clipping of all gradients present, and the way of the outcome to the
 * host, for a ct_optim_update after that. *outcome is in the device's memory. A
 * collective of the ranks. */
CT_NODISCARD ct_status ct_optim_clip(ct_optim *optim, void *stream,
                                     const ct_clip_request *request,
                                     const ct_optim_ranks *ranks,
                                     const ct_clip_outcome **outcome, ct_error *err);

/* Waits for the outcome of the last ct_optim_clip. After a skipped update the counts of
 * parameters and the groups are as before that. No other function but ct_optim_free is
 * to be called in between. */
CT_NODISCARD ct_status ct_optim_await(ct_optim *optim, ct_clip_outcome *outcome,
                                      ct_error *err);

/* ---- an update in a graph -------------------------------------------------------- */

/* Whether a graph can have an update of such groups: the update can be deferred, all
 * rules are elementwise, and nothing changes but counts of parameters. */
bool ct_optim_can_capture(const ct_optim *optim);

/* An update for CT_CAPTURE_NOW must be the same as the last one for CT_CAPTURE_LATER:
 * of the same parameters, by the same arrays; else ct_optim_update is CT_EINVAL. */

/* Before each replay of the graph, on the replay's stream: sends the constants of the
 * next update, by the groups' present options, and counts the update. CT_EINVAL unless
 * the update is the same as the captured one; gradients may have other addresses. */
CT_NODISCARD ct_status ct_optim_prepare_replay(ct_optim *optim, void *stream,
                                               const ct_optim_pass *pass,
                                               ct_error *err);

CT_END_DECLS

#endif
