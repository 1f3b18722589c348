/* Random bits that are a function of a key and a counter, the same on every device.
 *
 * Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011:
 * Philox-4x32 with ten rounds. */
#ifndef CT_PHILOX_MATH_H
#define CT_PHILOX_MATH_H

#include "math/hd.h"

#include <stdint.h>

enum {
    CT_PHILOX_ROUNDS = 10
};

/* Round number `round`, counted from 0, on a word of each of the four. */
CT_HD static inline void
ct_philox_round(uint64_t key, uint32_t round, uint32_t *x0, uint32_t *x1, uint32_t *x2,
                uint32_t *x3)
{
    const uint64_t a = (uint64_t)0xd2511f53u * *x0;
    const uint64_t b = (uint64_t)0xcd9e8d57u * *x2;
    *x0 = (uint32_t)(b >> 32) ^ *x1 ^ ((uint32_t)key + round * 0x9e3779b9u);
    *x1 = (uint32_t)b;
    *x2 = (uint32_t)(a >> 32) ^ *x3 ^ ((uint32_t)(key >> 32) + round * 0xbb67ae85u);
    *x3 = (uint32_t)a;
}

/* x[4] is the counter and becomes the random words. */
CT_HD static inline void
ct_philox(uint64_t key, uint32_t *x)
{
    for (uint32_t round = 0; round < CT_PHILOX_ROUNDS; round++) {
        ct_philox_round(key, round, &x[0], &x[1], &x[2], &x[3]);
    }
}

/* Which 16 of a block's 128 bits belong to element `number`; the block's counter is
 * (number / 8, step). */
CT_HD static inline uint32_t
ct_philox_half(const uint32_t *words, uint64_t number)
{
    /* Not words[number / 2 % 4]: a GPU keeps no array with such an index in registers.
     */
    const uint32_t low = (number & 2u) != 0 ? words[1] : words[0];
    const uint32_t high = (number & 2u) != 0 ? words[3] : words[2];
    return (((number & 4u) != 0 ? high : low) >> (16 * (number % 2))) & 0xffffu;
}

CT_HD static inline void
ct_philox_block(uint64_t seed, uint64_t step, uint64_t number, uint32_t *words)
{
    const uint64_t block = number / 8;
    words[0] = (uint32_t)block;
    words[1] = (uint32_t)(block >> 32);
    words[2] = (uint32_t)step;
    words[3] = (uint32_t)(step >> 32);
    ct_philox(seed, words);
}

#endif
