/* Factored second moments against plain loops. */
#include "ct_kernels.h"
#include "ct_random.h"

#include <math.h>
#include <string.h>

typedef struct factors {
    ct_factored f;
    float row[700], col[700], row_factor[700], col_factor[700];
    double sums[1400];
} factors;

static void
factor(factors *s, const ct_factored *shape)
{
    ct_scratch scratch = {0};
    s->f = *shape;
    s->f.n = shape->matrices * shape->rows * shape->cols;
    s->f.sums = s->sums;
    s->f.row = s->row;
    s->f.col = s->col;
    s->f.row_factor = s->row_factor;
    s->f.col_factor = s->col_factor;
    for (size_t i = 0; i < 700; i++) {
        s->row[i] = s->col[i] = 0.5f;
        s->row_factor[i] = s->col_factor[i] = 0.0f;
    }
    CHECK(ct_device_cpu.factor_sums(NULL, &scratch, &s->f, 1, NULL) == CT_OK);
    CHECK(ct_device_cpu.factor(NULL, &s->f, 1, NULL) == CT_OK);
    ct_device_cpu.scratch_release(&scratch);
}

typedef struct factor_case {
    const ct_factored *shape;
    const factors *expected;
} factor_case;

static void
check_same_factors(void *arg)
{
    static factors again;
    const factor_case *c = arg;
    factor(&again, c->shape);
    CHECK(memcmp(again.row, c->expected->row, sizeof again.row) == 0);
    CHECK(memcmp(again.col, c->expected->col, sizeof again.col) == 0);
    CHECK(memcmp(again.row_factor, c->expected->row_factor, sizeof again.row) == 0);
    CHECK(memcmp(again.col_factor, c->expected->col_factor, sizeof again.col) == 0);
}

/* One rounding to float each, and of a factor that of what it is made from. */
static void
check_near(double got, double expected, double roundings)
{
    CHECK(fabs(got - expected) <= roundings * 0x1p-24 * fabs(expected));
}

static void
check_factors(const factors *s, const float *grad)
{
    const ct_factored *f = &s->f;
    for (size_t m = 0; m < f->matrices; m++) {
        double rows[700] = {0.0}, cols[700] = {0.0}, mean = 0.0;
        for (size_t i = 0; i < f->rows; i++) {
            for (size_t j = 0; j < f->cols; j++) {
                const double g =
                    (double)grad[(m * f->rows + i) * f->cols + j] * f->grad_scale;
                rows[i] += g * g / (double)f->cols;
                cols[j] += g * g / (double)f->rows;
            }
            rows[i] = 0.5 * f->decay + (1.0 - f->decay) * (rows[i] + f->eps);
            mean += rows[i] / (double)f->rows;
        }
        for (size_t i = 0; i < f->rows; i++) {
            check_near((double)s->row[m * f->rows + i], rows[i], 1.01);
            check_near((double)s->row_factor[m * f->rows + i],
                       1.0 / sqrt(rows[i] / mean), 2.01);
        }
        for (size_t j = 0; j < f->cols; j++) {
            const double col = 0.5 * f->decay + (1.0 - f->decay) * (cols[j] + f->eps);
            check_near((double)s->col[m * f->cols + j], col, 1.01);
            check_near((double)s->col_factor[m * f->cols + j], 1.0 / sqrt(col), 1.51);
        }
    }
}

static void
test_factors_equal_plain_loops_and_are_always_alike(void)
{
    static const size_t shapes[][3] = {
        {1,  1,   1  },
        {1,  700, 300},
        {1,  300, 700},
        {70, 3,   3  },
        {2,  150, 350},
        {5,  1,   40 }
    };
    static float grad[210000];
    static factors s;
    ct_random r = {77};
    for (size_t i = 0; i < 210000; i++) {
        grad[i] = (float)ct_random_unit(&r);
    }
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        const ct_factored shape = {.matrices = shapes[k][0],
                                   .rows = shapes[k][1],
                                   .cols = shapes[k][2],
                                   .grad = grad,
                                   .grad_scale = 0.7,
                                   .decay = 0.8,
                                   .eps = 1e-3};
        factor(&s, &shape);
        check_factors(&s, grad);
        ct_for_each_setting(check_same_factors, &(factor_case){&shape, &s});
    }
}

static void
test_factors_of_16_bits_are_rejected(void)
{
    ct_error err;
    ct_factored f = {.matrices = 1, .rows = 1, .cols = 1, .state_dtype = CT_BF16};
    CHECK(ct_device_cpu.factor_sums(NULL, NULL, &f, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "number 0 has averages of bfloat16") != NULL);
    f = (ct_factored){.matrices = 1, .rows = 0, .cols = 1};
    CHECK(ct_device_cpu.factor(NULL, &f, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "1 matrices of 0 x 1") != NULL);
    f = (ct_factored){.matrices = 1, .rows = 2, .cols = 2, .begin = 2, .n = 3};
    CHECK(ct_device_cpu.factor(NULL, &f, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "3 elements from number 2 on, of 4") != NULL);
}

/* Parts of a list, cut anywhere, have sums that add up to those of all of it. */
static void
test_sums_of_parts_add_up(void)
{
    enum {
        MATRICES = 2,
        ROWS = 9,
        COLS = 70,
        N = MATRICES * ROWS * COLS,
        SUMS = MATRICES * (ROWS + COLS)
    };
    static const size_t cuts[] = {0, 0, 3, 70, 75, 300, 700, 1259, N};
    static float grad[N];
    double whole[SUMS], part[SUMS], added[SUMS] = {0.0};
    ct_scratch scratch = {0};
    ct_random r = {4};
    for (size_t i = 0; i < N; i++) {
        grad[i] = (float)ct_random_unit(&r);
    }
    ct_factored f = {.matrices = MATRICES,
                     .rows = ROWS,
                     .cols = COLS,
                     .n = N,
                     .grad = grad,
                     .sums = whole,
                     .grad_scale = 0.7};
    CHECK(ct_device_cpu.factor_sums(NULL, &scratch, &f, 1, NULL) == CT_OK);
    f.sums = part;
    for (size_t k = 0; k + 1 < sizeof cuts / sizeof *cuts; k++) {
        f.grad = grad + cuts[k];
        f.begin = cuts[k];
        f.n = cuts[k + 1] - cuts[k];
        CHECK(ct_device_cpu.factor_sums(NULL, &scratch, &f, 1, NULL) == CT_OK);
        for (size_t i = 0; i < SUMS; i++) {
            added[i] += part[i];
        }
    }
    for (size_t i = 0; i < SUMS; i++) { /* at most COLS roundings of a sum of squares */
        CHECK(fabs(added[i] - whole[i]) <= COLS * 0x1p-53 * whole[i]);
    }
    ct_device_cpu.scratch_release(&scratch);
}

int
main(void)
{
    test_sums_of_parts_add_up();
    test_factors_equal_plain_loops_and_are_always_alike();
    test_factors_of_16_bits_are_rejected();
    return 0;
}
