/* Blockwise model-update filtering: every rank takes local steps for a block of
 * updates; then the average of the parameter deltas moves the global model, through a
 * momentum of blocks.
 *
 * Sources: those of math/block.h. A block's values for all parameters lie in flat
 * buffers, one for each dtype: a block is one pass that fills a buffer, one collective
 * over it, and one pass that moves the model; batch by batch, while the filled values
 * are still in the cache, where collectives are cheap. */
#ifndef CORE_BMUF_BMUF_H
#define CORE_BMUF_BMUF_H

#include "core/comm/comm.h"
#include "core/device/device.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct ct_bmuf_config {
    int64_t sync_iter; /* updates in a block; >= 1 */
    int64_t warmup;    /* updates before the first synchronization; >= 0 */
    double momentum;   /* finite, >= 0; 0: models are averaged, nothing else */
    double lr;         /* of blocks; finite, >= 0 */
    ct_block_look look;
    double reach; /* factor of the momentum in the move of the model: 1, or SlowMo's lr
                     times the optimizer's, with 1 / the optimizer's for lr */
    int64_t overlap; /* updates during which a block's collective runs, < sync_iter;
                        > 0 with 32 bits and a momentum > 0 alone */
    int delta_bits;  /* of an exchanged element of the parameter delta: 32; 8 or 4,
                        quantized, with a momentum > 0 alone */
} ct_bmuf_config;

/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_bmuf_check(const ct_bmuf_config *config, ct_error *err);

static inline bool
ct_bmuf_is_quantized(const ct_bmuf_config *config)
{
    return config->delta_bits == 8 || config->delta_bits == 4;
}

/* The synchronization that is due after an update. */
typedef enum ct_bmuf_event {
    CT_BMUF_NOTHING,
    CT_BMUF_WARMUP_END, /* all ranks take rank 0's model; never with warmup 0 */
    CT_BMUF_BLOCK_END
} ct_bmuf_event;

static inline ct_bmuf_event
ct_bmuf_after(const ct_bmuf_config *config, int64_t num_updates)
{
    if (num_updates == config->warmup) {
        return CT_BMUF_WARMUP_END;
    }
    return num_updates > config->warmup && num_updates % config->sync_iter == 0
               ? CT_BMUF_BLOCK_END
               : CT_BMUF_NOTHING;
}

/* A parameter in its most precise form, and the copy that the model computes with;
 * copy.data may be NULL. */
typedef struct ct_bmuf_tensor {
    ct_span span, copy;
} ct_bmuf_tensor;

typedef struct ct_bmuf_list {
    const ct_bmuf_tensor *tensors;
    size_t n;
} ct_bmuf_list;

/* Blocks are computed and kept in CT_F64 for parameters of CT_F64 and in CT_F32 for all
 * others, so that the rounding of narrower parameters is made up for in the next block.
 */
enum {
    CT_BMUF_DTYPES = 2
};

/* A value for every element of every parameter: flat buffers, by dtype. */
typedef struct ct_bmuf_flat {
    ct_scratch memory[CT_BMUF_DTYPES];
    bool is_single; /* F32 for all */
} ct_bmuf_flat;

typedef struct ct_bmuf {
    ct_bmuf_config config; /* the caller's, from ct_bmuf_init on */
    const ct_device *device;
    void *stream;
    int root;                      /* of ct_bmuf_adopt; the caller's */
    ct_bmuf_flat global, momentum; /* empty while config.momentum is 0 */
    ct_bmuf_flat residual;         /* error feedback of this rank's quantized deltas */
    size_t n[CT_BMUF_DTYPES];      /* elements in each buffer */
    ct_scratch wire;               /* quantized values to be sent, and received ones */
    /* Of a pending block: the parameters at the block's end, and the sums of the ranks'
     * deltas, under way. */
    ct_bmuf_flat pending, sums;
    ct_work *work[CT_BMUF_DTYPES];
    bool is_pending;   /* a block has ended without use of the average so far */
    bool is_under_way; /* and the collectives have begun */
    bool alike;        /* the global model is known to be the same on all ranks */
    ct_update_table table;
    ct_scratch terms; /* of a batch: this rank's terms of a sum over the ranks */
    struct ct_bmuf_piece *pieces; /* of a batch; these arrays have room for a list */
    ct_update_span *spans;
    ct_span *to, *from;
    size_t room;
} ct_bmuf;

/* For tensors in that device's memory. Nothing is allocated yet. */
void ct_bmuf_init(ct_bmuf *bmuf, const ct_device *device, void *stream);
void ct_bmuf_fini(ct_bmuf *bmuf);

/* The global model becomes the parameters and the momentum 0. For another list than
 * before, all buffers are laid out anew. */
CT_NODISCARD ct_status ct_bmuf_start(ct_bmuf *bmuf, const ct_bmuf_list *list,
                                     ct_error *err);

/* The end of the warm-up: every rank's parameters become rank 0's, then as
 * ct_bmuf_start. */
CT_NODISCARD ct_status ct_bmuf_take_over(ct_bmuf *bmuf, ct_comm *comm,
                                         const ct_bmuf_list *list, ct_error *err);

/* The ranks of a new group continue from the parameters, as they are, and the momentum
 * of bmuf->root, the same rank on all. */
CT_NODISCARD ct_status ct_bmuf_adopt(ct_bmuf *bmuf, ct_comm *comm,
                                     const ct_bmuf_list *list, ct_error *err);

/* The end of a block. CT_EINVAL on all ranks where a first block did not begin with the
 * same model on all. After CT_ECOMM some parameters may have moved and others not. */
CT_NODISCARD ct_status ct_bmuf_synchronize(ct_bmuf *bmuf, ct_comm *comm,
                                           const ct_bmuf_list *list, ct_error *err);

/* The end of a block with a later use of the average: begins the collectives and
 * returns. Until ct_bmuf_finish the parameters may change, and other collectives run.
 */
CT_NODISCARD ct_status ct_bmuf_begin(ct_bmuf *bmuf, ct_comm *comm,
                                     const ct_bmuf_list *list, ct_error *err);

/* Applies the pending average: the global model moves, and the parameters become the
 * global model plus their own change since the block's end. */
CT_NODISCARD ct_status ct_bmuf_finish(ct_bmuf *bmuf, ct_comm *comm,
                                      const ct_bmuf_list *list, ct_error *err);

/* Waits for the collectives under way and drops the pending average; never fails. Comes
 * before ct_bmuf_start and ct_bmuf_fini where collectives may be under way. */
void ct_bmuf_abandon(ct_bmuf *bmuf, ct_comm *comm);

/* Every tensor becomes its average over the ranks. */
CT_NODISCARD ct_status ct_bmuf_average(ct_bmuf *bmuf, ct_comm *comm,
                                       const ct_bmuf_list *list, ct_error *err);

/* Copies the values of a flat buffer to or from a list of as many elements as the
 * parameters, of float dtypes that are as wide or wider. After ct_bmuf_start. Loading
 * &bmuf->pending, the parameters at a block's end, makes that block's average pending:
 * ct_bmuf_finish then begins the collectives itself. */
CT_NODISCARD ct_status ct_bmuf_save(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                                    const ct_bmuf_list *to, ct_error *err);
CT_NODISCARD ct_status ct_bmuf_load(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                                    const ct_bmuf_list *from, ct_error *err);

#endif
