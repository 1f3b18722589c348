#include "core/ct_device.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    N = 300,
    STEPS = 40
};

/* SGD in double, as the documentation of torch.optim.SGD lists it. */
typedef struct reference {
    double param, buf;
} reference;

static void
reference_step(reference *r, const ct_sgd_config *c, double grad, bool first)
{
    double g = grad + c->weight_decay * r->param;
    if (c->momentum != 0.0) {
        r->buf = first ? g : c->momentum * r->buf + (1.0 - c->dampening) * g;
        g = c->nesterov ? g + c->momentum * r->buf : r->buf;
    }
    r->param -= c->lr * g;
}

static void
check_follows(const ct_sgd_config *config)
{
    float grad[N], param[N], buf[N];
    double grad64[N], param64[N], buf64[N];
    reference expected[N];
    for (size_t i = 0; i < N; i++) {
        param[i] = (float)cos((double)i);
        param64[i] = param[i];
        buf[i] = NAN; /* not read before it is written */
        buf64[i] = NAN;
        expected[i] = (reference){param[i], 0.0};
    }
    const bool keeps = config->momentum != 0.0;
    const ct_sgd_span spans[2] = {
        {grad,   param,   keeps ? buf : NULL,   N, CT_F32, 0},
        {grad64, param64, keeps ? buf64 : NULL, N, CT_F64, 0},
    };
    for (int step = 0; step < STEPS; step++) {
        ct_sgd_coef coef;
        CHECK(ct_sgd_coef_init(&coef, config, step == 0, 0.25, NULL) == CT_OK);
        for (size_t i = 0; i < N; i++) {
            grad[i] = (float)(4.0 * sin((double)i * 1.3 + step));
            grad64[i] = grad[i];
            reference_step(&expected[i], config, 0.25 * grad[i], step == 0);
        }
        CHECK(ct_device_cpu.sgd(NULL, &coef, spans, 2, step % 2 == 1, NULL) == CT_OK);
    }
    for (size_t i = 0; i < N; i++) {
        /* STEPS updates, each a few roundings of values below 4 */
        CHECK(fabs(param[i] - expected[i].param) < STEPS * 4 * 0x1p-22);
        CHECK(fabs(param64[i] - expected[i].param) < STEPS * 4 * 0x1p-51);
        CHECK(grad[i] == 0.0f && grad64[i] == 0.0);
        CHECK(keeps == !isnan(buf[i]));
    }
}

static void
test_follows_the_formula(void)
{
    check_follows(&(ct_sgd_config){.lr = 0.1});
    check_follows(&(ct_sgd_config){.lr = 0.1, .weight_decay = 0.01});
    check_follows(&(ct_sgd_config){.lr = 0.05, .momentum = 0.9});
    check_follows(&(ct_sgd_config){.lr = 0.05, .momentum = 0.9, .dampening = 0.5});
    check_follows(&(ct_sgd_config){
        .lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
}

static void
test_without_weight_decay_an_infinite_parameter_stays_infinite(void)
{
    float grad = 1.0f, param = INFINITY;
    const ct_sgd_span span = {&grad, &param, NULL, 1, CT_F32, 0};
    ct_sgd_coef coef;
    CHECK(ct_sgd_coef_init(&coef, &(ct_sgd_config){.lr = 0.1}, true, 1.0, NULL) ==
          CT_OK);
    CHECK(ct_device_cpu.sgd(NULL, &coef, &span, 1, false, NULL) == CT_OK);
    CHECK(isinf(param) && grad == 1.0f);
}

static void
check_refused(ct_sgd_config config, const char *field)
{
    ct_error err;
    ct_sgd_coef coef;
    CHECK(ct_sgd_coef_init(&coef, &config, true, 1.0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, field) != NULL);
}

static void
test_a_bad_hyperparameter_is_named(void)
{
    check_refused((ct_sgd_config){.lr = -0.1}, "lr");
    check_refused((ct_sgd_config){.lr = NAN}, "lr");
    check_refused((ct_sgd_config){.momentum = -1.0}, "momentum");
    check_refused((ct_sgd_config){.momentum = NAN}, "momentum");
    check_refused((ct_sgd_config){.dampening = NAN}, "dampening");
    check_refused((ct_sgd_config){.weight_decay = -1e-9}, "weight_decay");
    check_refused((ct_sgd_config){.nesterov = true}, "nesterov");
    check_refused((ct_sgd_config){.momentum = 0.9, .dampening = 0.1, .nesterov = true},
                  "nesterov");
}

int
main(void)
{
    test_follows_the_formula();
    test_without_weight_decay_an_infinite_parameter_stays_infinite();
    test_a_bad_hyperparameter_is_named();
    return 0;
}
