/* Blockwise model-update filtering: workers train apart for a block of updates, then
 * average how far they have come, and move the global model with a momentum of blocks.
 *
 * The sources are those of math/block.h. What a block needs of every parameter
 * lies in flat buffers, one for each dtype: a block is one pass that fills a buffer,
 * one collective over it, and one pass that moves the model; batch by batch while what
 * was filled is still in the cache, where a collective costs little. */
#ifndef CORE_BMUF_BMUF_H
#define CORE_BMUF_BMUF_H

#include "core/comm/comm.h"
#include "core/device/device.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct ct_bmuf_config {
    int64_t sync_iter; /* updates in a block; >= 1 */
    int64_t warmup;    /* updates before the workers first meet; >= 0 */
    double momentum;   /* finite, >= 0; 0: the models are averaged, nothing else */
    double lr;         /* of blocks; finite, >= 0 */
    ct_block_look look;
    double reach; /* what the momentum is multiplied by where it moves the model: 1, or
                     SlowMo's lr times the optimizer's, with 1 / that for lr */
    int64_t overlap; /* updates behind which a block's collective runs, < sync_iter;
                        above 0 with 32 bits and a momentum above 0 alone */
    int delta_bits;  /* in which distances travel: 32: as they are; 8 or 4 with a
                        momentum above 0 alone */
} ct_bmuf_config;

/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_bmuf_check(const ct_bmuf_config *config, ct_error *err);

/* Whether distances travel quantized. */
static inline bool
ct_bmuf_is_coded(const ct_bmuf_config *config)
{
    return config->delta_bits == 8 || config->delta_bits == 4;
}

/* What follows an update. */
typedef enum ct_bmuf_event {
    CT_BMUF_NOTHING,
    CT_BMUF_WARMUP_END, /* all take over the model of rank 0: never with warmup 0 */
    CT_BMUF_BLOCK_END
} ct_bmuf_event;
ct_bmuf_event ct_bmuf_after(const ct_bmuf_config *config, int64_t num_updates);

/* A parameter as it is stored with the most bits, and its copy that the model computes
 * with; copy.data is NULL where there is none. */
typedef struct ct_bmuf_tensor {
    ct_span span, copy;
} ct_bmuf_tensor;

typedef struct ct_bmuf_list {
    const ct_bmuf_tensor *tensors;
    size_t n;
} ct_bmuf_list;

enum {
    CT_BMUF_DTYPES = 2 /* CT_F32 and CT_F64 */
};

/* The dtype in which blocks of parameters are computed and kept: F64, or F32 for all
 * that is narrower, so that their rounding is made up for in the next block. */
static inline ct_dtype
ct_bmuf_dtype(ct_dtype of_parameter)
{
    return of_parameter == CT_F64 ? CT_F64 : CT_F32;
}

/* A value for every element of every parameter: those of one dtype side by side. */
typedef struct ct_bmuf_flat {
    ct_scratch memory[CT_BMUF_DTYPES];
    bool is_single; /* F32 for all */
} ct_bmuf_flat;

typedef struct ct_bmuf {
    const ct_device *device;
    void *stream;
    ct_bmuf_flat global, momentum; /* nothing in them while momentum is 0 */
    ct_bmuf_flat residual;    /* what codes of distances have missed on this rank */
    size_t n[CT_BMUF_DTYPES]; /* elements in each of them */
    ct_scratch wire;          /* codes that are sent, and those that come */
    ct_bmuf_flat left, sums; /* the parameters when the ranks met, and what is summed */
    ct_work *work[CT_BMUF_DTYPES];
    bool is_away;      /* a block has ended, and its average has not been taken yet */
    bool is_under_way; /* and its collectives have begun */
    bool alike;        /* the global model is known to be the same on all ranks */
    ct_scratch shares; /* of a batch: what is reduced */
    struct ct_bmuf_piece *pieces; /* of a batch, with room for a list */
    ct_update_span *spans;
    ct_span *to, *from;
    size_t room;
} ct_bmuf;

/* For tensors in that device's memory. Nothing is allocated yet. */
void ct_bmuf_init(ct_bmuf *bmuf, const ct_device *device, void *stream);
void ct_bmuf_fini(ct_bmuf *bmuf);

/* The global model becomes the parameters and the momentum 0. Where the list is other
 * than at the last start, everything is laid out anew. */
CT_NODISCARD ct_status ct_bmuf_start(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                     const ct_bmuf_list *list, ct_error *err);

/* The end of the warm-up: every rank's parameters become those of rank 0, then as
 * ct_bmuf_start. */
CT_NODISCARD ct_status ct_bmuf_take_over(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                         ct_comm *comm, const ct_bmuf_list *list,
                                         ct_error *err);

/* The ranks of a new group go on from the root's parameters, as they are, and its
 * momentum; root is the same on all. */
CT_NODISCARD ct_status ct_bmuf_adopt(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                     ct_comm *comm, int root, const ct_bmuf_list *list,
                                     ct_error *err);

/* The end of a block. CT_EINVAL on all ranks where a first block did not begin with the
 * same model on all. After CT_ECOMM some parameters may have moved and others not. */
CT_NODISCARD ct_status ct_bmuf_synchronize(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                           ct_comm *comm, const ct_bmuf_list *list,
                                           ct_error *err);

/* The end of a block whose average is taken later: begins the collectives and returns.
 * Until ct_bmuf_finish the parameters may go on; other collectives may come between. */
CT_NODISCARD ct_status ct_bmuf_begin(ct_bmuf *bmuf, ct_comm *comm,
                                     const ct_bmuf_list *list, ct_error *err);

/* Takes the average: the global model moves, and the parameters become it and what they
 * have learnt since. */
CT_NODISCARD ct_status ct_bmuf_finish(ct_bmuf *bmuf, const ct_bmuf_config *config,
                                      ct_comm *comm, const ct_bmuf_list *list,
                                      ct_error *err);

/* Waits for what is under way and forgets it; never fails. Comes before ct_bmuf_start
 * and ct_bmuf_fini where something may be. */
void ct_bmuf_abandon(ct_bmuf *bmuf, ct_comm *comm);

/* Between the two: the parameters when the ranks met, from a list like theirs. Then
 * ct_bmuf_finish begins the collectives itself. */
CT_NODISCARD ct_status ct_bmuf_load_left(ct_bmuf *bmuf, const ct_bmuf_list *from,
                                         ct_error *err);

/* Every tensor becomes its average over the ranks: shares, summed. */
CT_NODISCARD ct_status ct_bmuf_average(ct_bmuf *bmuf, ct_comm *comm,
                                       const ct_bmuf_list *list, ct_error *err);

/* The global model, the momentum or the residual of each parameter: to or from the
 * spans of a list like theirs, of any float dtypes that are as wide or wider.
 * ct_bmuf_start comes before. */
CT_NODISCARD ct_status ct_bmuf_save(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                                    const ct_bmuf_list *to, ct_error *err);
CT_NODISCARD ct_status ct_bmuf_load(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                                    const ct_bmuf_list *from, ct_error *err);

/* Lists of tensors, cut into batches of a size. */

/* A part of a tensor, and where it is in the flat buffers of its dtype. */
typedef struct ct_bmuf_piece {
    ct_span span, copy;
    size_t at;
} ct_bmuf_piece;

/* Pieces that are computed in one dtype, one behind the other, and where the next batch
 * starts. */
typedef struct ct_bmuf_batch {
    const ct_bmuf_list *list;
    ct_dtype dtype;
    size_t most; /* elements in a batch */
    size_t n_pieces, n;
    size_t start;          /* of the batch, in flat buffers */
    void *shares;          /* of the batch: what is reduced; the caller's */
    size_t tensor, offset; /* of the next piece */
    size_t at;             /* of the next piece, in flat buffers */
} ct_bmuf_batch;

static inline ct_dtype
ct_bmuf_flat_dtype(const ct_bmuf_flat *flat, ct_dtype dtype)
{
    return flat->is_single ? CT_F32 : dtype;
}

static inline void *
ct_bmuf_flat_at(const ct_bmuf_flat *flat, ct_dtype dtype, size_t at)
{
    return (char *)flat->memory[dtype].data +
           at * ct_dtype_size(ct_bmuf_flat_dtype(flat, dtype));
}

#endif
