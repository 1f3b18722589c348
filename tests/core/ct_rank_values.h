/* What the ranks of a test hold. */
#ifndef CT_RANK_VALUES_H
#define CT_RANK_VALUES_H

#include "core/base/alloc.h"
#include "ct_random.h"
#include "ct_test.h"

enum {
    LARGEST = 300001 /* floats: more than all slots, and odd */
};

/* What `rank` holds at index i of any test. */
static inline float
value_at(int rank, size_t i)
{
    ct_random r = {(uint64_t)i * 64 + (uint64_t)rank + 1};
    return (float)(ct_random_below(&r, 1u << 20)) * 0.37f - 9e4f * (float)rank;
}

/* n of them, with room for one more. */
static inline float *
values_of(int rank, size_t n)
{
    float *values = ct_alloc((n + 1) * sizeof *values);
    CHECK(values != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = value_at(rank, i);
    }
    return values;
}

#endif
