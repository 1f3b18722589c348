/* Elementwise kernels give the CPU's bits, so equality is memcmp. */
#include "../core/ct_rule_examples.h"
#include "cuda_test.h"

static std::vector<std::vector<twin>>
make_arrays(size_t n_arrays, size_t n_small, double low, double high)
{
    random_numbers numbers = {42};
    std::vector<std::vector<twin>> arrays(n_arrays);
    size_t k = 0;
    for (size_t n : lengths(n_small)) {
        const ct_dtype dtype = float_dtypes[k % 4];
        const size_t shift = k++ % 3; /* some are aligned to an element only */
        for (size_t a = 0; a < n_arrays; a++) {
            arrays[a].emplace_back(dtype, n, shift);
            arrays[a].back().fill(&numbers, low, high);
        }
    }
    return arrays;
}

static void
check_agreement(const std::vector<std::vector<twin>> &arrays)
{
    for (const auto &array : arrays) {
        for (const twin &it : array) {
            CHECK(it.agree());
        }
    }
}

/* Parameters of every dtype, and beside each gradients, state, a copy and an average
 * of the same or of another one. */
struct update_fixture {
    enum {
        ARRAYS = 4 + CT_RULE_MAX_STATES
    };
    std::vector<twin> arrays; /* ARRAYS of each span: grad, param, copy, ema, states */
    std::vector<ct_update_span> host, device;
    update_table table;
    ct_rounding rounding = {7, 3};

    explicit update_fixture(size_t n_small, bool mixed)
    {
        random_numbers numbers = {42};
        const std::vector<size_t> all = lengths(n_small);
        arrays.reserve((all.size() + 9) * ARRAYS);
        for (size_t k = 0; k < all.size(); k++) {
            const ct_dtype dtype = float_dtypes[k % 4];
            const ct_dtype state = mixed ? float_dtypes[k / 2 % 4] : dtype;
            const ct_dtype other = mixed ? float_dtypes[k / 3 % 4] : dtype;
            add(all[k], k % 3, dtype, state, other, mixed, &numbers);
        }
        for (size_t k = 0; mixed && k < 9; k++) { /* aligned, of 4 bytes at most */
            const ct_dtype dtypes[] = {CT_F32, CT_BF16, CT_F16};
            add(3077 + k, 0, dtypes[k % 3], dtypes[k / 3], dtypes[(k + k / 3) % 3],
                true, &numbers);
        }
    }

    void add(size_t n, size_t shift, ct_dtype dtype, ct_dtype state, ct_dtype other,
             bool mixed, random_numbers *numbers)
    {
        const ct_dtype dtypes[ARRAYS] = {other, dtype, other, state,
                                         state, state, state};
        const uint64_t end = device.empty() ? 0 : device.back().first + device.back().n;
        const uint64_t first = (end + 7) / 8 * 8 + n / 2 % 8;
        for (ct_dtype of : dtypes) {
            arrays.emplace_back(of, n, shift);
            arrays.back().fill(numbers, 0.0, 1.0); /* a second moment is >= 0 */
        }
        host.push_back(span_of(&arrays[arrays.size() - ARRAYS], true, first, mixed));
        device.push_back(span_of(&arrays[arrays.size() - ARRAYS], false, first, mixed));
    }

    ct_update_span span_of(twin *x, bool on_host, uint64_t first, bool mixed)
    {
        const auto at = [=](int k) {
            return on_host ? x[k].host.data() : x[k].device();
        };
        ct_update_span span = {};
        span.n = x[0].n;
        span.grad = at(0);
        span.param = at(1);
        span.copy = mixed ? at(2) : NULL;
        span.ema = mixed ? at(3) : NULL;
        for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
            span.state[k] = at(4 + k);
        }
        span.dtype = x[1].dtype;
        span.grad_dtype = span.copy_dtype = x[0].dtype;
        span.state_dtype = span.ema_dtype = x[3].dtype;
        span.coef = (uint32_t)(x[0].n % CT_RULE_VARIANTS);
        span.rounding = mixed && x[0].n % 2 == 0 ? &rounding : NULL;
        span.first = first;
        return span;
    }
};

static void
check_rule(ct_rule rule, bool mixed)
{
    update_fixture f(mixed ? 60 : 300, mixed);
    ct_error err;
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
        coefs[c] = ct_rule_example(rule, c);
    }
    for (int step = 0; step < 2; step++) {
        ct_update update = {rule,      coefs, f.host.data(), f.host.size(),
                            step == 1, 0.75,  NULL};
        check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
        update.spans = f.device.data();
        check_ok(ct_device_cuda.update(stream(), &f.table.of, &update, &err), err);
        for (const twin &it : f.arrays) {
            CHECK(it.agree());
        }
    }
}

/* Both devices, with a factor among the constants or in the outcome of clipping. */
static void
update_both(update_fixture &f, ct_rule rule, const ct_rule_coef *coefs,
            const ct_rule_coef *scaled, const outcome_twin &outcome, bool in_outcome)
{
    ct_error err;
    ct_update update = {
        rule, in_outcome ? coefs : scaled,      f.host.data(), f.host.size(), false,
        0.75, in_outcome ? &outcome.host : NULL};
    check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
    update.coefs = in_outcome && !outcome.host.skip ? scaled : coefs;
    update.clip = in_outcome && !outcome.host.skip ? NULL : outcome.device;
    update.spans = f.device.data();
    check_ok(ct_device_cuda.update(stream(), &f.table.of, &update, &err), err);
    for (const twin &it : f.arrays) {
        CHECK(it.agree());
    }
}

static void
test_a_factor_in_device_memory_is_one_among_the_constants()
{
    const outcome_twin clipped(0.3, 0), skipped(0.3, 1);
    int n_rules = 0;
    for (int r = 0; r < CT_RULE_COUNT; r++) {
        const ct_rule rule = (ct_rule)r;
        ct_rule_coef coefs[CT_RULE_VARIANTS], scaled[CT_RULE_VARIANTS];
        for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
            coefs[c] = scaled[c] = ct_rule_example(rule, c);
            scaled[c].grad_scale *= 0.3;
        }
        if (ct_rule_is_measured(rule) || coefs[0].grad_scale != ct_example_scale) {
            continue;
        }
        n_rules++;
        update_fixture f(20, true);
        update_both(f, rule, coefs, scaled, clipped, false);
        update_both(f, rule, coefs, scaled, clipped, true);
        std::vector<std::vector<unsigned char>> before;
        for (const twin &it : f.arrays) {
            before.push_back(it.host);
        }
        update_both(f, rule, coefs, scaled, skipped, true);
        for (size_t i = 0; i < before.size(); i++) {
            CHECK(before[i] == f.arrays[i].host);
        }
    }
    CHECK(n_rules >= 15);
}

static void
test_average_equals_the_cpu()
{
    update_fixture f(60, true);
    std::vector<ct_span> host_averages, host_values, averages, values;
    for (size_t i = 0; i < f.host.size(); i++) {
        const ct_update_span &h = f.host[i], &d = f.device[i];
        host_averages.push_back({h.ema, h.n, h.ema_dtype});
        host_values.push_back({h.param, h.n, h.dtype});
        averages.push_back({d.ema, d.n, d.ema_dtype});
        values.push_back({d.param, d.n, d.dtype});
    }
    CHECK(ct_device_cpu.average(NULL, host_averages.data(), host_values.data(),
                                f.host.size(), 0.9, NULL) == CT_OK);
    CHECK(ct_device_cuda.average(stream(), averages.data(), values.data(),
                                 f.host.size(), 0.9, NULL) == CT_OK);
    for (const twin &it : f.arrays) {
        CHECK(it.agree());
    }
}

static void
test_every_rule_equals_the_cpu()
{
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        check_rule((ct_rule)rule, false);
        check_rule((ct_rule)rule, true);
    }
}

/* What a table keeps of the update before must not be seen: other spans, in another
 * order, with other constants, keys, gradients and arrays. */
static void
test_operands_may_change_between_updates()
{
    random_numbers numbers = {17};
    update_fixture f(2 * CT_RULE_VARIANTS, true);
    ct_error err;
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
        coefs[c] = ct_rule_example(CT_RULE_adamw, c);
    }
    for (int step = 0; step < 12; step++) {
        std::vector<ct_update_span> host, device;
        const double kept = step % 4 == 3 ? 0.5 : 1.0;
        for (size_t i = 0; i < f.host.size(); i++) {
            const size_t from = step % 3 == 2 ? f.host.size() - 1 - i : i;
            if (numbers.next() * 0.5 + 0.5 > kept) {
                continue;
            }
            host.push_back(f.host[from]);
            device.push_back(f.device[from]);
            host.back().coef = device.back().coef =
                (f.host[from].coef + (uint32_t)step / 6) % CT_RULE_VARIANTS;
            if (step % 5 == 4) {
                std::swap(host.back().state[0], host.back().state[1]);
                std::swap(device.back().state[0], device.back().state[1]);
            }
        }
        f.rounding.step += step % 2;
        ct_update update = {CT_RULE_adamw, coefs, host.data(), host.size(),
                            false,         0.75,  NULL};
        check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
        update.spans = device.data();
        check_ok(ct_device_cuda.update(stream(), &f.table.of, &update, &err), err);
        for (const twin &it : f.arrays) {
            CHECK(it.agree());
        }
    }
}

/* More than the parameters of a launch take, of two kernels. */
static void
test_more_tensors_than_a_launch_takes()
{
    random_numbers numbers = {19};
    const ct_rule_coef coef = ct_rule_example(CT_RULE_adamw, 0);
    const size_t n = 2100;
    std::vector<ct_update_span> host, device;
    std::vector<twin> arrays;
    update_table table;
    ct_error err;
    arrays.reserve(8);
    for (ct_dtype dtype : {CT_F32, CT_F64}) {
        for (int role = 0; role < 4; role++) {
            arrays.emplace_back(dtype, n, 0);
            arrays.back().fill(&numbers, 0.0, 1.0);
        }
    }
    for (size_t i = 0; i < 2 * n; i++) {
        twin *const of = &arrays[i % 2 * 4];
        const auto span = [&](bool on_host) {
            const auto at = [&](int role) {
                char *const data =
                    on_host ? (char *)of[role].host.data() : (char *)of[role].device();
                return data + i / 2 * of->element;
            };
            ct_update_span made = {};
            made.n = 1;
            made.grad = at(0);
            made.param = at(1);
            made.state[0] = at(2);
            made.state[1] = at(3);
            made.dtype = made.grad_dtype = made.state_dtype = of->dtype;
            return made;
        };
        host.push_back(span(true));
        device.push_back(span(false));
    }
    ct_update update = {CT_RULE_adamw, &coef, host.data(), host.size(),
                        false,         0.0,   NULL};
    check_ok(ct_device_cpu.update(NULL, NULL, &update, &err), err);
    update.spans = device.data();
    check_ok(ct_device_cuda.update(stream(), &table.of, &update, &err), err);
    for (const twin &it : arrays) {
        CHECK(it.agree());
    }
}

static void
test_scale_equals_the_cpu()
{
    auto arrays = make_arrays(1, 1300, -70000.0, 70000.0); /* overflows float16 */
    std::vector<ct_span> host, device;
    ct_error err;
    for (twin &it : arrays[0]) {
        host.push_back(it.on_host());
        device.push_back(it.on_device());
    }
    for (double factor : {1.0 / 3.0, 1e-5, 0.0}) {
        const double limit = factor < 0.1 ? 0.07 : INFINITY; /* of up to 0.24 */
        check_ok(
            ct_device_cpu.scale(NULL, factor, limit, host.data(), host.size(), &err),
            err);
        check_ok(ct_device_cuda.scale(stream(), factor, limit, device.data(),
                                      device.size(), &err),
                 err);
        check_agreement(arrays);
    }
}

static void
test_scale_keeps_nan_and_limits_infinity()
{
    for (ct_dtype dtype : float_dtypes) {
        twin x(dtype, 3, 0);
        put(dtype, x.host.data(), 0, NAN);
        put(dtype, x.host.data(), 1, INFINITY);
        put(dtype, x.host.data(), 2, -INFINITY);
        x.upload();
        const ct_span span = x.on_device();
        CHECK(ct_device_cuda.scale(stream(), 2.0, 0.5, &span, 1, NULL) == CT_OK);
        const std::vector<unsigned char> back = x.download();
        CHECK(isnan(get(dtype, back.data(), 0)));
        CHECK(get(dtype, back.data(), 1) == 0.5 && get(dtype, back.data(), 2) == -0.5);
    }
}

static void
test_zero_fills_every_dtype_and_nothing_beside_it()
{
    random_numbers numbers = {7};
    for (int type = 0; type < CT_DTYPE_COUNT; type++) {
        for (size_t n : {0, 1, 15, 16, 17, 9000}) {
            twin whole((ct_dtype)type, n + 64, 0);
            for (unsigned char &byte : whole.host) {
                byte = (unsigned char)(1 + 127 * (numbers.next() + 1));
            }
            whole.upload();
            for (size_t shift : {0, 3}) {
                const size_t at = shift * whole.element;
                const ct_span host = {&whole.host[at], n, (ct_dtype)type};
                const ct_span device = {(char *)whole.device() + at, n, (ct_dtype)type};
                CHECK(ct_device_cpu.zero(NULL, &host, 1, NULL) == CT_OK);
                CHECK(ct_device_cuda.zero(stream(), &device, 1, NULL) == CT_OK);
                CHECK(whole.agree());
            }
        }
    }
}

static void
test_copy_converts_as_the_cpu_does()
{
    random_numbers numbers = {3};
    const double special[] = {0.0,
                              -0.0,
                              INFINITY,
                              -INFINITY,
                              65504.0,
                              65519.999,
                              65520.,
                              1e-40,
                              6e-8,
                              3e-8,
                              5.9e-8,
                              1e39,
                              1e308,
                              1e-310,
                              3.38e38,
                              3.4e38,
                              1 + 1. / 256,
                              1 + 3. / 2048,
                              1 + 1. / 256 + 1e-12,
                              1 + 1. / 2048 + 1e-12};
    std::vector<twin> arrays;
    std::vector<ct_span> to_host, to_device, from_host, from_device;
    arrays.reserve(256);
    for (ct_dtype from : float_dtypes) {
        for (ct_dtype to : float_dtypes) {
            for (size_t n : {0, 3, 300, 8193}) {
                arrays.emplace_back(from, n, n % 2);
                twin &source = arrays.back();
                source.fill(&numbers, -4.0, 4.0);
                for (size_t i = 0; i < n && i < sizeof special / sizeof *special; i++) {
                    put(from, source.host.data(), i, special[i]);
                }
                source.upload();
                arrays.emplace_back(to, n, 0);
                to_host.push_back(arrays.back().on_host());
                to_device.push_back(arrays.back().on_device());
                from_host.push_back(source.on_host());
                from_device.push_back(source.on_device());
            }
        }
    }
    CHECK(arrays.size() <= 256); /* or the spans point at moved arrays */
    CHECK(ct_device_cpu.copy(NULL, to_host.data(), from_host.data(), to_host.size(),
                             NULL) == CT_OK);
    CHECK(ct_device_cuda.copy(stream(), to_device.data(), from_device.data(),
                              to_device.size(), NULL) == CT_OK);
    for (const twin &it : arrays) {
        CHECK(it.agree());
    }
}

static void
test_add_rounds_as_the_cpu_does()
{
    random_numbers numbers = {5};
    std::vector<twin> sums, values;
    std::vector<ct_span> to_host, to_device, from_host, from_device;
    for (ct_dtype from : float_dtypes) {
        for (ct_dtype to : float_dtypes) {
            for (size_t n : {0, 3, 700, 8193}) {
                for (auto list : {&sums, &values}) {
                    list->emplace_back(list == &sums ? to : from, n, n % 2);
                    list->back().fill(&numbers, -4000.0, 4000.0);
                }
            }
        }
    }
    for (size_t k = 0; k < sums.size(); k++) {
        to_host.push_back(sums[k].on_host());
        to_device.push_back(sums[k].on_device());
        from_host.push_back(values[k].on_host());
        from_device.push_back(values[k].on_device());
    }
    for (double factor : {1.0, 1.0 / 3.0, 1e5}) { /* the last overflows float16 */
        CHECK(ct_device_cpu.add(NULL, to_host.data(), from_host.data(), sums.size(),
                                factor, NULL) == CT_OK);
        CHECK(ct_device_cuda.add(stream(), to_device.data(), from_device.data(),
                                 sums.size(), factor, NULL) == CT_OK);
        for (const twin &it : sums) {
            CHECK(it.agree());
        }
    }
}

static void
test_add_rejects_what_does_not_fit()
{
    twin a(CT_F32, 4, 0), b(CT_F32, 3, 0), c(CT_I32, 4, 0);
    const ct_span sum = a.on_device(), shorter = b.on_device(), whole = c.on_device();
    ct_error err;
    CHECK(ct_device_cuda.add(stream(), &sum, &shorter, 1, 1.0, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "add: span 0 has 4 elements for 3 values") == 0);
    CHECK(ct_device_cuda.add(stream(), &sum, &whole, 1, 1.0, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "add: span 0 is int32, and only float dtypes work") == 0);
}

/* A conversion may change a NaN's payload, which GPUs do not keep, never its being. */
static void
test_copy_keeps_nan()
{
    for (ct_dtype from_dtype : float_dtypes) {
        for (ct_dtype to_dtype : float_dtypes) {
            twin from(from_dtype, 40, 0), to(to_dtype, 40, 0);
            for (size_t i = 0; i < from.n; i++) {
                put(from.dtype, from.host.data(), i, i % 2 ? -NAN : NAN);
            }
            from.upload();
            const ct_span source = from.on_device(), target = to.on_device();
            CHECK(ct_device_cuda.copy(stream(), &target, &source, 1, NULL) == CT_OK);
            const std::vector<unsigned char> back = to.download();
            for (size_t i = 0; i < to.n; i++) {
                CHECK(isnan(get(to.dtype, back.data(), i)));
            }
        }
    }
}

static void
test_copy_moves_bytes_of_any_dtype()
{
    random_numbers numbers = {11};
    for (int type = 0; type < CT_DTYPE_COUNT; type++) {
        twin from((ct_dtype)type, 10001, 1), to((ct_dtype)type, 10001, 2);
        for (unsigned char &byte : from.host) {
            byte = (unsigned char)(127 * (numbers.next() + 1));
        }
        from.upload();
        const ct_span source = from.on_device(), target = to.on_device();
        CHECK(ct_device_cuda.copy(stream(), &target, &source, 1, NULL) == CT_OK);
        std::vector<unsigned char> expected = from.host;
        expected.resize(expected.size() + twin::GUARD, to.pattern);
        CHECK(to.download(twin::GUARD) == expected);
    }
}

int
main()
{
    skip_without_device();
    in_two_orders([] {
        test_every_rule_equals_the_cpu();
        test_operands_may_change_between_updates();
        test_more_tensors_than_a_launch_takes();
        test_a_factor_in_device_memory_is_one_among_the_constants();
        test_average_equals_the_cpu();
        test_scale_equals_the_cpu();
        test_scale_keeps_nan_and_limits_infinity();
        test_zero_fills_every_dtype_and_nothing_beside_it();
        test_copy_converts_as_the_cpu_does();
        test_copy_keeps_nan();
        test_add_rounds_as_the_cpu_does();
        test_add_rejects_what_does_not_fit();
        test_copy_moves_bytes_of_any_dtype();
    });
    return 0;
}
