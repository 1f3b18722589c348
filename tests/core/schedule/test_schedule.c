#include "core/schedule/schedule.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

typedef struct row {
    const char *name;
    double warmup, training, cycles;
    int64_t step;
    double factor;
} row;

/* What the lambdas of transformers.optimization 5.17 return. */
static const row table[] = {
    {"constant_with_warmup", 0,   0,    0.5, 0,    1.0                  },
    {"constant_with_warmup", 0,   0,    0.5, 1,    1.0                  },
    {"constant_with_warmup", 0,   0,    0.5, 2,    1.0                  },
    {"constant_with_warmup", 0,   0,    0.5, 7,    1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 0,    0.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 1,    0x1.2492492492492p-3 },
    {"constant_with_warmup", 7,   100,  0.5, 2,    0x1.2492492492492p-2 },
    {"constant_with_warmup", 7,   100,  0.5, 7,    1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 8,    1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 54,   1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 99,   1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 100,  1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 101,  1.0                  },
    {"constant_with_warmup", 7,   100,  0.5, 307,  1.0                  },
    {"linear",               0,   10,   0.5, 0,    1.0                  },
    {"linear",               0,   10,   0.5, 1,    0x1.ccccccccccccdp-1 },
    {"linear",               0,   10,   0.5, 2,    0x1.999999999999ap-1 },
    {"linear",               0,   10,   0.5, 6,    0x1.999999999999ap-2 },
    {"linear",               0,   10,   0.5, 9,    0x1.999999999999ap-4 },
    {"linear",               0,   10,   0.5, 10,   0.0                  },
    {"linear",               0,   10,   0.5, 11,   0.0                  },
    {"linear",               0,   10,   0.5, 37,   0.0                  },
    {"linear",               3,   10,   0.5, 0,    0.0                  },
    {"linear",               3,   10,   0.5, 1,    0x1.5555555555555p-2 },
    {"linear",               3,   10,   0.5, 2,    0x1.5555555555555p-1 },
    {"linear",               3,   10,   0.5, 3,    1.0                  },
    {"linear",               3,   10,   0.5, 4,    0x1.b6db6db6db6dbp-1 },
    {"linear",               3,   10,   0.5, 7,    0x1.b6db6db6db6dbp-2 },
    {"linear",               3,   10,   0.5, 9,    0x1.2492492492492p-3 },
    {"linear",               3,   10,   0.5, 10,   0.0                  },
    {"linear",               3,   10,   0.5, 11,   0.0                  },
    {"linear",               3,   10,   0.5, 37,   0.0                  },
    {"linear",               10,  10,   0.5, 0,    0.0                  },
    {"linear",               10,  10,   0.5, 1,    0x1.999999999999ap-4 },
    {"linear",               10,  10,   0.5, 2,    0x1.999999999999ap-3 },
    {"linear",               10,  10,   0.5, 9,    0x1.ccccccccccccdp-1 },
    {"linear",               10,  10,   0.5, 10,   0.0                  },
    {"linear",               10,  10,   0.5, 11,   0.0                  },
    {"linear",               10,  10,   0.5, 37,   0.0                  },
    {"linear",               12,  10,   0.5, 0,    0.0                  },
    {"linear",               12,  10,   0.5, 1,    0x1.5555555555555p-4 },
    {"linear",               12,  10,   0.5, 2,    0x1.5555555555555p-3 },
    {"linear",               12,  10,   0.5, 9,    0x1.8000000000000p-1 },
    {"linear",               12,  10,   0.5, 10,   0x1.aaaaaaaaaaaabp-1 },
    {"linear",               12,  10,   0.5, 11,   0x1.d555555555555p-1 },
    {"linear",               12,  10,   0.5, 12,   0.0                  },
    {"linear",               12,  10,   0.5, 13,   0.0                  },
    {"linear",               12,  10,   0.5, 37,   0.0                  },
    {"linear",               0,   0,    0.5, 0,    0.0                  },
    {"linear",               0,   0,    0.5, 1,    0.0                  },
    {"linear",               0,   0,    0.5, 2,    0.0                  },
    {"linear",               0,   0,    0.5, 7,    0.0                  },
    {"linear",               100, 1000, 0.5, 0,    0.0                  },
    {"linear",               100, 1000, 0.5, 1,    0x1.47ae147ae147bp-7 },
    {"linear",               100, 1000, 0.5, 2,    0x1.47ae147ae147bp-6 },
    {"linear",               100, 1000, 0.5, 100,  1.0                  },
    {"linear",               100, 1000, 0.5, 101,  0x1.ff6e5d4c3b2a2p-1 },
    {"linear",               100, 1000, 0.5, 551,  0x1.fedcba9876543p-2 },
    {"linear",               100, 1000, 0.5, 999,  0x1.23456789abcdfp-10},
    {"linear",               100, 1000, 0.5, 1000, 0.0                  },
    {"linear",               100, 1000, 0.5, 1001, 0.0                  },
    {"linear",               100, 1000, 0.5, 3007, 0.0                  },
    {"cosine",               0,   10,   0.5, 0,    1.0                  },
    {"cosine",               0,   10,   0.5, 1,    0x1.f378709a22a80p-1 },
    {"cosine",               0,   10,   0.5, 2,    0x1.cf1bbcdcbfa54p-1 },
    {"cosine",               0,   10,   0.5, 6,    0x1.61c8864680b59p-2 },
    {"cosine",               0,   10,   0.5, 9,    0x1.90f1ecbbab010p-6 },
    {"cosine",               0,   10,   0.5, 10,   0.0                  },
    {"cosine",               0,   10,   0.5, 11,   0x1.90f1ecbbab010p-6 },
    {"cosine",               0,   10,   0.5, 37,   0x1.96791823aad2ep-1 },
    {"cosine",               3,   10,   0.5, 0,    0.0                  },
    {"cosine",               3,   10,   0.5, 1,    0x1.5555555555555p-2 },
    {"cosine",               3,   10,   0.5, 2,    0x1.5555555555555p-1 },
    {"cosine",               3,   10,   0.5, 3,    1.0                  },
    {"cosine",               3,   10,   0.5, 4,    0x1.e6a5e54e5ae38p-1 },
    {"cosine",               3,   10,   0.5, 7,    0x1.8e11bc73f6ea0p-2 },
    {"cosine",               3,   10,   0.5, 9,    0x1.95a1ab1a51c80p-5 },
    {"cosine",               3,   10,   0.5, 10,   0.0                  },
    {"cosine",               3,   10,   0.5, 11,   0x1.95a1ab1a51c78p-5 },
    {"cosine",               3,   10,   0.5, 37,   0x1.95a1ab1a51cc0p-5 },
    {"cosine",               3,   10,   1.0, 0,    0.0                  },
    {"cosine",               3,   10,   1.0, 1,    0x1.5555555555555p-2 },
    {"cosine",               3,   10,   1.0, 2,    0x1.5555555555555p-1 },
    {"cosine",               3,   10,   1.0, 3,    1.0                  },
    {"cosine",               3,   10,   1.0, 4,    0x1.9f9d07145f6e9p-1 },
    {"cosine",               3,   10,   1.0, 7,    0x1.95a1ab1a51c78p-5 },
    {"cosine",               3,   10,   1.0, 9,    0x1.9f9d07145f6e8p-1 },
    {"cosine",               3,   10,   1.0, 10,   1.0                  },
    {"cosine",               3,   10,   1.0, 11,   0x1.9f9d07145f6eap-1 },
    {"cosine",               3,   10,   1.0, 37,   0x1.9f9d07145f6d8p-1 },
    {"cosine",               7,   1000, 2.5, 0,    0.0                  },
    {"cosine",               7,   1000, 2.5, 1,    0x1.2492492492492p-3 },
    {"cosine",               7,   1000, 2.5, 2,    0x1.2492492492492p-2 },
    {"cosine",               7,   1000, 2.5, 7,    1.0                  },
    {"cosine",               7,   1000, 2.5, 8,    0x1.fff7ccf40b67ep-1 },
    {"cosine",               7,   1000, 2.5, 504,  0x1.fbf3511e6d9bap-2 },
    {"cosine",               7,   1000, 2.5, 999,  0x1.06617e9305000p-14},
    {"cosine",               7,   1000, 2.5, 1000, 0.0                  },
    {"cosine",               7,   1000, 2.5, 1001, 0x1.06617e9304000p-14},
    {"cosine",               7,   1000, 2.5, 3007, 0x1.bfdc2dc07d790p-6 },
    {"cosine",               0,   0,    0.5, 0,    1.0                  },
    {"cosine",               0,   0,    0.5, 1,    0.0                  },
    {"cosine",               0,   0,    0.5, 2,    1.0                  },
    {"cosine",               0,   0,    0.5, 7,    0.0                  },
    {"cosine",               12,  10,   0.5, 0,    0.0                  },
    {"cosine",               12,  10,   0.5, 1,    0x1.5555555555555p-4 },
    {"cosine",               12,  10,   0.5, 2,    0x1.5555555555555p-3 },
    {"cosine",               12,  10,   0.5, 9,    0x1.8000000000000p-1 },
    {"cosine",               12,  10,   0.5, 10,   0x1.aaaaaaaaaaaabp-1 },
    {"cosine",               12,  10,   0.5, 11,   0x1.d555555555555p-1 },
    {"cosine",               12,  10,   0.5, 12,   1.0                  },
    {"cosine",               12,  10,   0.5, 13,   0.0                  },
    {"cosine",               12,  10,   0.5, 37,   0.0                  },
    {"cosine",               10,  10,   0.0, 0,    0.0                  },
    {"cosine",               10,  10,   0.0, 1,    0x1.999999999999ap-4 },
    {"cosine",               10,  10,   0.0, 2,    0x1.999999999999ap-3 },
    {"cosine",               10,  10,   0.0, 9,    0x1.ccccccccccccdp-1 },
    {"cosine",               10,  10,   0.0, 10,   1.0                  },
    {"cosine",               10,  10,   0.0, 11,   1.0                  },
    {"cosine",               10,  10,   0.0, 37,   1.0                  },
};

typedef struct setting {
    const char *name;
    double value;
} setting;

/* The schedule called name, with settings up to one whose name is NULL. */
static ct_status
make(ct_schedule *s, const char *name, const setting *settings, ct_error *err)
{
    ct_status status = ct_schedule_init(s, name, err);
    for (; status == CT_OK && settings->name != NULL; settings++) {
        status = ct_schedule_set(s, settings->name, settings->value, err);
    }
    return status == CT_OK ? ct_schedule_finish(s, err) : status;
}

static void
test_factors_equal_those_of_transformers_to_the_last_bit(void)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const row *r = &table[i];
        const int counts = strcmp(r->name, "constant_with_warmup") != 0;
        const int waves = strcmp(r->name, "cosine") == 0;
        const setting settings[] = {
            {"num_warmup_steps",                   r->warmup  },
            {counts ? "num_training_steps" : NULL, r->training},
            {waves ? "num_cycles" : NULL,          r->cycles  },
            {NULL,                                 0.0        },
        };
        ct_schedule s;
        CHECK(make(&s, r->name, settings, NULL) == CT_OK);
        CHECK(ct_schedule_value(&s, r->step) == r->factor);
    }
}

static void
test_constant_is_one(void)
{
    ct_schedule s;
    CHECK(make(&s, "constant", &(setting){NULL, 0.0}, NULL) == CT_OK);
    for (int64_t step = 0; step < 300; step++) {
        CHECK(ct_schedule_value(&s, step) == 1.0);
    }
}

static void
test_factors_stay_between_zero_and_one_and_zero_has_no_sign(void)
{
    static const char *const names[] = {"linear", "cosine", "cosine_with_restarts"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        for (double warmup = 0; warmup < 30; warmup += 7) {
            const setting settings[] = {
                {"num_warmup_steps",   warmup},
                {"num_training_steps", 20.0  },
                {NULL,                 0.0   },
            };
            ct_schedule s;
            CHECK(make(&s, names[k], settings, NULL) == CT_OK);
            for (int64_t step = 0; step < 60; step++) {
                const double factor = ct_schedule_value(&s, step);
                CHECK(factor >= 0.0 && factor <= 1.0 && !signbit(factor));
            }
        }
    }
}

/* The warm-up fills the run: the original divides by zero at its end. */
static void
test_polynomial_without_a_decay_ends_at_its_last_rate(void)
{
    const setting settings[] = {
        {"num_warmup_steps",   10.0},
        {"num_training_steps", 10.0},
        {"lr_init",            0.5 },
        {"lr_end",             0.25},
        {NULL,                 0.0 },
    };
    ct_schedule s;
    CHECK(make(&s, "polynomial", settings, NULL) == CT_OK);
    CHECK(ct_schedule_value(&s, 9) == 0.9);
    CHECK(ct_schedule_value(&s, 10) == 0.5);
    CHECK(ct_schedule_value(&s, 11) == 0.5);
}

static void
check_rejected(const char *name, const char *option, double value, const char *message)
{
    const setting settings[] = {
        {option, value},
        {NULL,   0.0  }
    };
    ct_error err;
    ct_schedule s;
    CHECK(make(&s, name, settings, &err) == CT_EINVAL);
    CHECK(strstr(err.message, message) != NULL);
}

static void
test_what_is_wrong_is_named(void)
{
    check_rejected("Linear", NULL, 0.0, "name is 'Linear'; expected one of constant");
    check_rejected("", NULL, 0.0, "name is ''");
    check_rejected("linear", NULL, 0.0, "needs num_warmup_steps");
    check_rejected("linear", "num_warmup_steps", -1.0, "num_warmup_steps must be >= 0");
    check_rejected("linear", "num_warmup_steps", 1.5, "whole number");
    check_rejected("linear", "num_warmup_steps", 0x1p54, "2**53");
    check_rejected("linear", "num_warmup_steps", (double)NAN, "num_warmup_steps");
    check_rejected("linear", "num_cycles", 1.0,
                   "no option 'num_cycles'; it takes num_warmup_steps, num_training");
    check_rejected("constant", "num_warmup_steps", 1.0, "it takes none");
    check_rejected("cosine", "num_cylces", 1.0,
                   "'num_cylces'; did you mean 'num_cycles'?");
    check_rejected("cosine", "NUM-CYCLES", 1.0, "did you mean 'num_cycles'?");
    check_rejected("cosine", "cycles", 1.0, "it takes num_warmup_steps");
    check_rejected("cosine", "", 1.0, "has no option ''; it takes");
    check_rejected("cosine", "num_cycles", (double)INFINITY, "num_cycles");
    check_rejected("inverse_sqrt", "timescale", 0.0, "timescale must be > 0");
    check_rejected("warmup_stable_decay", "decay_type", 1.0, "decay_type is a number");
}

static void
test_a_truth_value_is_no_number(void)
{
    ct_error err;
    ct_schedule s;
    CHECK(ct_schedule_init(&s, "fairseq.triangular", &err) == CT_OK);
    CHECK(ct_schedule_set_flag(&s, "shrink_min", 1, &err) == CT_OK);
    CHECK(s.slots[ct_schedule_find(&s, "shrink_min")] == 1.0);
    CHECK(ct_schedule_set_flag(&s, "lr_shrink", 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "lr_shrink is True; expected a number") != NULL);
    CHECK(ct_schedule_set_flag(&s, "shrink", 1, &err) == CT_EINVAL);
    CHECK(ct_schedule_init(&s, "warmup_stable_decay", &err) == CT_OK);
    CHECK(ct_schedule_set_flag(&s, "decay_type", 0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "decay_type is False; expected a word") != NULL);
}

static void
test_words_are_checked(void)
{
    ct_error err;
    ct_schedule s;
    CHECK(ct_schedule_init(&s, "warmup_stable_decay", &err) == CT_OK);
    CHECK(ct_schedule_set_word(&s, "decay_type", "1-sqrt", &err) == CT_OK);
    CHECK(ct_schedule_set_word(&s, "decay_type", "sqrt", &err) == CT_EINVAL);
    CHECK(strstr(err.message, "linear, cosine, 1-sqrt") != NULL);
    CHECK(ct_schedule_set_word(&s, "num_cycles", "two", &err) == CT_EINVAL);
    CHECK(strstr(err.message, "num_cycles is 'two'; expected a number") != NULL);
    CHECK(ct_schedule_set_word(&s, "power", "two", &err) == CT_EINVAL);
    CHECK(strstr(err.message, "has no option 'power'") != NULL);
}

#define KIND(name, ...)                                                                \
    {                                                                                  \
        name,                                                                          \
        {                                                                              \
            __VA_ARGS__                                                                \
        }                                                                              \
    }

/* Each kind with the least that it needs. */
static void
test_every_rate_is_a_number_of_at_least_zero(void)
{
    static const struct {
        const char *name;
        setting settings[4];
    } kinds[] = {
        KIND("polynomial", {"num_warmup_steps", 9}, {"num_training_steps", 90},
             {"lr_init", 0.1}),
        KIND("inverse_sqrt", {"num_warmup_steps", 0}),
        KIND("cosine_with_min_lr", {"num_warmup_steps", 9}, {"num_training_steps", 90},
             {"min_lr_rate", 0.1}),
        KIND("cosine_warmup_with_min_lr", {"num_warmup_steps", 1},
             {"num_training_steps", 90}, {"min_lr_rate", 0.1}),
        KIND("warmup_stable_decay", {"num_warmup_steps", 9}, {"num_training_steps", 90},
             {"num_decay_steps", 0}),
        KIND("fairseq.fixed", {"lr", 0.1}),
        KIND("fairseq.inverse_sqrt", {"lr", 0.1}),
        KIND("fairseq.cosine", {"lr", 0.1}, {"max_update", 90}),
        KIND("fairseq.cosine", {"lr", 0.1}, {"max_update", 90}, {"t_mult", 0.5}),
        KIND("fairseq.polynomial_decay", {"lr", 0.1}, {"total_num_update", 90}),
        KIND("fairseq.reduce_lr_on_plateau", {"lr", 0.1}),
        KIND("fairseq.tri_stage", {"lr", 0.1}, {"warmup_steps", 1}),
        KIND("fairseq.triangular", {"lr", 0.1}, {"max_lr", 0.2},
             {"lr_period_updates", 2}),
        KIND("fairseq.step", {"lr", 0.1}, {"lr_deacy_period", 1}),
        KIND("deepspeed.LRRangeTest", {"lr_range_test_step_size", 1}),
        KIND("deepspeed.OneCycle", {"cycle_min_lr", 0.1}, {"cycle_max_lr", 0.2},
             {"cycle_second_step_size", 0}),
        KIND("deepspeed.OneCycle.momentum", {"cycle_first_step_size", 1}),
        KIND("deepspeed.WarmupLR", {"warmup_num_steps", 1}),
        KIND("deepspeed.WarmupDecayLR", {"total_num_steps", 0}),
        KIND("deepspeed.WarmupCosineLR", {"total_num_steps", 0}, {"lr", 0.1}),
    };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        ct_schedule s;
        CHECK(make(&s, kinds[k].name, kinds[k].settings, NULL) == CT_OK);
        for (int64_t step = 0; step < 6000; step++) {
            const double rate = ct_schedule_value(&s, step);
            CHECK(rate >= 0.0 && isfinite(rate));
        }
    }
}

int
main(void)
{
    test_every_rate_is_a_number_of_at_least_zero();
    test_factors_equal_those_of_transformers_to_the_last_bit();
    test_constant_is_one();
    test_factors_stay_between_zero_and_one_and_zero_has_no_sign();
    test_polynomial_without_a_decay_ends_at_its_last_rate();
    test_what_is_wrong_is_named();
    test_a_truth_value_is_no_number();
    test_words_are_checked();
    return 0;
}
