/* The update of an element after a block of steps, in float and in double: workers that
 * trained separately combine their models.
 *
 * Source: Chen and Huo, "Scalable training of deep learning machines by incremental
 * block training with intra-block parallel optimization and blockwise model-update
 * filtering", 2016, in the order of operations of fairseq's optim/bmuf.py; with
 * CT_BLOCK_NESTEROV the outer step of Douillard et al., "DiLoCo: Distributed
 * Low-Communication Training of Language Models", 2023. SlowMo (Wang et al., "SlowMo:
 * Improving Communication-Efficient Distributed SGD with Slow Momentum", 2020,
 * equations 2 and 3), with the optimizer's learning rate g and SlowMo's a, is lr = 1 /
 * g, reach = a * g. A model that has trained further meanwhile rejoins as in CoCoD-SGD:
 * Shen et al., "Faster Distributed Deep Net Training: Computation and Communication
 * Decoupled Stochastic Gradient Descent", 2019, with the momentum of blocks added. */
#ifndef CT_BLOCK_MATH_H
#define CT_BLOCK_MATH_H

#include "math/coef.h"

/* The model's new value from the global model and the momentum. */
typedef enum ct_block_look {
    CT_BLOCK_PLAIN,
    CT_BLOCK_NBM,     /* the momentum again, times `momentum`: fairseq's use_nbm */
    CT_BLOCK_NESTEROV /* as torch.optim.SGD with nesterov */
} ct_block_look;

#define CT_BLOCK_SHARE_COEF(REAL, FLAG)                                                \
    REAL(world_size)                                                                   \
    REAL(inverse) /* for a power of two, exact; else 0 */
CT_COEF(ct_block_share, CT_BLOCK_SHARE_COEF)

/* The constants of shares of an average over so many workers, >= 1. */
static inline ct_block_share_coef
ct_block_share_of(int world_size)
{
    const int is_power = (world_size & (world_size - 1)) == 0;
    const ct_block_share_coef coef = {(double)world_size,
                                      is_power ? 1.0 / (double)world_size : 0.0};
    return coef;
}

#define CT_BLOCK_MOMENTUM_COEF(REAL, FLAG)                                             \
    REAL(momentum)                                                                     \
    REAL(lr)                                                                           \
    REAL(reach) /* 1; for SlowMo lr times the optimizer's learning rate */             \
    FLAG(look)  /* a ct_block_look */
CT_COEF(ct_block_momentum, CT_BLOCK_MOMENTUM_COEF)

#define CT_FORMULA "math/formula/block.h"
#include "math/each_real.h"

#endif
