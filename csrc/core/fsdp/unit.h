/* One FSDP unit: parameters that are gathered, released and reduced together.
 *
 * A unit has flat groups: parameters behind each other, padded so that every rank owns
 * an equal shard. `full` holds the gathered groups, each in a dtype of its own, `grads`
 * the gradients. Both stay at fixed addresses. Their pages are released between uses,
 * for other units to use: outside of its own forward and backward a unit takes no
 * memory but its shards, which the caller owns.
 *
 * A unit may keep secondary shards from a gather on: its gathered parameters,
 * sharded over the ranks of each machine. Gathers then stay within the machine.
 *
 * Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
 * parameter models", 2020, stage 3; Zhang et al., "MiCS", 2022 (replicate groups); Wang
 * et al., "ZeRO++", 2023 (secondary shards, quantized values between machines). */
#ifndef CORE_FSDP_UNIT_H
#define CORE_FSDP_UNIT_H

#include "core/base/mapping.h"
#include "core/comm/comm.h"
#include "core/device/device.h"
#include "core/fsdp/shard_file.h"

CT_BEGIN_DECLS

/* The memory of units: bytes in use, and blocks that units pass to each other. `live`
 * counts gathered parameters, secondary shards, copies of shards in files, and
 * gradients before their reduction, `peak` is the largest `live`. */
typedef struct ct_fsdp_ledger {
    size_t live, peak;
    size_t begun; /* units with a prefetch in progress */
    size_t reads; /* units with a copy of shards in a file */
    ct_block_cache cache;
    ct_scratch staging;   /* of the device: a shard on its way to or from the host */
    void *staging_stream; /* of the last shard */
    ct_scratch zero;      /* of the device: a float of 0, made at the first use */
    /* On a GPU alone: releasing memory there waits for all work. */
    ct_scratch messages;   /* of quantized collectives */
    void *messages_stream; /* of the last message */
    ct_scratch norm[2];    /* of clipping: partial sums, and the sum */
} ct_fsdp_ledger;

/* A parameter's place in its group, and whether a rank has its gradient. */
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
    size_t n; /* elements with padding: a multiple of the ranks */
    bool trainable;
    ct_dtype shard; /* of the shards, and of the gradients of shards */
    ct_dtype full;  /* of the gathered parameters; other than shard between floats */
    /* The unit's own: */
    size_t at;      /* first byte in full */
    size_t grad_at; /* first element in grads, if trainable */
    ct_work *work;  /* the prefetch in progress, or NULL */
} ct_fsdp_group;

typedef struct ct_fsdp_config {
    ct_dtype reduce;               /* of gradients while they are reduced */
    double predivide, postdivide;  /* of gradients, before and after their sum */
    bool lone_gather, lone_reduce; /* without the other ranks, for measurements */
    int gather_bits, reduce_bits;  /* 8 or 4: of quantized values; 0: not quantized */
    bool offload;                  /* shards and gradients are in host memory, pinned
                                      where the host is not to wait */
} ct_fsdp_config;

typedef struct ct_fsdp {
    const ct_device *device;
    void *stream; /* of the device, for the unit's work; the caller's */
    ct_fsdp_config config;
    ct_comm *replicate_group; /* the replicate group, or NULL; the caller's */
    ct_fsdp_ledger *ledger;   /* the caller's; units may share a ledger */
    ct_fsdp_group *groups;
    size_t n_groups;
    ct_mapping *full, *grads; /* the caller's, as long as the unit lives */
    ct_mapping *secondary;    /* likewise; NULL: no secondary shards */
    ct_shard_file file;
    float *residual; /* the error-feedback residual, as long as grads; the caller's, or
                        NULL */
    bool gathered;
    bool begun; /* a prefetch is in progress: full belongs to the communicator */
    bool kept;  /* the secondary shards hold values */
    bool holds_grads;
    bool reducing; /* gradients are reduced beside the work on the stream */
    void *copied;  /* of fetch_begin: behind copies from and to host memory; or NULL */
    ct_dtype grad_dtype; /* of the gradients in grads */
    ct_label label; /* the unit's name for other ranks; counts collectives, forwards */
} ct_fsdp;

/* Lays out n_groups groups of sizes divisible by world_size. On failure the
 * unit is {0}, and may be freed too. CT_EINVAL: another size, a trainable group of no
 * float dtype, or a conversion from or to one. CT_ENOMEM. */
CT_NODISCARD ct_status ct_fsdp_init(ct_fsdp *unit, const ct_device *device,
                                    const ct_fsdp_group *groups, size_t n_groups,
                                    int world_size, ct_error *err);
void ct_fsdp_fini(ct_fsdp *unit);

/* The bytes that full and grads need, for any dtypes of the configuration. */
static inline size_t
ct_fsdp_full_bytes(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].at;
}

static inline size_t
ct_fsdp_grad_bytes(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(CT_F32);
}

/* The bytes of secondary shards in groups of ranks_a_machine. */
size_t ct_fsdp_secondary_bytes(const ct_fsdp *unit, int ranks_a_machine);

/* Gathers every group from shards[i], n / world_size elements each. A gathered
 * unit is left alone; a prefetch is ended, and its shards are not read again.
 * Offloaded shards are read until ct_fsdp_await_copies() has returned. Collective. On
 * failure nothing is gathered. */
CT_NODISCARD ct_status ct_fsdp_gather(ct_fsdp *unit, ct_comm *comm,
                                      const ct_span *shards, ct_error *err);

/* Begins a prefetch: the gather runs beside other computation. Reads the shards as
 * ct_fsdp_gather() does and counts full as live. A gathered or prefetched unit is left
 * alone. Collective. CT_EINVAL with gather_bits: quantized values are decoded after the
 * collective. On failure no prefetch has begun. */
CT_NODISCARD ct_status ct_fsdp_begin_gather(ct_fsdp *unit, ct_comm *comm,
                                            const ct_span *shards, ct_error *err);

/* Waits for a prefetch, if there is one, and releases the result. The errors of the
 * prefetch are dropped. */
void ct_fsdp_cancel_gather(ct_fsdp *unit, ct_comm *comm);

/* Begins to read the shards of a file for the next gather: the values of this moment.
 * Does nothing without anything to read. On failure nothing has begun. */
CT_NODISCARD ct_status ct_fsdp_begin_read(ct_fsdp *unit, ct_error *err);
void ct_fsdp_drop_read(ct_fsdp *unit); /* shards change from here on */

/* Releases gathered parameters, not a prefetch; elements read as 0 afterwards. */
void ct_fsdp_release(ct_fsdp *unit);

/* Keeps secondary shards of the gathered parameters. The next gathers have the values
 * of the secondary shards, whatever the shards are by then, up to
 * ct_fsdp_drop_secondary(). All ranks call both alike. Does nothing without
 * `secondary`, or where secondary shards are kept. CT_EDEVICE. */
CT_NODISCARD ct_status ct_fsdp_keep_secondary(ct_fsdp *unit, const ct_comm *comm,
                                              ct_error *err);
void ct_fsdp_drop_secondary(ct_fsdp *unit);

/* Stores the gradient of elements [at, at + grad->n) of a group, in any float dtype, or
 * adds it to the stored gradient. With `wide` the first gradient after a drop makes the
 * unit keep gradients in F32 until they are reduced, else in the reduce dtype. */
CT_NODISCARD ct_status ct_fsdp_take_grad(ct_fsdp *unit, size_t group, size_t at,
                                         const ct_span *grad, bool add, bool wide,
                                         ct_error *err);

/* Reduces a trainable group's gradients over all ranks, divides by both factors,
 * averages over the replicate group, and writes this rank's part into `shard`, or adds
 * it. Missing gradients are to be cleared before; the group's part of grads is used up.
 * `presence` holds the gradients that this rank has, and afterwards, for parameters
 * with elements in `shard`, whether any rank has one. NULL on all ranks or on none.
 * Collective. */
CT_NODISCARD ct_status ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group,
                                      ct_fsdp_presence *presence, const ct_span *shard,
                                      bool add, ct_error *err);

/* Waits for the copies of offloaded shards and their gradients: before the host writes
 * to a shard or uses a gradient. */
CT_NODISCARD ct_status ct_fsdp_await_copies(ct_fsdp *unit, ct_error *err);

/* Orders later work on the unit's stream behind its reductions: before a shard's
 * gradient is used or freed. */
CT_NODISCARD ct_status ct_fsdp_settle(ct_fsdp *unit, ct_comm *comm, ct_error *err);

/* Makes elements [at, at + n) of a trainable group's gradients 0. */
CT_NODISCARD ct_status ct_fsdp_clear_grads(ct_fsdp *unit, size_t group, size_t at,
                                           size_t n, ct_error *err);

void ct_fsdp_drop_grads(ct_fsdp *unit);

/* Frees the memory that a ledger keeps for units of this device. */
void ct_fsdp_ledger_close(ct_fsdp_ledger *ledger, const ct_device *device);

/* Moves the unit's bytes from its ledger to another. */
void ct_fsdp_set_ledger(ct_fsdp *unit, ct_fsdp_ledger *ledger);

CT_END_DECLS

#endif
