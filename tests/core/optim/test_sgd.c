#include "core/optim/optim.h"
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

static ct_rule_coef
coef_of(const ct_sgd_config *config, bool first, double grad_scale)
{
    const ct_optim_group group = {.kind = CT_OPTIM_SGD, .sgd = *config};
    ct_rule_coef coef;
    CHECK(ct_optim_check_group(&group, NULL) == CT_OK);
    ct_optim_kinds[CT_OPTIM_SGD].coef(&coef, &group, first, grad_scale);
    return coef;
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
    const ct_update_span spans[2] = {
        {.n = N, .grad = grad, .param = param, .state = {keeps ? buf : NULL}},
        {.n = N,
         .grad = grad64,
         .param = param64,
         .state = {keeps ? buf64 : NULL},
         .dtype = CT_F64,
         .grad_dtype = CT_F64,
         .state_dtype = CT_F64},
    };
    for (int step = 0; step < STEPS; step++) {
        const ct_rule_coef coef = coef_of(config, step == 0, 0.25);
        for (size_t i = 0; i < N; i++) {
            grad[i] = (float)(4.0 * sin((double)i * 1.3 + step));
            grad64[i] = grad[i];
            reference_step(&expected[i], config, 0.25 * grad[i], step == 0);
        }
        const ct_update update = {.rule = keeps ? CT_RULE_sgd_momentum : CT_RULE_sgd,
                                  .coefs = &coef,
                                  .spans = spans,
                                  .n_spans = 2,
                                  .zero_grads = step % 2 == 1};
        CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
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
    const ct_update_span span = {.n = 1, .grad = &grad, .param = &param};
    const ct_rule_coef coef = coef_of(&(ct_sgd_config){.lr = 0.1}, true, 1.0);
    const ct_update update = {
        .rule = CT_RULE_sgd, .coefs = &coef, .spans = &span, .n_spans = 1};
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    CHECK(isinf(param) && grad == 1.0f);
}

static void
check_rejected(ct_sgd_config config, const char *field)
{
    ct_error err;
    const ct_optim_group group = {.kind = CT_OPTIM_SGD, .sgd = config};
    CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
    CHECK(strstr(err.message, field) != NULL);
}

static void
test_a_bad_hyperparameter_is_named(void)
{
    check_rejected((ct_sgd_config){.lr = -0.1}, "lr");
    check_rejected((ct_sgd_config){.lr = NAN}, "lr");
    check_rejected((ct_sgd_config){.momentum = -1.0}, "momentum");
    check_rejected((ct_sgd_config){.momentum = NAN}, "momentum");
    check_rejected((ct_sgd_config){.dampening = NAN}, "dampening");
    check_rejected((ct_sgd_config){.weight_decay = -1e-9}, "weight_decay");
    check_rejected((ct_sgd_config){.nesterov = true}, "nesterov");
    check_rejected((ct_sgd_config){.momentum = 0.9, .dampening = 0.1, .nesterov = true},
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
