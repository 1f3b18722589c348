/* Stochastic rounding to bfloat16. Expanded by cpu/expand.h for float and double. */
/* ct_philox_block() for BLOCKS blocks from `block` on; words of equal index are
 * adjacent, so that the blocks make vectors. */
static void
CT_NAME(philox)(const ct_rounding *key, uint64_t block, uint32_t (*words)[BLOCKS])
{
    for (size_t b = 0; b < BLOCKS; b++) {
        words[0][b] = (uint32_t)(block + b);
        words[1][b] = (uint32_t)((block + b) >> 32);
        words[2][b] = (uint32_t)key->step;
        words[3][b] = (uint32_t)(key->step >> 32);
    }
    for (uint32_t round = 0; round < CT_PHILOX_ROUNDS; round++) {
        for (size_t b = 0; b < BLOCKS; b++) {
            ct_philox_round(key->seed, round, &words[0][b], &words[1][b], &words[2][b],
                            &words[3][b]);
        }
    }
}

/* Rounds to bfloat16 by the random bits of elements number, number + 1, ...; n <=
 * CT_TILE. */
static void
CT_NAME(dither)(const void *from, uint16_t *restrict to, const ct_rounding *rounding,
                uint64_t number, size_t n)
{
    uint32_t words[4][BLOCKS], last[4], random[CT_TILE + 8];
    const uint32_t *restrict own = random + number % 8;
    const ct_real *restrict x = from;
    CT_NAME(philox)(rounding, number / 8, words);
    for (size_t b = 0; b < BLOCKS; b++) {
        for (size_t w = 0; w < 4; w++) {
            random[8 * b + 2 * w] = words[w][b] & 0xffffu;
            random[8 * b + 2 * w + 1] = words[w][b] >> 16;
        }
    }
    if (number % 8 != 0) {
        ct_philox_block(rounding->seed, rounding->step, number / 8 * 8 + CT_TILE, last);
        for (uint64_t j = 0; j < 8; j++) {
            random[CT_TILE + j] = ct_philox_half(last, j);
        }
    }
    for (size_t i = 0; i < n; i++) {
        to[i] = ct_bf16_from_f32_stochastic((float)x[i], own[i]);
    }
}
