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

/* ---- without a wait -------------------------------------------------------------- */

static ct_step_result
enqueue(ct_optim *optim, const ct_step_config &config)
{
    ct_step_result result;
    ct_error err;
    twin next(CT_F32, 1, 0);
    const ct_step_scale scale = {4.0, (float *)next.on_device().data, 8.0, 0.25};
    CHECK(ct_step_can_enqueue(optim, &config));
#ifdef CT_EMUL
    const size_t waits = emul::seen.waits;
#endif
    check_ok(ct_step_enqueue(optim, stream(), &config, &scale, &err), err);
#ifdef CT_EMUL
    CHECK(emul::seen.waits == waits);
#endif
    check_ok(ct_step_await(optim, &result, &err), err);
    put(CT_F32, next.host.data(), 0, result.finite ? 8.0 : 0.25);
    CHECK(next.agree());
    return result;
}

static void
check_same(const model &a, const model &b)
{
    for (auto list : {&model::params, &model::m, &model::v}) {
        for (size_t i = 0; i < n_params; i++) {
            CHECK((a.*list)[i].download() == (b.*list)[i].download());
        }
    }
}

/* A norm that is measured on the host clips by the same factor. */
static void
test_an_enqueued_step_is_the_measured_one()
{
    for (double norm_type : {1.0, 2.0, (double)INFINITY}) {
        model one, other;
        ct_optim *measured = one.optimizer(&ct_device_cuda);
        ct_optim *enqueued = other.optimizer(&ct_device_cuda);
        for (int i = 0; i < 4; i++) {
            ct_step_config config = clipping(i == 0 ? 0.0 : 0.5, false);
            config.clip.norm_type = norm_type;
            config.nonfinite = i == 2 ? CT_NONFINITE_KEEP : CT_NONFINITE_SKIP;
            for (model *it : {&one, &other}) {
                it->new_grads(1.0 + i);
                put(it->grads[2].dtype, it->grads[2].host.data(), 7,
                    i == 1   ? NAN
                    : i == 3 ? INFINITY
                             : 0.5);
                it->grads[2].upload();
            }
            const ct_step_result a = step(measured, config);
            const ct_step_result b = enqueue(enqueued, config);
            CHECK(memcmp(&a.grad_norm, &b.grad_norm, sizeof a.grad_norm) == 0 ||
                  (isnan(a.grad_norm) && isnan(b.grad_norm)));
            CHECK(a.clip_coef == b.clip_coef ||
                  (isnan(a.clip_coef) && isnan(b.clip_coef)));
            CHECK(a.finite == b.finite && a.updated == b.updated);
            CHECK(b.updated == (i == 0 || i == 2));
            CHECK(ct_optim_params_borrow(measured)[1].step ==
                  ct_optim_params_borrow(enqueued)[1].step);
            check_same(one, other);
        }
        ct_optim_free(measured);
        ct_optim_free(enqueued);
    }
}

/* What a program of its own makes of the entries. */
static void
test_clip_reads_back_later()
{
    model both;
    ct_error err;
    ct_scratch scratch = {}, place = {};
    ct_pending_read read = {};
    std::vector<ct_span> spans;
    const ct_clip_request request = {2.0, 0.25, 2.0, 0, NULL, 0, 0};
    ct_clip_outcome outcome;
    double sum, *total;
    both.new_grads(1.0);
    for (const twin &it : both.grads) {
        spans.push_back(it.on_device());
    }
    check_ok(ct_device_cuda.scratch_grow(&place, sizeof outcome, &err), err);
    total = (double *)place.data;
    check_ok(ct_device_cuda.norm(stream(), &scratch, 2.0, spans.data(), n_params, total,
                                 &err),
             err);
    check_ok(ct_device_cuda.read(stream(), total, &sum, &err), err);
    check_ok(ct_device_cuda.clip(stream(), &scratch, &request, spans.data(), n_params,
                                 (ct_clip_outcome *)place.data, &err),
             err);
    check_ok(
        ct_device_cuda.read_begin(stream(), &read, place.data, sizeof outcome, &err),
        err);
    check_ok(ct_device_cuda.read_end(&read, &outcome, &err), err);
    CHECK(outcome.grad_norm == sqrt(sum) / 2.0);
    CHECK(outcome.coef == 0.25 / (sqrt(sum) / 2.0 + 1e-6));
    CHECK(outcome.finite && !outcome.skip);
    for (double all : {sum, (double)INFINITY, (double)NAN}) {
        ct_clip_outcome there, here;
        twin sums(CT_F64, 2, 0);
        put(CT_F64, sums.host.data(), 0, sum);
        put(CT_F64, sums.host.data(), 1, all);
        sums.upload();
        const double *on_device = (const double *)sums.on_device().data;
        check_ok(ct_device_cuda.decide(stream(), &request, on_device, on_device + 1,
                                       (ct_clip_outcome *)place.data, &err),
                 err);
        check_ok(
            ct_device_cuda.transfer(stream(), &there, place.data, sizeof there, &err),
            err);
        check_ok(ct_device_cpu.decide(NULL, &request, &sum, &all, &here, &err), err);
        CHECK(there.grad_norm == here.grad_norm && there.coef == here.coef);
        CHECK(there.finite == here.finite && there.skip == here.skip);
        CHECK(here.finite == (all == sum) && here.coef == outcome.coef);
    }
    ct_device_cuda.read_release(&read);
    ct_device_cuda.scratch_release(&place);
    ct_device_cuda.scratch_release(&scratch);
}

int
main()
{
    skip_without_device();
    in_two_orders([] {
        test_steps_without_clipping_equal_the_cpu();
        test_clipping_uses_the_device_norm();
        test_a_bad_gradient_leaves_the_weights_alone();
        test_an_enqueued_step_is_the_measured_one();
        test_clip_reads_back_later();
    });
    return 0;
}
