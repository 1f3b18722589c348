/* Random numbers that are the same in every run. */
#ifndef CT_RANDOM_H
#define CT_RANDOM_H

#include <stddef.h>
#include <stdint.h>

typedef struct ct_random {
    uint64_t state; /* not 0 */
} ct_random;

/* Marsaglia, "Xorshift RNGs", 2003. */
static inline uint64_t
ct_random_bits(ct_random *r)
{
    r->state ^= r->state << 13;
    r->state ^= r->state >> 7;
    r->state ^= r->state << 17;
    return r->state;
}

/* In [0, n). */
static inline size_t
ct_random_below(ct_random *r, size_t n)
{
    return (size_t)(ct_random_bits(r) >> 11) % n;
}

/* In [-1, 1). */
static inline double
ct_random_unit(ct_random *r)
{
    return (double)(ct_random_bits(r) >> 11) * 0x1p-52 - 1.0;
}

#endif
