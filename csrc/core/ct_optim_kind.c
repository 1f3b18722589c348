#include "core/ct_optim_kind.h"

static size_t
adamw_n_states(const ct_optim_group *group)
{
    (void)group;
    return 2;
}

static uint64_t
adamw_key(const ct_optim_param *param)
{
    return param->step + 1;
}

static ct_status
adamw_coef_init(void *coefs, size_t i, const ct_optim_group *group, uint64_t key,
                double grad_scale, ct_error *err)
{
    return ct_adamw_coef_init((ct_adamw_coef *)coefs + i, &group->adamw, key,
                              grad_scale, err);
}

static void
adamw_span_init(void *spans, size_t i, const ct_optim_param *param, uint32_t coef,
                size_t n_states)
{
    (void)n_states;
    ((ct_adamw_span *)spans)[i] = (ct_adamw_span){
        .grad = param->grad,
        .param = param->param,
        .m = param->state[0],
        .v = param->state[1],
        .n = param->n,
        .dtype = param->dtype,
        .coef = coef,
    };
}

static ct_status
adamw_run(const ct_device *device, void *stream, const void *coefs, const void *spans,
          size_t n_spans, bool zero_grads, ct_error *err)
{
    return device->adamw(stream, coefs, spans, n_spans, zero_grads, err);
}

static const ct_optim_ops adamw_ops = {
    .coef_size = sizeof(ct_adamw_coef),
    .span_size = sizeof(ct_adamw_span),
    .n_states = adamw_n_states,
    .key = adamw_key,
    .coef_init = adamw_coef_init,
    .span_init = adamw_span_init,
    .run = adamw_run,
};

static size_t
sgd_n_states(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? 1 : 0;
}

static uint64_t
sgd_key(const ct_optim_param *param)
{
    return param->step == 0;
}

static ct_status
sgd_coef_init(void *coefs, size_t i, const ct_optim_group *group, uint64_t key,
              double grad_scale, ct_error *err)
{
    return ct_sgd_coef_init((ct_sgd_coef *)coefs + i, &group->sgd, key != 0, grad_scale,
                            err);
}

static void
sgd_span_init(void *spans, size_t i, const ct_optim_param *param, uint32_t coef,
              size_t n_states)
{
    ((ct_sgd_span *)spans)[i] = (ct_sgd_span){
        .grad = param->grad,
        .param = param->param,
        .momentum = n_states != 0 ? param->state[0] : NULL,
        .n = param->n,
        .dtype = param->dtype,
        .coef = coef,
    };
}

static ct_status
sgd_run(const ct_device *device, void *stream, const void *coefs, const void *spans,
        size_t n_spans, bool zero_grads, ct_error *err)
{
    return device->sgd(stream, coefs, spans, n_spans, zero_grads, err);
}

static const ct_optim_ops sgd_ops = {
    .coef_size = sizeof(ct_sgd_coef),
    .span_size = sizeof(ct_sgd_span),
    .n_states = sgd_n_states,
    .key = sgd_key,
    .coef_init = sgd_coef_init,
    .span_init = sgd_span_init,
    .run = sgd_run,
};

const ct_optim_ops *const ct_optim_kinds[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADAMW] = &adamw_ops,
    [CT_OPTIM_SGD] = &sgd_ops,
};
