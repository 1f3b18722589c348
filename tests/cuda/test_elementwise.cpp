/* Elementwise kernels give the CPU's bits, so equality is memcmp. */
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

static void
test_adamw_equals_the_cpu()
{
    auto arrays = make_arrays(4, 300, 0.0, 1.0); /* param, grad, m, v: v must be >= 0 */
    const ct_adamw_config configs[] = {
        {1e-2, 0.9,  0.999, 1e-8, 0.1},
        {3e-3, 0.25, 0.99,  1e-6, 0.0}
    };
    ct_error err;
    for (uint64_t step = 1; step <= 2; step++) {
        ct_adamw_coef coefs[2];
        std::vector<ct_adamw_span> host, device;
        for (int c = 0; c < 2; c++) {
            check_ok(ct_adamw_coef_init(&coefs[c], &configs[c], step, 0.7, &err), err);
        }
        for (size_t i = 0; i < arrays[0].size(); i++) {
            twin &p = arrays[0][i], &g = arrays[1][i], &m = arrays[2][i],
                 &v = arrays[3][i];
            const uint32_t coef = i % 3 == 0;
            host.push_back({g.host.data(), p.host.data(), m.host.data(), v.host.data(),
                            p.n, p.dtype, coef});
            device.push_back(
                {g.device(), p.device(), m.device(), v.device(), p.n, p.dtype, coef});
        }
        const bool zero = step == 2;
        check_ok(ct_device_cpu.adamw(NULL, coefs, host.data(), host.size(), zero, &err),
                 err);
        check_ok(
            ct_device_cuda.adamw(NULL, coefs, device.data(), device.size(), zero, &err),
            err);
        check_agreement(arrays);
    }
}

static void
test_sgd_equals_the_cpu()
{
    auto arrays = make_arrays(3, 300, -2.0, 2.0);
    const ct_sgd_config configs[] = {
        {0.1,  0.9, 0.0, 0.01, true },
        {0.1,  0.9, 0.5, 0.0,  false},
        {0.01, 0.0, 0.0, 0.1,  false}
    };
    ct_error err;
    for (int step = 0; step < 2; step++) {
        ct_sgd_coef coefs[3];
        std::vector<ct_sgd_span> host, device;
        for (int c = 0; c < 3; c++) {
            check_ok(ct_sgd_coef_init(&coefs[c], &configs[c], step == 0, 0.5, &err),
                     err);
        }
        for (size_t i = 0; i < arrays[0].size(); i++) {
            twin &p = arrays[0][i], &g = arrays[1][i], &b = arrays[2][i];
            const uint32_t coef = i % 3;
            const bool plain = configs[coef].momentum == 0.0;
            host.push_back({g.host.data(), p.host.data(), plain ? NULL : b.host.data(),
                            p.n, p.dtype, coef});
            device.push_back({g.device(), p.device(), plain ? NULL : b.device(), p.n,
                              p.dtype, coef});
        }
        const bool zero = step == 1;
        check_ok(ct_device_cpu.sgd(NULL, coefs, host.data(), host.size(), zero, &err),
                 err);
        check_ok(
            ct_device_cuda.sgd(NULL, coefs, device.data(), device.size(), zero, &err),
            err);
        check_agreement(arrays);
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
        check_ok(ct_device_cpu.scale(NULL, factor, host.data(), host.size(), &err),
                 err);
        check_ok(ct_device_cuda.scale(NULL, factor, device.data(), device.size(), &err),
                 err);
    }
    check_agreement(arrays);
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
                CHECK(ct_device_cuda.zero(NULL, &device, 1, NULL) == CT_OK);
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
    CHECK(ct_device_cuda.copy(NULL, to_device.data(), from_device.data(),
                              to_device.size(), NULL) == CT_OK);
    for (const twin &it : arrays) {
        CHECK(it.agree());
    }
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
            CHECK(ct_device_cuda.copy(NULL, &target, &source, 1, NULL) == CT_OK);
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
        CHECK(ct_device_cuda.copy(NULL, &target, &source, 1, NULL) == CT_OK);
        CHECK(to.download() == from.host);
    }
}

int
main()
{
    skip_without_device();
    in_both_orders([] {
        test_adamw_equals_the_cpu();
        test_sgd_equals_the_cpu();
        test_scale_equals_the_cpu();
        test_zero_fills_every_dtype_and_nothing_beside_it();
        test_copy_converts_as_the_cpu_does();
        test_copy_keeps_nan();
        test_copy_moves_bytes_of_any_dtype();
    });
    return 0;
}
