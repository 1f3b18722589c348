#include "core/ct_schedule.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

typedef struct row {
    ct_schedule_kind kind;
    int64_t warmup, training;
    double cycles;
    int64_t step;
    double factor;
} row;

/* What the lambdas of transformers.optimization 5.17 return. */
static const row table[] = {
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 0,   0,    0.5, 0,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 0,   0,    0.5, 1,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 0,   0,    0.5, 2,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 0,   0,    0.5, 7,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 0,    0.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 1,    0x1.2492492492492p-3 },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 2,    0x1.2492492492492p-2 },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 7,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 8,    1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 54,   1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 99,   1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 100,  1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 101,  1.0                  },
    {CT_SCHEDULE_CONSTANT_WITH_WARMUP, 7,   100,  0.5, 307,  1.0                  },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 0,    1.0                  },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 1,    0x1.ccccccccccccdp-1 },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 2,    0x1.999999999999ap-1 },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 6,    0x1.999999999999ap-2 },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 9,    0x1.999999999999ap-4 },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 10,   0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 11,   0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   10,   0.5, 37,   0.0                  },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 0,    0.0                  },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 1,    0x1.5555555555555p-2 },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 2,    0x1.5555555555555p-1 },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 3,    1.0                  },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 4,    0x1.b6db6db6db6dbp-1 },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 7,    0x1.b6db6db6db6dbp-2 },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 9,    0x1.2492492492492p-3 },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 10,   0.0                  },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 11,   0.0                  },
    {CT_SCHEDULE_LINEAR,               3,   10,   0.5, 37,   0.0                  },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 0,    0.0                  },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 1,    0x1.999999999999ap-4 },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 2,    0x1.999999999999ap-3 },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 9,    0x1.ccccccccccccdp-1 },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 10,   0.0                  },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 11,   0.0                  },
    {CT_SCHEDULE_LINEAR,               10,  10,   0.5, 37,   0.0                  },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 0,    0.0                  },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 1,    0x1.5555555555555p-4 },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 2,    0x1.5555555555555p-3 },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 9,    0x1.8000000000000p-1 },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 10,   0x1.aaaaaaaaaaaabp-1 },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 11,   0x1.d555555555555p-1 },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 12,   0.0                  },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 13,   0.0                  },
    {CT_SCHEDULE_LINEAR,               12,  10,   0.5, 37,   0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   0,    0.5, 0,    0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   0,    0.5, 1,    0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   0,    0.5, 2,    0.0                  },
    {CT_SCHEDULE_LINEAR,               0,   0,    0.5, 7,    0.0                  },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 0,    0.0                  },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 1,    0x1.47ae147ae147bp-7 },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 2,    0x1.47ae147ae147bp-6 },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 100,  1.0                  },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 101,  0x1.ff6e5d4c3b2a2p-1 },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 551,  0x1.fedcba9876543p-2 },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 999,  0x1.23456789abcdfp-10},
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 1000, 0.0                  },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 1001, 0.0                  },
    {CT_SCHEDULE_LINEAR,               100, 1000, 0.5, 3007, 0.0                  },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 0,    1.0                  },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 1,    0x1.f378709a22a80p-1 },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 2,    0x1.cf1bbcdcbfa54p-1 },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 6,    0x1.61c8864680b59p-2 },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 9,    0x1.90f1ecbbab010p-6 },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 10,   0.0                  },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 11,   0x1.90f1ecbbab010p-6 },
    {CT_SCHEDULE_COSINE,               0,   10,   0.5, 37,   0x1.96791823aad2ep-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 0,    0.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 1,    0x1.5555555555555p-2 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 2,    0x1.5555555555555p-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 3,    1.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 4,    0x1.e6a5e54e5ae38p-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 7,    0x1.8e11bc73f6ea0p-2 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 9,    0x1.95a1ab1a51c80p-5 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 10,   0.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 11,   0x1.95a1ab1a51c78p-5 },
    {CT_SCHEDULE_COSINE,               3,   10,   0.5, 37,   0x1.95a1ab1a51cc0p-5 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 0,    0.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 1,    0x1.5555555555555p-2 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 2,    0x1.5555555555555p-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 3,    1.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 4,    0x1.9f9d07145f6e9p-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 7,    0x1.95a1ab1a51c78p-5 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 9,    0x1.9f9d07145f6e8p-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 10,   1.0                  },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 11,   0x1.9f9d07145f6eap-1 },
    {CT_SCHEDULE_COSINE,               3,   10,   1.0, 37,   0x1.9f9d07145f6d8p-1 },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 0,    0.0                  },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 1,    0x1.2492492492492p-3 },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 2,    0x1.2492492492492p-2 },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 7,    1.0                  },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 8,    0x1.fff7ccf40b67ep-1 },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 504,  0x1.fbf3511e6d9bap-2 },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 999,  0x1.06617e9305000p-14},
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 1000, 0.0                  },
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 1001, 0x1.06617e9304000p-14},
    {CT_SCHEDULE_COSINE,               7,   1000, 2.5, 3007, 0x1.bfdc2dc07d790p-6 },
    {CT_SCHEDULE_COSINE,               0,   0,    0.5, 0,    1.0                  },
    {CT_SCHEDULE_COSINE,               0,   0,    0.5, 1,    0.0                  },
    {CT_SCHEDULE_COSINE,               0,   0,    0.5, 2,    1.0                  },
    {CT_SCHEDULE_COSINE,               0,   0,    0.5, 7,    0.0                  },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 0,    0.0                  },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 1,    0x1.5555555555555p-4 },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 2,    0x1.5555555555555p-3 },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 9,    0x1.8000000000000p-1 },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 10,   0x1.aaaaaaaaaaaabp-1 },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 11,   0x1.d555555555555p-1 },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 12,   1.0                  },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 13,   0.0                  },
    {CT_SCHEDULE_COSINE,               12,  10,   0.5, 37,   0.0                  },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 0,    0.0                  },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 1,    0x1.999999999999ap-4 },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 2,    0x1.999999999999ap-3 },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 9,    0x1.ccccccccccccdp-1 },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 10,   1.0                  },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 11,   1.0                  },
    {CT_SCHEDULE_COSINE,               10,  10,   0.0, 37,   1.0                  },
};

static void
test_factors_equal_those_of_transformers_to_the_last_bit(void)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const row *r = &table[i];
        const ct_schedule s = {r->kind, r->warmup, r->training, r->cycles};
        CHECK(ct_schedule_check(&s, NULL) == CT_OK);
        CHECK(ct_schedule_factor(&s, r->step) == r->factor);
    }
}

static void
test_constant_is_one_whatever_the_warmup(void)
{
    const ct_schedule s = {CT_SCHEDULE_CONSTANT, 100, 10, 0.5};
    for (int64_t step = 0; step < 300; step++) {
        CHECK(ct_schedule_factor(&s, step) == 1.0);
    }
}

static void
test_factors_stay_between_zero_and_one_and_zero_has_no_sign(void)
{
    for (int kind = 0; kind < CT_SCHEDULE_KIND_COUNT; kind++) {
        for (int64_t warmup = 0; warmup < 30; warmup += 7) {
            const ct_schedule s = {(ct_schedule_kind)kind, warmup, 20, 0.5};
            for (int64_t step = 0; step < 60; step++) {
                const double factor = ct_schedule_factor(&s, step);
                CHECK(factor >= 0.0 && factor <= 1.0 && !signbit(factor));
            }
        }
    }
}

static void
test_names_are_those_of_transformers(void)
{
    static const char *const names[] = {"constant", "constant_with_warmup", "linear",
                                        "cosine"};
    for (int kind = 0; kind < CT_SCHEDULE_KIND_COUNT; kind++) {
        CHECK(strcmp(ct_schedule_name((ct_schedule_kind)kind), names[kind]) == 0);
        CHECK(ct_schedule_from_name(names[kind]) == (ct_schedule_kind)kind);
    }
    CHECK(ct_schedule_from_name("Linear") == CT_SCHEDULE_KIND_COUNT);
    CHECK(ct_schedule_from_name("") == CT_SCHEDULE_KIND_COUNT);
}

static void
check_refused(ct_schedule schedule, const char *field)
{
    ct_error err;
    CHECK(ct_schedule_check(&schedule, &err) == CT_EINVAL);
    CHECK(strstr(err.message, field) != NULL);
}

static void
test_a_bad_field_is_named(void)
{
    check_refused((ct_schedule){CT_SCHEDULE_LINEAR, -1, 10, 0.5}, "num_warmup_steps");
    check_refused((ct_schedule){CT_SCHEDULE_LINEAR, 0, -2, 0.5}, "num_training_steps");
    check_refused((ct_schedule){CT_SCHEDULE_COSINE, 0, 2, NAN}, "num_cycles");
    check_refused((ct_schedule){CT_SCHEDULE_COSINE, 0, 2, INFINITY}, "num_cycles");
    check_refused((ct_schedule){CT_SCHEDULE_KIND_COUNT, 0, 2, 0.5}, "kind");
}

int
main(void)
{
    test_factors_equal_those_of_transformers_to_the_last_bit();
    test_constant_is_one_whatever_the_warmup();
    test_factors_stay_between_zero_and_one_and_zero_has_no_sign();
    test_names_are_those_of_transformers();
    test_a_bad_field_is_named();
    return 0;
}
