#include "core/base/alloc.h"
#include "cpu/kernels.h"
#include "ct_kernels.h"
#include "ct_random.h"

#include <math.h>
#include <string.h>

typedef struct product {
    ct_gemm gemm;
    void *a, *b, *c; /* c: what every run begins with */
    void *expected;  /* the bits that every setting has to give */
    void *result;
    size_t c_elems;
    ct_scratch scratch;
} product;

static void *
matrix_make(ct_random *r, ct_dtype dtype, size_t elems)
{
    void *data = ct_alloc((elems + 1) * ct_dtype_size(dtype));
    for (size_t i = 0; i < elems; i++) {
        ct_store(dtype, data, i, ct_random_unit(r));
    }
    return data;
}

static product
product_make(ct_random *r, ct_gemm g)
{
    product p = {.gemm = g};
    const size_t size = ct_dtype_size(g.dtype);
    p.c_elems = g.m * g.ldc;
    p.a = matrix_make(r, g.dtype, (g.trans_a ? g.k : g.m) * g.lda);
    p.b = matrix_make(r, g.dtype, (g.trans_b ? g.n : g.k) * g.ldb);
    p.c = matrix_make(r, g.dtype, p.c_elems);
    p.expected = ct_alloc(p.c_elems * size);
    p.result = ct_alloc(p.c_elems * size);
    p.gemm.a = p.a;
    p.gemm.b = p.b;
    return p;
}

static void
product_free(product *p)
{
    ct_free(p->a);
    ct_free(p->b);
    ct_free(p->c);
    ct_free(p->expected);
    ct_free(p->result);
    ct_device_cpu.scratch_release(&p->scratch);
}

static void
run(product *p, void *c)
{
    memcpy(c, p->c, p->c_elems * ct_dtype_size(p->gemm.dtype));
    p->gemm.c = c;
    CHECK(ct_device_cpu.gemm(NULL, &p->scratch, &p->gemm, NULL) == CT_OK);
}

static void
check_same_bits(void *arg)
{
    product *p = arg;
    run(p, p->result);
    CHECK(memcmp(p->result, p->expected, p->c_elems * ct_dtype_size(p->gemm.dtype)) ==
          0);
}

static long double
exact_element(const product *p, size_t row, size_t col)
{
    const ct_gemm *g = &p->gemm;
    long double sum = 0.0L;
    for (size_t k = 0; k < g->k; k++) {
        const size_t a = g->trans_a ? k * g->lda + row : row * g->lda + k;
        const size_t b = g->trans_b ? col * g->ldb + k : k * g->ldb + col;
        sum += (long double)ct_load(g->dtype, g->a, a) * ct_load(g->dtype, g->b, b);
    }
    const long double before = ct_load(g->dtype, p->c, row * g->ldc + col);
    return (long double)g->alpha * sum + (long double)g->beta * before;
}

/* k products and sums of values below 1, each off by half an ulp of at most k; of
 * bfloat16 they are of floats, and the result is rounded to its 8 bits. */
static void
check_against_long_double(const product *p)
{
    const ct_gemm *g = &p->gemm;
    const double ulp = g->dtype == CT_F64 ? 0x1p-52 : 0x1p-23;
    const double half_ulp = g->dtype == CT_BF16 ? 0x1p-8 : 0.0;
    const double bound = ulp * (double)(g->k + 2) * (double)(g->k + 2);
    for (size_t row = 0; row < g->m; row++) {
        for (size_t at = 0; at < g->ldc; at++) {
            const double got = ct_load(g->dtype, p->expected, row * g->ldc + at);
            if (at < g->n) {
                CHECK(fabsl(got - exact_element(p, row, at)) <=
                      bound + half_ulp * fabs(got));
            }
            else {
                CHECK(got == ct_load(g->dtype, p->c, row * g->ldc + at));
            }
        }
    }
}

static ct_gemm
random_gemm(ct_random *r, unsigned round)
{
    static const size_t sizes[] = {1, 2, 5, 31, 63, 64, 65, 130, 290};
    ct_gemm g = {
        .trans_a = round / 2 % 2 != 0,
        .trans_b = round / 4 % 2 != 0,
        .m = sizes[ct_random_below(r, 9)],
        .n = sizes[ct_random_below(r, 9)],
        .k = sizes[ct_random_below(r, 9)],
        .alpha = round % 3 == 0 ? 1.0 : 0.5,
        .beta = round % 5 == 0 ? 0.0 : -0.25,
    };
    g.lda = (g.trans_a ? g.m : g.k) + ct_random_below(r, 3);
    g.ldb = (g.trans_b ? g.k : g.n) + ct_random_below(r, 3);
    g.ldc = g.n + ct_random_below(r, 3);
    return g;
}

static void
test_random_products_in_all_orientations(void)
{
    ct_random r = {3};
    for (unsigned round = 0; round < 72; round++) {
        static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16};
        ct_gemm g = random_gemm(&r, round);
        g.dtype = dtypes[round / 24];
        product p = product_make(&r, g);
        run(&p, p.expected);
        check_against_long_double(&p);
        ct_for_each_setting(check_same_bits, &p);
        product_free(&p);
    }
}

static void
test_a_scratch_that_cannot_grow_leaves_the_result_alone(void)
{
    ct_random r = {6};
    ct_gemm g = random_gemm(&r, 1);
    g.dtype = CT_BF16;
    product p = product_make(&r, g);
    memcpy(p.result, p.c, p.c_elems * sizeof(uint16_t));
    p.gemm.c = p.result;
    ct_alloc_fail_after(1);
    CHECK(ct_device_cpu.gemm(NULL, &p.scratch, &p.gemm, NULL) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(memcmp(p.result, p.c, p.c_elems * sizeof(uint16_t)) == 0);
    product_free(&p);
}

static void
test_beta_zero_does_not_read_the_result(void)
{
    const float a = 2.0f, b = 3.0f;
    float c = NAN;
    const ct_gemm g = {.dtype = CT_F32,
                       .m = 1,
                       .n = 1,
                       .k = 1,
                       .alpha = 1.0,
                       .a = &a,
                       .b = &b,
                       .c = &c,
                       .lda = 1,
                       .ldb = 1,
                       .ldc = 1};
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, NULL) == CT_OK && c == 6.0f);
}

static void
test_a_sum_of_nothing_scales_the_result(void)
{
    double c[4] = {1.0, 2.0, 3.0, 4.0};
    const ct_gemm g = {
        .dtype = CT_F64, .m = 2, .n = 2, .alpha = 1.0, .beta = 2.0, .c = c, .ldc = 2};
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, NULL) == CT_OK);
    CHECK(c[0] == 2.0 && c[3] == 8.0);
}

static void
test_bad_operands_are_named(void)
{
    float x[4] = {0};
    ct_error err;
    ct_gemm g = {.dtype = CT_F32,
                 .m = 2,
                 .n = 2,
                 .k = 2,
                 .a = x,
                 .b = x,
                 .c = x,
                 .lda = 2,
                 .ldb = 1,
                 .ldc = 2};
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "gemm: ldb must be >= 2, got 1") == 0);
    g.ldb = 2;
    g.a = NULL;
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "a is NULL") != NULL);
    g.dtype = CT_F16;
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got float16") != NULL);
}

static int asked;

static bool
multiply_float32_alone(const ct_gemm *gemm)
{
    asked++;
    if (gemm->dtype != CT_F32) {
        return false;
    }
    for (size_t i = 0; i < gemm->m * gemm->n; i++) {
        ((float *)gemm->c)[i] = 7.0f;
    }
    return true;
}

static void
test_a_blas_is_asked_first_and_its_no_is_made_up_for(void)
{
    ct_random r = {7};
    ct_gemm bf16 = random_gemm(&r, 1);
    bf16.dtype = CT_BF16;
    product p = product_make(&r, bf16);
    p.gemm.c = p.result;
    const uint16_t seven = 0x40e0;
    float x[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    double y[4] = {1.0, 1.0, 1.0, 1.0};
    ct_gemm g = {.dtype = CT_F32,
                 .m = 2,
                 .n = 2,
                 .k = 2,
                 .alpha = 1.0,
                 .a = x,
                 .b = x,
                 .c = x,
                 .lda = 2,
                 .ldb = 2,
                 .ldc = 2};
    ct_cpu_use_blas(multiply_float32_alone);
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, NULL) == CT_OK);
    CHECK(x[0] == 7.0f && x[3] == 7.0f && asked == 1);
    /* Factors in bfloat16 are offered as they are, then in float32. */
    CHECK(ct_device_cpu.gemm(NULL, &p.scratch, &p.gemm, NULL) == CT_OK);
    CHECK(asked == 3 && memcmp(p.result, &seven, sizeof seven) == 0);
    double c[4];
    g.dtype = CT_F64;
    g.a = g.b = y;
    g.c = c;
    CHECK(ct_device_cpu.gemm(NULL, NULL, &g, NULL) == CT_OK);
    CHECK(asked == 4 && c[0] == 2.0 && c[3] == 2.0);
    ct_cpu_use_blas(NULL);
    product_free(&p);
}

int
main(void)
{
    test_a_blas_is_asked_first_and_its_no_is_made_up_for();
    test_random_products_in_all_orientations();
    test_a_scratch_that_cannot_grow_leaves_the_result_alone();
    test_beta_zero_does_not_read_the_result();
    test_a_sum_of_nothing_scales_the_result();
    test_bad_operands_are_named();
    return 0;
}
