/* One update, in phases between which a caller may act.
 *
 *     ct_step_measure    norm of the gradients, Inf and NaN found, before any weight
 *                        is touched
 *     ct_step_apply      unscale + clip + update + zero, in one pass
 *
 * The policy decides about a gradient that is not finite. Clipping stands here too, for
 * gradients that have no optimizer of the core. */
#ifndef CT_STEP_H
#define CT_STEP_H

#include "core/comm/comm.h"
#include "core/optim/optim.h"
#include "math/clip.h"

CT_BEGIN_DECLS

/* ---- clipping: by norm, of all gradients or of each group, then by value --------- */

/* {0} clips nothing. */
typedef struct ct_clip {
    double max_norm;  /* to this norm; 0 or Inf: not; < 0 is rejected */
    double norm_type; /* p of the norm, > 0 or Inf; 0 stands for 2 */
    double value;     /* after that each element to [-value, value]; 0 or Inf: not */
    bool by_group;    /* max_norm holds for each group by itself */
} ct_clip;

/* CT_EINVAL names the value that is out of range. */
CT_NODISCARD ct_status ct_clip_check(const ct_clip *clip, ct_error *err);

/* Whether elements are clipped by value. */
bool ct_clip_by_value(const ct_clip *clip);

/* Whether clipping needs the norm of each group: by_group, or a group has a max_norm of
 * its own. */
bool ct_clip_by_group(const ct_clip *clip, const ct_grads *grads);

/* Computes the sums for the norms that clipping needs. Waits for the stream. */
CT_NODISCARD ct_status ct_clip_measure(const ct_clip *clip, ct_grads *grads,
                                       void *stream, ct_error *err);

/* Sets the coef of every group from the sums. A group with a max_norm of its own is
 * clipped by its own norm to that max_norm; each other group by its own norm (by_group)
 * or all by their common norm. Returns the norm of all gradients divided by loss_scale,
 * before clipping. */
double ct_clip_decide(const ct_clip *clip, ct_grads *grads, double loss_scale);

/* The least coef of all groups; NaN if any coef is NaN, 1 without groups. */
double ct_clip_least(const ct_grads *grads);

/* Divides the gradients by loss_scale and clips, in place. */
CT_NODISCARD ct_status ct_clip_apply(const ct_clip *clip, ct_grads *grads, void *stream,
                                     double loss_scale, ct_error *err);

/* ---- spikes ---------------------------------------------------------------------- */

enum {
    CT_SPIKE_WINDOW = 128, /* norms to compare with, at most */
    CT_SPIKE_LEAST = 64    /* and at least: with fewer nothing is a spike */
};

/* Whether a norm exceeds the mean of the last n norms by more than `sigmas` of their
 * unbiased standard deviations. Source: the skipped steps of OLMo 2, Walsh et al.,
 * "2 OLMo 2 Furious", 2025, with the window and the least number of OLMo-core's
 * SkipStepOptimizer, which compares the loss, too. */
bool ct_step_is_spike(const double *norms, size_t n, double norm, double sigmas);

/* ---- the phases ------------------------------------------------------------------ */

typedef enum ct_nonfinite {
    CT_NONFINITE_SKIP, /* leave weights and optimizer alone, continue */
    CT_NONFINITE_STOP, /* CT_EFLOAT */
    CT_NONFINITE_KEEP  /* update all the same, as torch does */
} ct_nonfinite;

typedef struct ct_step_config {
    ct_clip clip;
    ct_nonfinite nonfinite;
    bool zero_grads;
    ct_comm *comm;    /* ranks that step together, or NULL for a single rank;
                         collectives take host memory, those of ct_step_enqueue the
                         device's */
    bool global_norm; /* norms are over all ranks' gradients, for gradients in
                         shards; else each rank has norms of its own */
    double ema_decay; /* of parameters that have an average */
    ct_capture capture;
} ct_step_config;

typedef struct ct_step_result {
    double grad_norm; /* of all gradients, after unscaling, before clipping */
    double clip_coef; /* by norm: the least of all groups; 1: nothing was clipped */
    bool finite;      /* on all ranks */
    bool spike;       /* set by the caller: the step is skipped under any policy */
    bool updated;     /* false when the step was skipped */
} ct_step_result;

/* Fills in grad_norm, clip_coef and finite. loss_scale is the factor of the loss (1
 * without scaling; > 0). The clipping factors of the groups are left in ct_optim_grads.
 *
 * A collective with config->comm: `finite` is the same on every rank, so all ranks
 * update or none, and loss scalers that get `finite` stay equal. After a failure on one
 * rank before the collective, as when memory runs out, all others get CT_ECOMM. */
CT_NODISCARD ct_status ct_step_measure(ct_optim *optim, void *stream,
                                       const ct_step_config *config, double loss_scale,
                                       ct_step_result *result, ct_error *err);

/* Updates as result says: with a clip_coef of 1 nothing is clipped by norm. Clipping by
 * value writes the gradients, unscaled and clipped, in a pass of its own. With
 * zero_grads a skipped step zeroes the gradients too, or Inf and NaN would spoil the
 * next step. With CT_NONFINITE_STOP and a gradient that is not finite: CT_EFLOAT,
 * nothing touched. */
CT_NODISCARD ct_status ct_step_apply(ct_optim *optim, void *stream,
                                     const ct_step_config *config, double loss_scale,
                                     ct_step_result *result, ct_error *err);

/* ---- without a wait -------------------------------------------------------------- */

/* Whether ct_step_enqueue can do the update: one rank, or a group for the device's
 * memory; a norm of p = 1, 2 or Inf (not over ranks) over all gradients, no other
 * clipping, and a policy other than CT_NONFINITE_STOP, with zero_grads
 * CT_NONFINITE_KEEP; and ct_optim_can_defer of the optimizer. */
bool ct_step_can_enqueue(const ct_optim *optim, const ct_step_config *config);

/* The factor of the loss, and the two values of which the device chooses the next. */
typedef struct ct_step_scale {
    double now;             /* > 0 */
    float *next;            /* in the device's memory, or NULL: becomes... */
    double clean, overflow; /* ... this, or that after Inf or NaN; rounded to float */
} ct_step_scale;

/* Measures and updates without waiting: the device decides whether anything is written.
 * The update is counted as made; ct_step_await waits for the norm and takes the counts
 * of a skipped update back. No other function of the optimizer is called in between. */
CT_NODISCARD ct_status ct_step_enqueue(ct_optim *optim, void *stream,
                                       const ct_step_config *config,
                                       const ct_step_scale *scale, ct_error *err);
CT_NODISCARD ct_status ct_step_await(ct_optim *optim, ct_step_result *result,
                                     ct_error *err);

/* ct_optim_prepare_replay() of an update that was captured with these options. */
CT_NODISCARD ct_status ct_step_prepare_replay(ct_optim *optim, void *stream,
                                              const ct_step_config *config,
                                              double loss_scale, ct_error *err);

CT_END_DECLS

#endif
