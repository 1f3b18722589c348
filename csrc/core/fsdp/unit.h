/* One unit of fully sharded data parallelism: parameters that are gathered, released
 * and reduced together.
 *
 * A unit holds flat groups, each a row of parameters padded so that every rank owns an
 * equal part, its shard. `full` is where the groups of all ranks come together for the
 * computation, in the compute dtype; `grads` is where their gradients do. Both stay at
 * one address, and their pages are let go in between, for other units to use: outside
 * of its own forward and backward a unit takes no memory but the shards, which are the
 * caller's.
 *
 * Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
 * parameter models", 2020, stage 3; Zhang et al., "MiCS", 2022 (replicas of groups). */
#ifndef CORE_FSDP_UNIT_H
#define CORE_FSDP_UNIT_H

#include "core/base/mapping.h"
#include "core/comm/comm.h"
#include "core/device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What units have at work, in bytes: `live` counts what is gathered and the gradients
 * that are not reduced yet; `peak` is the most that there have been at once. And the
 * memory that the next unit takes over from the one before. */
typedef struct ct_fsdp_ledger {
    size_t live, peak;
    size_t begun; /* units whose gather has begun and not ended */
    ct_block_cache cache;
    ct_scratch staging; /* of the device: a shard on its way up or down */
    ct_scratch zero;    /* of the device: a float of 0, once it has been needed */
} ct_fsdp_ledger;

/* A parameter's place in its group, and whether a rank has a gradient of it. */
typedef struct ct_fsdp_param {
    size_t at, n;
    bool there;
} ct_fsdp_param;

/* The trainable parameters of a group in the order of their places; the caller's. */
typedef struct ct_fsdp_presence {
    ct_fsdp_param *params;
    size_t n;
} ct_fsdp_presence;

typedef struct ct_fsdp_group {
    size_t n;       /* elements with their padding: a multiple of the ranks */
    size_t at;      /* where it begins in full, in elements */
    size_t grad_at; /* and in grads, if it is trainable */
    bool trainable;
    ct_work *work; /* its gather, where the unit's has begun; NULL: none, or ended */
} ct_fsdp_group;

typedef struct ct_fsdp_config {
    ct_dtype compute;              /* of what is gathered: F32, BF16 or F16 */
    ct_dtype reduce;               /* of the gradients while they are reduced */
    double predivide, postdivide;  /* of gradients, before and after their sum */
    bool lone_gather, lone_reduce; /* leave the other ranks out, to measure without */
    int gather_bits, reduce_bits;  /* of codes that are sent; 0: whole elements */
    bool offload; /* shards and their gradients are in the host's memory */
} ct_fsdp_config;

typedef struct ct_fsdp {
    const ct_device *device;
    void *stream; /* of the device: where the unit's work is enqueued; the caller's */
    ct_fsdp_config config;
    /* The ranks of other groups that have the same shards, whose gradients are averaged
     * with those that are reduced here; NULL: there are none. The caller's. */
    ct_comm *replicas;
    ct_fsdp_ledger *ledger; /* the caller's; it may be shared by units */
    ct_fsdp_group *groups;
    size_t n_groups;
    ct_mapping *full, *grads; /* the caller's, as long as the unit */
    float
        *residual; /* what codes have missed of grads, as long; the caller's, or NULL */
    bool gathered;
    bool begun; /* not gathered, but full is the communicator's until that has ended */
    bool holds_grads;
    ct_dtype grad_dtype; /* of what grads holds now */
    ct_label
        label; /* what ranks know the unit by; counts its collectives and forwards */
} ct_fsdp;

/* Lays out n_groups groups of sizes[i] elements each. A size is a multiple of
 * world_size. On failure the unit is {0}, which may be freed too. CT_EINVAL, CT_ENOMEM.
 */
CT_NODISCARD ct_status ct_fsdp_init(ct_fsdp *unit, const ct_device *device,
                                    const size_t *sizes, const bool *trainable,
                                    size_t n_groups, int world_size, ct_error *err);
void ct_fsdp_fini(ct_fsdp *unit);

/* What full and grads have to hold, for any dtypes of the configuration. */
size_t ct_fsdp_full_bytes(const ct_fsdp *unit, ct_dtype compute);
size_t ct_fsdp_grad_bytes(const ct_fsdp *unit);

/* Brings every group together from shards[i], n / world_size elements of F32 each.
 * Nothing where that is done already; one that has begun is ended, and shards are not
 * read. Collective. On failure nothing is gathered. */
CT_NODISCARD ct_status ct_fsdp_gather(ct_fsdp *unit, ct_comm *comm,
                                      const ct_span *shards, ct_error *err);

/* Begins it, so that it goes on while something else is computed. The shards are read
 * now, and full counts as taken. Nothing where it is gathered or has begun. Whole
 * elements only: codes are made and read in one go. A collective like the others,
 * CT_EINVAL for a unit with gather_bits. On failure nothing has begun. */
CT_NODISCARD ct_status ct_fsdp_begin_gather(ct_fsdp *unit, ct_comm *comm,
                                            const ct_span *shards, ct_error *err);

/* Waits for what has begun and lets go of it; what went wrong with it concerns nobody.
 * Nothing where nothing has. */
void ct_fsdp_cancel_gather(ct_fsdp *unit, ct_comm *comm);

/* Lets go of what was gathered, not of what has begun; elements read as 0 from then on.
 */
void ct_fsdp_release(ct_fsdp *unit);

/* Takes the gradient of elements [at, at + grad->n) of a group, in any float dtype: in
 * place of what is there, or added to it. The first one after the gradients were
 * dropped decides, with `wide`, whether they are kept in F32 until they are reduced or
 * in the dtype that they are reduced in. */
CT_NODISCARD ct_status ct_fsdp_take_grad(ct_fsdp *unit, size_t group, size_t at,
                                         const ct_span *grad, bool add, bool wide,
                                         ct_error *err);

/* Reduces a trainable group's gradients over all ranks, divides them by both factors,
 * averages them over the replicas and writes this rank's part into `shard`, or adds it.
 * Elements that got no gradient are to be cleared before. What grads holds of the group
 * is used up. `presence` says what is there on this rank; of parameters with elements
 * in `shard` it says afterwards what is there on any. NULL: nobody asks; the same on
 * all ranks. Collective. */
CT_NODISCARD ct_status ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group,
                                      ct_fsdp_presence *presence, const ct_span *shard,
                                      bool add, ct_error *err);

/* Makes elements [at, at + n) of a trainable group's gradients 0. */
CT_NODISCARD ct_status ct_fsdp_clear_grads(ct_fsdp *unit, size_t group, size_t at,
                                           size_t n, ct_error *err);

void ct_fsdp_drop_grads(ct_fsdp *unit);

/* Gives back what a ledger of units of this device keeps for them. */
void ct_fsdp_ledger_close(ct_fsdp_ledger *ledger, const ct_device *device);

/* Changes the account that the unit's bytes are on. */
void ct_fsdp_move_account(ct_fsdp *unit, ct_fsdp_ledger *ledger);

/* Parameters that are gathered and gradients that are reduced quantized to few bits, a
 * scale for each block of them.
 *
 * Each element is rounded once: gradients go straight to the rank that owns them, which
 * adds them up in rank order. All ranks decode the same codes, their own too, so that
 * all have the same parameters.
 *
 * Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant
 * Model Training", 2023; Karimireddy et al., "Error Feedback Fixes SignSGD and other
 * Gradient Compression Schemes", 2019 (what is remembered). */

typedef struct ct_fsdp_coder {
    const ct_device *device;
    void *stream; /* where its work is enqueued */
    ct_comm *comm;
    int bits; /* of a code: 8 or 4 */
} ct_fsdp_coder;

/* Whether values are quantized to so many bits: 8 and 4. */
bool ct_fsdp_bits_known(int bits);

/* An all_gather of every rank's shard into `full`, of any float dtypes. CT_ENOMEM and
 * what the communicator says; then full is in part written. */
CT_NODISCARD ct_status ct_fsdp_gather_quantized(const ct_fsdp_coder *coder,
                                                const ct_span *full,
                                                const ct_span *shard, ct_error *err);

/* A reduce_scatter of `whole` into `part`, which may lie in it: the sum over the ranks
 * times factor. residual: of as many elements as whole, what rounding has left of
 * earlier sums, and then of this one; NULL: it is forgotten. presence: as
 * ct_fsdp_reduce() has it, but for all parameters; one that is missing on this rank
 * keeps its residual. Errors as above. */
CT_NODISCARD ct_status ct_fsdp_reduce_quantized(const ct_fsdp_coder *coder,
                                                const ct_span *part,
                                                const ct_span *whole, float *residual,
                                                ct_fsdp_presence *presence,
                                                float factor, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
