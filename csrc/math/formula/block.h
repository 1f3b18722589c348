/* A block's update for an element of type ct_real: the only statement of the formulas.
 */

CT_ROUNDED(ct_block_share, CT_BLOCK_SHARE_COEF)
CT_ROUNDED(ct_block_momentum, CT_BLOCK_MOMENTUM_COEF)

/* For a power of two the product has the quotient's bits, in a fraction of the time. */
CT_HD static inline ct_real
CT_REAL(ct_block_part)(const CT_REAL(ct_block_share_coef) * c, ct_real x)
{
    return c->inverse > 0 ? x * c->inverse : x / c->world_size;
}

/* A worker's term of the sum over all: *share becomes the part of the average. */
CT_HD static inline void
CT_REAL(ct_block_share_apply)(const CT_REAL(ct_block_share_coef) * c, ct_real value,
                              ct_real *share, ct_real *state)
{
    (void)state;
    *share = CT_REAL(ct_block_part)(c, value);
}

/* Also the part of the average parameter delta from the global model, state[0]. */
CT_HD static inline void
CT_REAL(ct_block_delta_apply)(const CT_REAL(ct_block_share_coef) * c, ct_real value,
                              ct_real *share, ct_real *state)
{
    *share = CT_REAL(ct_block_part)(c, state[0] - value);
}

/* state is the global model and the momentum of blocks; delta the average that the
 * workers have come. */
CT_HD static inline void
CT_REAL(ct_block_momentum_apply)(const CT_REAL(ct_block_momentum_coef) * c,
                                 ct_real delta, ct_real *param, ct_real *state)
{
    const ct_real step = c->lr * delta;
    const ct_real smoothed = c->momentum * state[1] + step;
    const ct_real move = c->reach * smoothed;
    const ct_real again = c->momentum * move;
    const ct_real plain = state[0] - move;
    const ct_real ahead = c->look == CT_BLOCK_NBM ? plain - again : plain;
    const ct_real nesterov = state[0] - (step + again);

    state[1] = smoothed;
    state[0] = c->look == CT_BLOCK_NESTEROV ? nesterov : ahead;
    *param = state[0];
}

/* For a model that has trained on from state[2] during the averaging: the progress
 * since then is kept. */
CT_HD static inline void
CT_REAL(ct_block_rejoin_apply)(const CT_REAL(ct_block_momentum_coef) * c, ct_real delta,
                               ct_real *param, ct_real *state)
{
    const ct_real learnt = *param - state[2];
    CT_REAL(ct_block_momentum_apply)(c, delta, param, state);
    *param = state[0] + learnt;
}
