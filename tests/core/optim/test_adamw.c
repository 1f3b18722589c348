#include "core/optim/optim.h"
#include "ct_kernels.h"

#include <math.h>

enum {
    N = 500,
    STEPS = 100
};

static const ct_adamw_config usual = {.lr = 1e-2,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = 1e-8,
                                      .weight_decay = 0.1,
                                      .decoupled = true};

/* Algorithm 2 of the paper, in double. */
typedef struct reference {
    double param, m, v;
} reference;

static void
reference_step(reference *r, const ct_adamw_config *c, double grad, int step)
{
    r->param *= 1.0 - c->lr * c->weight_decay;
    r->m = c->beta1 * r->m + (1.0 - c->beta1) * grad;
    r->v = c->beta2 * r->v + (1.0 - c->beta2) * grad * grad;
    const double m_hat = r->m / (1.0 - pow(c->beta1, step));
    const double v_hat = r->v / (1.0 - pow(c->beta2, step));
    r->param -= c->lr * m_hat / (sqrt(v_hat) + c->eps);
}

static ct_rule_coef
coef_of(const ct_adamw_config *config, uint64_t step, double grad_scale)
{
    const ct_optim_group group = {.kind = CT_OPTIM_ADAMW, .adamw = *config};
    ct_rule_coef coef;
    CHECK(ct_optim_check_group(&group, NULL) == CT_OK);
    ct_optim_kinds[CT_OPTIM_ADAMW].coef(&coef, &group, step, grad_scale);
    return coef;
}

static void
update(const ct_adamw_config *config, int step, const ct_update_span *span)
{
    const ct_rule_coef coef = coef_of(config, (uint64_t)step, 0.5);
    CHECK(ct_device_cpu.update(NULL, NULL,
                               &(ct_update){.rule = CT_RULE_adamw,
                                            .coefs = &coef,
                                            .spans = span,
                                            .n_spans = 1,
                                            .zero_grads = step % 2 == 0},
                               NULL) == CT_OK);
}

static ct_update_span
span_of(void *grad, void *param, void *m, void *v, size_t n, ct_dtype dtype)
{
    return (ct_update_span){
        .n = n,
        .grad = grad,
        .param = param,
        .state = {m, v},
        .dtype = dtype,
        .grad_dtype = dtype,
        .state_dtype = dtype
    };
}

/* The largest distance from the reference after STEPS updates in `dtype`. */
static double
drift(ct_dtype dtype, const ct_adamw_config *config)
{
    double grad[N], param[N], m[N] = {0}, v[N] = {0};
    reference expected[N];
    const ct_update_span span = span_of(grad, param, m, v, N, dtype);
    for (size_t i = 0; i < N; i++) {
        ct_store(dtype, param, i, cos((double)i));
        expected[i] = (reference){ct_load(dtype, param, i), 0.0, 0.0};
    }
    for (int step = 1; step <= STEPS; step++) {
        for (size_t i = 0; i < N; i++) {
            ct_store(dtype, grad, i, 2.0 * sin((double)i * 1.7 + step));
            const double half = ct_load(dtype, grad, i) / 2.0;
            reference_step(&expected[i], config, half, step);
        }
        update(config, step, &span);
    }
    double largest = 0.0;
    for (size_t i = 0; i < N; i++) {
        const double distance = fabs(ct_load(dtype, param, i) - expected[i].param);
        largest = fmax(largest, distance);
        CHECK(ct_load(dtype, grad, i) == 0.0); /* the last step zeroed it */
    }
    return largest;
}

/* A parameter stays below 2, so each update rounds it by at most half an ulp of 1 to
 * 2; the update itself, at most 2 * lr here, is off by a few ulp, which adds less. */
static void
test_follows_the_paper_for_a_hundred_steps(void)
{
    CHECK(drift(CT_F64, &usual) < STEPS * 0x1p-52);
    CHECK(drift(CT_F32, &usual) < STEPS * 0x1p-23);
    const ct_adamw_config small_betas = {
        .lr = 1e-2, .beta1 = 0.0, .beta2 = 0.5, .eps = 1e-3, .weight_decay = 0.0};
    CHECK(drift(CT_F64, &small_betas) < STEPS * 0x1p-52);
    CHECK(drift(CT_F32, &small_betas) < STEPS * 0x1p-23);
}

/* With 16-bit moments the direction is right to some percent only; the bound is that
 * of the roundings of the parameter itself, every one in the same direction. */
static void
test_follows_the_paper_in_sixteen_bits(void)
{
    CHECK(drift(CT_F16, &usual) < STEPS * 0x1p-11);
    CHECK(drift(CT_BF16, &usual) < STEPS * 0x1p-8);
}

static void
test_beta1_zero_gives_the_gradient_and_not_a_rounded_one(void)
{
    float grad = 2e-7f, param = 1.0f, m = 100.0f, v = 1.0f;
    const ct_adamw_config config = {
        .lr = 0.1, .beta1 = 0.0, .beta2 = 0.9, .eps = 1e-8, .weight_decay = 0.0};
    const ct_update_span span = span_of(&grad, &param, &m, &v, 1, CT_F32);
    update(&config, 1, &span);
    CHECK(m == 1e-7f);
}

static void
test_nan_and_infinity_in_a_gradient_reach_its_own_element_alone(void)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};
    for (size_t d = 0; d < 4; d++) {
        for (size_t at = 0; at < 40; at++) {
            double grad[40], param[40], m[40] = {0}, v[40] = {0};
            for (size_t i = 0; i < 40; i++) {
                ct_store(dtypes[d], grad, i, i == at ? (at % 2 ? NAN : INFINITY) : 1.0);
                ct_store(dtypes[d], param, i, 1.0);
            }
            const ct_update_span span = span_of(grad, param, m, v, 40, dtypes[d]);
            update(&usual, 1, &span);
            for (size_t i = 0; i < 40; i++) {
                CHECK(isfinite(ct_load(dtypes[d], param, i)) == (i != at));
                CHECK(isfinite(ct_load(dtypes[d], m, i)) == (i != at));
                CHECK(isfinite(ct_load(dtypes[d], v, i)) == (i != at));
            }
        }
    }
}

static void
test_each_span_uses_its_own_coefficients(void)
{
    float grad[2] = {1.0f, 1.0f}, param[2] = {1.0f, 1.0f}, m[2] = {0}, v[2] = {0};
    ct_rule_coef coefs[2];
    ct_adamw_config config = {.lr = 0.5, .beta1 = 0.9, .beta2 = 0.99, .eps = 0.0};
    coefs[0] = coef_of(&config, 1, 1.0);
    config.lr = 0.25;
    coefs[1] = coef_of(&config, 1, 1.0);
    ct_update_span spans[2] = {
        span_of(&grad[0], &param[0], &m[0], &v[0], 1, CT_F32),
        span_of(&grad[1], &param[1], &m[1], &v[1], 1, CT_F32),
    };
    spans[0].coef = 1;
    const ct_update both = {
        .rule = CT_RULE_adamw, .coefs = coefs, .spans = spans, .n_spans = 2};
    CHECK(ct_device_cpu.update(NULL, NULL, &both, NULL) == CT_OK);
    CHECK(fabs(param[0] - 0.75) < 1e-6 && fabs(param[1] - 0.5) < 1e-6);
    CHECK(grad[0] == 1.0f);
}

int
main(void)
{
    test_follows_the_paper_for_a_hundred_steps();
    test_follows_the_paper_in_sixteen_bits();
    test_beta1_zero_gives_the_gradient_and_not_a_rounded_one();
    test_nan_and_infinity_in_a_gradient_reach_its_own_element_alone();
    test_each_span_uses_its_own_coefficients();
    return 0;
}
