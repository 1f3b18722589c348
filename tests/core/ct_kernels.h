/* For the tests of kernels: elements of any float dtype, and a run of one check under
 * every instruction set and several numbers of threads. */
#ifndef CT_KERNELS_H
#define CT_KERNELS_H

#include "core/device/device.h"
#include "core/base/pool.h"
#include "ct_test.h"
#include "math/half.h"

static inline double
ct_load(ct_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case CT_F32:
        return ((const float *)data)[i];
    case CT_BF16:
        return ct_f32_from_bf16(((const uint16_t *)data)[i]);
    case CT_F16:
        return ct_f32_from_f16(((const uint16_t *)data)[i]);
    default:
        return ((const double *)data)[i];
    }
}

static inline void
ct_store(ct_dtype dtype, void *data, size_t i, double value)
{
    switch (dtype) {
    case CT_F32:
        ((float *)data)[i] = (float)value;
        break;
    case CT_BF16:
        ((uint16_t *)data)[i] = ct_bf16_from_f64(value);
        break;
    case CT_F16:
        ((uint16_t *)data)[i] = ct_f16_from_f64(value);
        break;
    default:
        ((double *)data)[i] = value;
    }
}

/* Calls check(arg) under each instruction set that this processor has, with 1, 2, 3
 * and 8 threads, and leaves the defaults. */
static inline void
ct_for_each_setting(void (*check)(void *arg), void *arg)
{
    static const char *const sets[] = {"base", "v3", "v4"};
    static const size_t threads[] = {1, 2, 3, 8};
    for (size_t s = 0; s < 3; s++) {
        ct_error err;
        if (ct_cpu_set_isa(sets[s], &err) != CT_OK) {
            static bool told[3];
            if (!told[s]) {
                printf("skipped: %s\n", err.message);
            }
            told[s] = true;
            continue;
        }
        for (size_t t = 0; t < 4; t++) {
            CHECK(ct_pool_set_threads(threads[t], NULL) == CT_OK);
            check(arg);
        }
    }
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK);
    CHECK(ct_pool_set_threads(2, NULL) == CT_OK);
}

#endif
