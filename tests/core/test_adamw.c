#include "core/ct_device.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

static const ct_adamw_config config = {
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};

/* The formula in double, written without looking at ct_adamw_math.h. */
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

static double
grad_at(size_t i, int step)
{
    return sin((double)i * 1.7 + step);
}

static void
test_follows_the_formula_for_a_hundred_steps_in_fp32(void)
{
    enum {
        N = 1000
    };
    float grad[N], param[N], m[N] = {0}, v[N] = {0};
    reference expected[N];
    for (size_t i = 0; i < N; i++) {
        param[i] = (float)cos((double)i);
        expected[i] = (reference){param[i], 0.0, 0.0};
    }
    const ct_adamw_span span = {grad, param, m, v, N, CT_F32, 0};
    for (int step = 1; step <= 100; step++) {
        ct_adamw_coef coef;
        CHECK(ct_adamw_coef_init(&coef, &config, (uint64_t)step, 0.5, NULL) == CT_OK);
        for (size_t i = 0; i < N; i++) {
            grad[i] = (float)(2.0 * grad_at(i, step));
            reference_step(&expected[i], &config, grad[i] * 0.5, step);
        }
        CHECK(ct_device_cpu.adamw(NULL, &coef, &span, 1, step % 2 == 0, NULL) == CT_OK);
    }
    for (size_t i = 0; i < N; i++) {
        /* 100 updates of at most lr each, each rounded to 2^-24 of a value below 2 */
        CHECK(fabs(param[i] - expected[i].param) < 100 * 0x1p-24 * 2);
        CHECK(grad[i] == 0.0f);
    }
}

int
main(void)
{
    test_follows_the_formula_for_a_hundred_steps_in_fp32();
    return 0;
}
