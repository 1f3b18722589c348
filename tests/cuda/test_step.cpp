/* The step engine over the device table: what the C trainer does on a GPU. Without
 * clipping the bits are the CPU's; with it, the coefficient comes from the norm, whose
 * bound it inherits. */
#include "cuda_test.h"

#include "core/engine/step.h"

static const size_t sizes[] = {1, 300, 8193, 20000};
static const size_t n_params = sizeof sizes / sizeof *sizes;

struct model {
    std::vector<twin> params, grads, m, v;

    model()
    {
        random_numbers numbers = {21};
        for (size_t i = 0; i < n_params; i++) {
            const ct_dtype dtype = float_dtypes[i % 3];
            for (auto list : {&params, &grads, &m, &v}) {
                list->emplace_back(dtype, sizes[i], 0);
                const bool state = list == &m || list == &v;
                list->back().fill(&numbers, state ? 0.0 : -1.0, state ? 0.0 : 1.0);
            }
        }
    }

    ct_optim *optimizer(const ct_device *device)
    {
        const bool host = device == &ct_device_cpu;
        ct_optim *optim = ct_optim_new(device);
        CHECK(optim != NULL);
        CHECK(ct_optim_resize(optim, 1, n_params, NULL) == CT_OK);
        ct_optim_groups_borrow(optim)[0].adamw = {1e-2, 0.9,  0.999, 1e-8,
                                                  0.1,  true, false};
        ct_optim_param *list = ct_optim_params_borrow(optim);
        for (size_t i = 0; i < n_params; i++) {
            list[i].param = host ? params[i].host.data() : params[i].device();
            list[i].grad = host ? grads[i].host.data() : grads[i].device();
            list[i].state[0] = host ? m[i].host.data() : m[i].device();
            list[i].state[1] = host ? v[i].host.data() : v[i].device();
            list[i].n = params[i].n;
            list[i].dtype = list[i].grad_dtype = list[i].state_dtype = params[i].dtype;
        }
        return optim;
    }

    void new_grads(double size)
    {
        random_numbers numbers = {77};
        for (twin &it : grads) {
            it.fill(&numbers, -size, size);
        }
    }
};

static ct_step_result
step(ct_optim *optim, const ct_step_config &config)
{
    ct_step_result result;
    ct_error err;
    check_ok(ct_step_measure(optim, stream(), &config, 4.0, &result, &err), err);
    check_ok(ct_step_apply(optim, stream(), &config, 4.0, &result, &err), err);
    return result;
}

static ct_step_config
clipping(double max_norm, bool zero_grads)
{
    ct_step_config config = {};
    config.clip.max_norm = max_norm;
    config.zero_grads = zero_grads;
    return config;
}

static void
test_steps_without_clipping_equal_the_cpu()
{
    model both;
    ct_optim *host = both.optimizer(&ct_device_cpu);
    ct_optim *device = both.optimizer(&ct_device_cuda);
    const ct_step_config config = clipping(0.0, true);
    for (int i = 0; i < 3; i++) {
        both.new_grads(1.0 + i);
        const ct_step_result on_host = step(host, config);
        const ct_step_result on_device = step(device, config);
        CHECK(on_host.updated && on_device.updated);
        CHECK(fabs(on_device.grad_norm - on_host.grad_norm) <=
              1e-12 * on_host.grad_norm);
        for (const auto *list : {&both.params, &both.grads, &both.m, &both.v}) {
            for (const twin &it : *list) {
                CHECK(it.agree());
            }
        }
    }
    ct_optim_free(host);
    ct_optim_free(device);
}

static void
test_clipping_uses_the_device_norm()
{
    model both;
    ct_optim *device = both.optimizer(&ct_device_cuda);
    const ct_step_config config = clipping(0.5, false);
    both.new_grads(1.0);
    const ct_step_result result = step(device, config);
    CHECK(result.grad_norm > 0.5);
    CHECK(result.clip_coef == ct_clip_coef(0.5, result.grad_norm));
    ct_optim_free(device);
}

static void
test_a_bad_gradient_leaves_the_weights_alone()
{
    model both;
    ct_optim *device = both.optimizer(&ct_device_cuda);
    const ct_step_config config = clipping(1.0, true);
    put(both.grads[3].dtype, both.grads[3].host.data(), 19999, NAN);
    both.grads[3].upload();
    const ct_step_result result = step(device, config);
    CHECK(!result.finite && !result.updated);
    for (const twin &it : both.params) {
        CHECK(it.agree());
    }
    ct_optim_free(device);
}

int
main()
{
    skip_without_device();
    in_two_orders([] {
        test_steps_without_clipping_equal_the_cpu();
        test_clipping_uses_the_device_norm();
        test_a_bad_gradient_leaves_the_weights_alone();
    });
    return 0;
}
