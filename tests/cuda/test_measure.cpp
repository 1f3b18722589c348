/* Measured rules and factored second moments on the device. The states have the CPU's
 * bits; sums have an order of their own, so what is settled from them is held to a
 * bound: squares are >= 0, so n of them added in double in any order are off by at most
 * n * 2^-53 of their sum, and a settled constant by as much and a few roundings. */
#include "cuda_test.h"

#include "../core/ct_rule_examples.h"
#include "core/optim/optim.h"

#ifdef CT_EMUL
#include "../../cuda/dynlib.h"
#endif

static const ct_comm_ops *host_ops;

/* A group of one rank whose spans may lie on the device. */
static ct_status
move_on_device(ct_comm *comm, const ct_request *r, ct_error *err)
{
    return r->what == CT_ALL_TO_ALL
               ? ct_device_cuda.copy(stream(), &r->out, &r->in, 1, err)
               : host_ops->run(comm, r, err);
}

struct lone_group {
    ct_comm *comm = ct_comm_self_new();
    ct_comm_ops ops = *comm->ops;

    lone_group()
    {
        host_ops = comm->ops;
        ops.takes_device_memory = true;
        ops.run = move_on_device;
        comm->ops = &ops;
    }

    ~lone_group()
    {
        ops.free(comm);
    }
};

static const double unit = 1.0 / 9007199254740992.0; /* 2^-53 */

/* Spans with all arrays of one dtype or of several. */
struct operands {
    std::vector<twin> grads, params, first, second;
    std::vector<ct_update_span> host, device;

    void add(size_t n, size_t k, random_numbers *numbers)
    {
        const ct_dtype dtype = float_dtypes[k % 4];
        const ct_dtype other = float_dtypes[(k + k / 4) % 4];
        params.emplace_back(dtype, n, k % 3);
        grads.emplace_back(other, n, 0);
        first.emplace_back(other, n, 0);
        second.emplace_back(other, n, k % 2);
        params.back().fill(numbers, -1.0, 1.0);
        grads.back().fill(numbers, -1.0, 1.0);
        first.back().fill(numbers, 0.01, 1.0);
        second.back().fill(numbers, 0.01, 1.0);
    }

    ct_update_span span(size_t i, bool on_host)
    {
        ct_update_span s = {};
        s.n = params[i].n;
        s.param = on_host ? params[i].host.data() : params[i].device();
        s.grad = on_host ? grads[i].host.data() : grads[i].device();
        s.state[0] = on_host ? first[i].host.data() : first[i].device();
        s.state[1] = on_host ? second[i].host.data() : second[i].device();
        s.dtype = params[i].dtype;
        s.grad_dtype = grads[i].dtype;
        s.state_dtype = first[i].dtype;
        s.coef = (uint32_t)(i % CT_RULE_VARIANTS);
        return s;
    }

    void collect()
    {
        for (size_t i = 0; i < params.size(); i++) {
            host.push_back(span(i, true));
            device.push_back(span(i, false));
        }
    }
};

/* Of a span without elements they are 0, whatever was there before. */
static void
check_empty_sums(const ct_update &update, const double *measured)
{
    std::vector<double> sums(CT_MEASURES * update.n_spans);
    CHECK(cudaMemcpyAsync(sums.data(), measured, sums.size() * sizeof(double),
                          cudaMemcpyDeviceToHost, stream()) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    for (size_t i = 0; i < sums.size(); i++) {
        CHECK(update.spans[i / CT_MEASURES].n != 0 || sums[i] == 0.0);
    }
}

static std::vector<ct_rule_coef>
measure_on_device(const ct_update &update)
{
    ct_scratch scratch = {}, sums = {}, settled = {};
    ct_error err;
    const size_t n_sums = CT_MEASURES * update.n_spans;
    const size_t bytes = update.n_spans * sizeof(ct_rule_coef);
    std::vector<ct_rule_coef> back(update.n_spans);
    check_ok(ct_device_cuda.scratch_grow(&settled, bytes, &err), err);
    check_ok(ct_device_cuda.scratch_grow(&sums, n_sums * sizeof(double), &err), err);
    ct_rule_coef *to = (ct_rule_coef *)settled.data;
    double *measured = (double *)sums.data;
    CHECK(cudaMemsetAsync(measured, 0xff, n_sums * sizeof(double), stream()) ==
          cudaSuccess);
    check_ok(ct_device_cuda.measure(stream(), &scratch, &update, measured, &err), err);
    check_empty_sums(update, measured);
    check_ok(ct_device_cuda.settle(stream(), &update, measured, to, &err), err);
    CHECK(cudaMemcpyAsync(back.data(), to, bytes, cudaMemcpyDeviceToHost, stream()) ==
          cudaSuccess);
    CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
    ct_device_cuda.scratch_release(&scratch);
    ct_device_cuda.scratch_release(&sums);
    ct_device_cuda.scratch_release(&settled);
    return back;
}

static void
check_near(double got, double expected, double bound)
{
    CHECK(fabs(got - expected) <= bound * fabs(expected));
}

static void
check_settled(ct_rule rule, const ct_rule_coef &got, const ct_rule_coef &expected,
              size_t n)
{
    const double bound = 2 * ((double)n + 16) * unit;
    switch (rule) {
    case CT_RULE_lamb:
        check_near(got.lamb.step_size, expected.lamb.step_size, bound);
        break;
    case CT_RULE_lars:
    case CT_RULE_lars_momentum:
        check_near(got.lars.ratio, expected.lars.ratio, bound);
        CHECK(got.lars.decay == expected.lars.decay);
        break;
    case CT_RULE_muon_normalize:
        check_near(got.muon.inv_norm, expected.muon.inv_norm, bound);
        break;
    default:
        check_near(got.adafactor.rms, expected.adafactor.rms, bound);
        check_near(got.adafactor.factor, expected.adafactor.factor, bound);
        check_near(got.adafactor.decay, expected.adafactor.decay, bound);
    }
}

static bool
keeps_rms(ct_rule rule)
{
    return rule == CT_RULE_adafactor || rule == CT_RULE_adafactor_momentum;
}

static void
check_rms(const ct_update_span &span, const ct_rule_coef &settled, const void *kept)
{
    const double rms = settled.adafactor.rms;
    const ct_dtype real = ct_update_real(&span);
    CHECK(get(real, kept, 0) == (real == CT_F64 ? rms : (double)(float)rms) ||
          (span.n == 0 && isnan(get(real, kept, 0))));
}

/* With a skipped update nothing changes; else the factor is one among the constants. */
static void
check_rule(ct_rule rule)
{
    const outcome_twin clipped(0.3, 0), skipped(0.3, 1);
    random_numbers numbers = {3};
    operands all;
    size_t k = 0;
    for (size_t n : lengths(300)) {
        all.add(n, k++, &numbers);
    }
    all.collect();
    std::vector<ct_rule_coef> coefs, scaled, on_host(k);
    for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
        coefs.push_back(ct_rule_example(rule, c));
        scaled.push_back(coefs[c]);
        scaled[c].grad_scale *= 0.3;
    }
    twin rms(CT_F64, k, 0); /* a double each, or a float */
    rms.fill(&numbers, 0.1, 1.0);
    for (size_t i = 0; i < k && keeps_rms(rule); i++) {
        all.host[i].rms = (double *)rms.host.data() + i;
        all.device[i].rms = (double *)rms.device() + i;
    }
    const auto contents = [&] {
        std::vector<std::vector<unsigned char>> found = {rms.host, rms.download()};
        for (const auto *list : {&all.params, &all.first, &all.second}) {
            for (const twin &it : *list) {
                found.push_back(it.host);
                found.push_back(it.download());
            }
        }
        return found;
    };
    const auto before = contents();
    ct_update update = {};
    update.rule = rule;
    update.coefs = coefs.data();
    update.n_spans = k;
    ct_scratch scratch = {};
    ct_error err;
    std::vector<double> sums(CT_MEASURES * k);
    update.spans = all.device.data();
    update.clip = skipped.device;
    (void)measure_on_device(update);
    update.spans = all.host.data();
    update.clip = &skipped.host;
    check_ok(ct_device_cpu.measure(NULL, &scratch, &update, sums.data(), &err), err);
    check_ok(ct_device_cpu.settle(NULL, &update, sums.data(), on_host.data(), &err),
             err);
    CHECK(contents() == before);
    update.spans = all.device.data();
    update.clip = clipped.device;
    const std::vector<ct_rule_coef> on_device = measure_on_device(update);
    update.spans = all.host.data();
    update.coefs = scaled.data();
    update.clip = NULL;
    check_ok(ct_device_cpu.measure(NULL, &scratch, &update, sums.data(), &err), err);
    check_ok(ct_device_cpu.settle(NULL, &update, sums.data(), on_host.data(), &err),
             err);
    ct_device_cpu.scratch_release(&scratch);
    for (size_t i = 0; i < k; i++) {
        CHECK(all.first[i].agree() && all.second[i].agree() && all.params[i].agree());
        if (all.host[i].n != 0) {
            check_settled(rule, on_device[i], on_host[i], all.host[i].n);
        }
        if (keeps_rms(rule)) {
            check_rms(all.host[i], on_device[i], rms.download().data() + 8 * i);
            check_rms(all.host[i], on_host[i], rms.host.data() + 8 * i);
        }
    }
}

static void
test_measured_rules_settle_as_on_the_cpu()
{
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        if (ct_rule_is_measured((ct_rule)rule)) {
            check_rule((ct_rule)rule);
        }
    }
}

/* Sums of squares agree to n * 2^-53, so averages and factors of floats differ by a
 * rounding of 2^-24 at most, and doubles by that and what follows from it. */
static void
check_array(const twin &array, const twin &other, size_t n)
{
    const double bound =
        array.dtype == CT_F32 ? 1.0 / 8388608 : ((double)n + 16) * unit;
    const std::vector<unsigned char> back = array.download();
    for (size_t i = 0; i < array.n; i++) {
        check_near(get(array.dtype, back.data(), i),
                   get(other.dtype, other.host.data(), i), bound);
    }
}

/* Of the elements from `begin` on, all but the last few. */
static void
check_factors(size_t matrices, size_t rows, size_t cols, ct_dtype grad_dtype,
              ct_dtype real, size_t begin = 0, size_t missing = 0)
{
    random_numbers numbers = {12};
    const outcome_twin clipped(0.3, 0), skipped(0.3, 1);
    const size_t n = matrices * rows * cols - begin - missing;
    twin grad(grad_dtype, n, 1), row(real, matrices * rows, 0);
    twin col(real, matrices * cols, 0), row_factor(real, row.n, 0);
    twin col_factor(real, col.n, 0), sums(CT_F64, row.n + col.n, 0);
    grad.fill(&numbers, -1.0, 1.0);
    row.fill(&numbers, 0.1, 1.0);
    col.fill(&numbers, 0.1, 1.0);
    ct_scratch on_host = {}, on_device = {};
    ct_error err;
    ct_factored f = {matrices,
                     rows,
                     cols,
                     begin,
                     n,
                     grad.device(),
                     (double *)sums.device(),
                     row.device(),
                     col.device(),
                     row_factor.device(),
                     col_factor.device(),
                     grad_dtype,
                     real,
                     real,
                     0.7,
                     0.8,
                     1e-3,
                     skipped.device};
    const std::vector<unsigned char> empty = row_factor.download();
    const auto rows_before = row.host, cols_before = col.host;
    check_ok(ct_device_cuda.factor_sums(stream(), &on_device, &f, 1, &err), err);
    check_ok(ct_device_cuda.factor(stream(), &f, 1, &err), err);
    CHECK(row.download() == rows_before && col.download() == cols_before);
    CHECK(row_factor.download() == empty);
    f.clip = clipped.device;
    check_ok(ct_device_cuda.factor_sums(stream(), &on_device, &f, 1, &err), err);
    check_ok(ct_device_cuda.factor(stream(), &f, 1, &err), err);
    f.grad = grad.host.data();
    f.sums = (double *)sums.host.data();
    f.row = row.host.data();
    f.col = col.host.data();
    f.row_factor = row_factor.host.data();
    f.col_factor = col_factor.host.data();
    f.clip = &skipped.host;
    check_ok(ct_device_cpu.factor(NULL, &f, 1, &err), err);
    CHECK(row.host == rows_before && col.host == cols_before);
    f.clip = NULL;
    f.grad_scale *= 0.3;
    check_ok(ct_device_cpu.factor_sums(NULL, &on_host, &f, 1, &err), err);
    check_ok(ct_device_cpu.factor(NULL, &f, 1, &err), err);
    for (const twin *array : {&sums, &row, &col, &row_factor, &col_factor}) {
        check_array(*array, *array, n);
    }
    ct_device_cuda.scratch_release(&on_device);
    ct_device_cpu.scratch_release(&on_host);
}

static void
test_factors_equal_the_cpus()
{
    for (ct_dtype dtype : float_dtypes) {
        const ct_dtype real = dtype == CT_F64 ? CT_F64 : CT_F32;
        check_factors(1, 1, 1, dtype, real);
        check_factors(3, 130, 70, dtype, real);
        check_factors(1, 300, 37, dtype, real);
        check_factors(40, 3, 3, dtype, real);
        check_factors(3, 130, 70, dtype, real, 9200, 333);
        check_factors(1, 300, 37, dtype, real, 40, 11000);
    }
}

/* ---- whole steps ----------------------------------------------------------------- */

static const size_t shapes[][2] = {
    {1,  1 },
    {30, 17},
    {17, 90}
};

struct model {
    std::vector<twin> params, grads;
    std::vector<std::vector<twin>> states; /* [state][param] */

    model() : states(CT_OPTIM_MAX_STATES)
    {
        random_numbers numbers = {21};
        for (auto &shape : shapes) {
            const size_t rows = shape[0], cols = shape[1];
            params.emplace_back(CT_F32, rows * cols, 0);
            grads.emplace_back(CT_F32, rows * cols, 0);
            params.back().fill(&numbers, -1.0, 1.0);
            const size_t sizes[] = {rows * cols, rows * cols, rows, cols, 1, 1};
            for (size_t k = 0; k < CT_OPTIM_MAX_STATES; k++) {
                states[k].emplace_back(CT_F32, sizes[k], 0);
                states[k].back().upload();
            }
        }
    }

    ct_optim *optimizer(const ct_device *device, const ct_optim_group &group)
    {
        const bool host = device == &ct_device_cpu;
        ct_optim *optim = ct_optim_new(device);
        CHECK(optim != NULL && ct_optim_resize(optim, 1, params.size(), NULL) == CT_OK);
        ct_optim_groups_borrow(optim)[0] = group;
        for (size_t i = 0; i < params.size(); i++) {
            ct_optim_param *p = &ct_optim_params_borrow(optim)[i];
            p->param = host ? params[i].host.data() : params[i].device();
            p->grad = host ? grads[i].host.data() : grads[i].device();
            for (size_t k = 0; k < CT_OPTIM_MAX_STATES; k++) {
                p->state[k] = host ? states[k][i].host.data() : states[k][i].device();
            }
            p->n = params[i].n;
            p->ndim = 2;
            p->rows = shapes[i][0];
            p->cols = shapes[i][1];
        }
        return optim;
    }
};

/* A settled constant may fall on the other side of a rounding to float, 2^-24 of the
 * step, in each of the steps. Newton-Schulz runs in bfloat16: where sums in another
 * order round to another neighbour, five rounds that stretch small values by up to 3.5
 * each let it grow; to 2^-6 of an update, whose elements are below 1 before the rate.
 */
static void
check_steps(const ct_optim_group &group, double bound, size_t most_waits)
{
    model both;
    ct_optim *host = both.optimizer(&ct_device_cpu, group);
    ct_optim *device = both.optimizer(&ct_device_cuda, group);
    random_numbers numbers = {77};
    ct_optim_pass pass = {};
    pass.grad_scale = 0.5;
    pass.zero_grads = true;
    for (int step = 0; step < 4; step++) {
        ct_error err;
        for (twin &it : both.grads) {
            it.fill(&numbers, -1.0, 1.0);
        }
        check_ok(ct_optim_update(host, stream(), &pass, &err), err);
#ifdef CT_EMUL
        emul::seen.waits = 0;
        check_ok(ct_optim_update(device, stream(), &pass, &err), err);
        CHECK(step == 0 || emul::seen.waits <= most_waits); /* memory is got first */
#else
        (void)most_waits;
        check_ok(ct_optim_update(device, stream(), &pass, &err), err);
#endif
    }
    for (const twin &it : both.params) {
        const std::vector<unsigned char> back = it.download();
        for (size_t i = 0; i < it.n; i++) {
            const double got = get(it.dtype, back.data(), i);
            CHECK(fabs(got - get(it.dtype, it.host.data(), i)) <= bound);
        }
    }
    for (const twin &it : both.grads) {
        CHECK(it.agree());
    }
    ct_optim_free(host);
    ct_optim_free(device);
}

/* What is a part, of all elements here, takes the same steps to the bit. */
static void
check_part_steps(const ct_optim_group &group)
{
    model whole, part;
    const lone_group lone;
    ct_optim *first = whole.optimizer(&ct_device_cuda, group);
    ct_optim *second = part.optimizer(&ct_device_cuda, group);
    random_numbers numbers = {78}, again = {78};
    ct_optim_pass pass = {};
    pass.grad_scale = 0.5;
    for (size_t i = 0; i < part.params.size(); i++) {
        ct_optim_params_borrow(second)[i].part = {lone.comm, 0, part.params[i].n,
                                                  nullptr};
    }
    for (int step = 0; step < 3; step++) {
        ct_error err;
        for (size_t i = 0; i < part.params.size(); i++) {
            whole.grads[i].fill(&numbers, -1.0, 1.0);
            part.grads[i].fill(&again, -1.0, 1.0);
        }
        check_ok(ct_optim_update(first, stream(), &pass, &err), err);
        check_ok(ct_optim_update(second, stream(), &pass, &err), err);
    }
    for (size_t i = 0; i < part.params.size(); i++) {
        CHECK(whole.params[i].download() == part.params[i].download());
    }
    ct_optim_free(first);
    ct_optim_free(second);
}
static void
test_whole_steps_equal_the_cpus_and_wait_once_at_most()
{
    const double few = 1e-6;
    ct_optim_group group = {};
    group.kind = CT_OPTIM_LAMB;
    group.lamb = {1e-2, 0.9, 0.999, 1e-6, 0.01, 1.0, true, true, true, false};
    check_steps(group, few, 1);
    check_part_steps(group);
    group.lamb.max_grad_norm = 0.0;
    check_steps(group, few, 0);
    check_part_steps(group);
    group = {};
    group.kind = CT_OPTIM_LARS;
    group.lars = {0.1, 0.9, 0.0, 0.1, 0.02, 1e-8, true, false};
    check_steps(group, few, 0);
    check_part_steps(group);
    group = {};
    group.kind = CT_OPTIM_ADAFACTOR;
    group.adafactor = {NAN, 1e-30, 1e-3, 1.0, -0.8, 0.9, 0.01, true, true, false};
    check_steps(group, few, 0);
    check_part_steps(group);
    group = {};
    group.kind = CT_OPTIM_MUON;
    group.muon.lr = 0.02;
    group.muon.weight_decay = 0.1;
    group.muon.momentum = 0.95;
    group.muon.coefficients[0] = 3.4445;
    group.muon.coefficients[1] = -4.7750;
    group.muon.coefficients[2] = 2.0315;
    group.muon.eps = 1e-7;
    group.muon.steps = 5;
    group.muon.nesterov = true;
    check_steps(group, 4 * group.muon.lr / 64, 0);
    check_part_steps(group);
}

int
main()
{
    skip_without_device();
#ifdef CT_EMUL
    const char *folder = CT_EMUL_WHEELS;
    CHECK(ct_dynlib_set_path(&folder, 1, NULL) == CT_OK);
#endif
    in_two_orders([] {
        test_measured_rules_settle_as_on_the_cpu();
        test_factors_equal_the_cpus();
        test_whole_steps_equal_the_cpus_and_wait_once_at_most();
    });
    return 0;
}
