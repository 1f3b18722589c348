/* Functions that the files of a sharded unit share: reduce.c calls both other files,
 * unit.c calls quantized.c. */
#ifndef CORE_FSDP_INTERNAL_H
#define CORE_FSDP_INTERNAL_H

#include "core/comm/hierarchical.h"
#include "core/fsdp/unit.h"

CT_BEGIN_DECLS

static inline size_t
ct_fsdp_bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

/* The gradients of a trainable group, of all ranks' parts, while the unit holds
 * gradients. */
static inline ct_span
ct_fsdp_grads_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->grads->data, 0, unit->grad_dtype};
    return ct_span_part(all, g->grad_at, g->n);
}

/* How many of elements [from, from + n) belong to a parameter; *at: the first of these,
 * relative to `from`. */
static inline size_t
ct_fsdp_overlap(const ct_fsdp_param *param, size_t from, size_t n, size_t *at)
{
    const size_t begin = param->at > from ? param->at : from;
    const size_t own = param->at + param->n, all = from + n;
    const size_t end = own < all ? own : all;
    *at = begin - from;
    return end > begin ? end - begin : 0;
}

/* ---- the ranks of machines ------------------------------------------------------- */

/* A group of one level is one rank a machine here. */
typedef struct ct_fsdp_levels {
    size_t machines, local; /* ranks of a machine */
    size_t place;           /* of this rank among those of its machine */
} ct_fsdp_levels;

static inline ct_fsdp_levels
ct_fsdp_levels_of(const ct_comm *comm)
{
    const int found = ct_comm_ranks_a_machine(comm), local = found == 0 ? 1 : found;
    const ct_fsdp_levels l = {
        (size_t)(comm->world_size / local),
        (size_t)local,
        (size_t)(comm->rank % local),
    };
    return l;
}

/* The part, of one length for every rank, of the rank with this one's place on a
 * machine. */
static inline ct_span
ct_fsdp_part_on(const ct_fsdp_levels *l, const ct_span *whole, size_t machine)
{
    const size_t n = whole->n / (l->machines * l->local);
    return ct_span_part(*whole, (machine * l->local + l->place) * n, n);
}

/* ---- unit.c ---------------------------------------------------------------------- */

/* Obtains the memory of gradients of this dtype, unless the unit holds gradients. */
CT_NODISCARD ct_status ct_fsdp_hold_grads(ct_fsdp *unit, ct_dtype dtype, ct_error *err);

/* *here: `shard` itself, or the block for `parts` shards where shards are offloaded.
 * The block's contents are undefined, and the next call overwrites them. */
CT_NODISCARD ct_status ct_fsdp_place(ct_fsdp *unit, const ct_span *shard, size_t parts,
                                     ct_span *here, ct_error *err);

/* Copies *here, in the block for two shards, to `shard`, or adds *here to `shard`.
 * *here afterwards: the result on the device. */
CT_NODISCARD ct_status ct_fsdp_download(ct_fsdp *unit, const ct_span *shard,
                                        ct_span *here, bool add, ct_error *err);

/* ---- quantized.c ----------------------------------------------------------------- */

/* Between ct_fsdp_part_on() of every machine and all parts of that machine, within this
 * one: gathers the parts, or sums them. */
CT_NODISCARD ct_status ct_fsdp_run_within(ct_comm *comm, const ct_fsdp_levels *l,
                                          ct_collective what, ct_reduce_op op,
                                          const ct_span *whole, ct_error *err);

/* Gathers `full` from the ranks' shards, quantized to gather_bits. */
CT_NODISCARD ct_status ct_fsdp_gather_quantized(const ct_fsdp *unit, ct_comm *comm,
                                                const ct_span *full,
                                                const ct_span *shard, ct_error *err);

/* A reduce-scatter of `whole`, summed within each machine, into `part`, maybe a part of
 * `whole`, times factor. residual: of the group, or NULL; presence as in
 * ct_fsdp_reduce(). */
CT_NODISCARD ct_status ct_fsdp_exchange_quantized(const ct_fsdp *unit, ct_comm *comm,
                                                  const ct_span *whole, float *residual,
                                                  ct_fsdp_presence *presence,
                                                  const ct_span *part, float factor,
                                                  ct_error *err);

CT_END_DECLS

#endif
