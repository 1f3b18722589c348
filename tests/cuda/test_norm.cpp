/* The norm's sum has an order of its own, so it is held to a bound. Powers are >= 0:
 * however n of them are added in double, the result is off by at most d * 2^-53 of the
 * sum, d being the additions on the longest way of one of them. A square itself is the
 * same double on both sides, exact for every dtype but float64, and |x| is exact. Whole
 * powers are products of p factors, the same on both sides, off by (p - 1) * 2^-53.
 * On the device, squares and |x| of a chunk of floats are added as pairs of floats, off
 * by 2^-39 (derived in cuda/norm.cu) and, where rests are too small, by 2^-47.
 * Other powers are off by one unit in the last place (2 * 2^-53) from the host's pow,
 * by two from CUDA's. The largest |x| is exact. */
#include "cuda_test.h"

static const double unit = 1.0 / 9007199254740992.0; /* 2^-53 */

struct spans {
    std::vector<twin> arrays;
    std::vector<ct_span> host, device;

    void add(ct_dtype dtype, size_t n, random_numbers *numbers)
    {
        arrays.emplace_back(dtype, n, n % 3);
        arrays.back().fill(numbers, -3.0, 3.0);
    }

    void collect()
    {
        host.clear();
        device.clear();
        for (twin &it : arrays) {
            it.upload();
            host.push_back(it.on_host());
            device.push_back(it.on_device());
        }
    }
};

static const double powers[] = {2.0, 1.0, INFINITY, 3.0, 14.0, 0.5};

static double
sum_on_device(double p, const std::vector<ct_span> &list)
{
    ct_scratch scratch = {}, result = {};
    ct_error err;
    double sum = -1.0;
    check_ok(ct_device_cuda.scratch_grow(&result, sizeof(double), &err), err);
    double *device_sum = (double *)result.data;
    check_ok(ct_device_cuda.norm(stream(), &scratch, p, list.data(), list.size(),
                                 device_sum, &err),
             err);
    check_ok(ct_device_cuda.read(stream(), device_sum, &sum, &err), err);
    ct_device_cuda.scratch_release(&scratch);
    ct_device_cuda.scratch_release(&result);
    return sum;
}

static void
check_bound(double p, const spans &all)
{
    const double got = sum_on_device(p, all.device);
    const double block = 256, chunk = 8192, lanes = 32, batch = 65536;
    double n = 0, chunks = 0, on_host, of_chunk = chunk / block + 8;
    long double exact = 0;
    for (const twin &it : all.arrays) {
        if (it.dtype != CT_F64 && (p == 2.0 || p == 1.0)) {
            of_chunk = (ldexp(1, -39) + ldexp(1, -47)) / unit + 1;
        }
        n += (double)it.n;
        chunks += ceil((double)it.n / chunk);
        for (size_t i = 0; i < it.n; i++) {
            const double x = get(it.dtype, it.host.data(), i);
            const long double power =
                p == 2.0 ? (long double)(x * x) : powl(fabs(x), isinf(p) ? 1.0 : p);
            exact = isinf(p) ? fmaxl(exact, power) : exact + power;
        }
    }
    ct_error err;
    check_ok(ct_device_cpu.norm(NULL, NULL, p, all.host.data(), all.host.size(),
                                &on_host, &err),
             err);
    const double depth = of_chunk + ceil(chunks / block) + 8;
    const double cpu_depth = batch / lanes + lanes + ceil(n / batch) + 1;
    const bool rounded = p != 2.0 && p != 1.0;
    const double power_error = rounded ? fmax(4, p - 1) : 0;
    const double both_errors = rounded ? fmax(6, p - 1) : 0;
    if (isinf(p)) {
        CHECK(got == (double)exact && on_host == got);
        return;
    }
    const double reference = n / 2048; /* long double's own n * 2^-64, in units */
    CHECK(fabs(got - (double)exact) <=
          (depth + power_error + reference + 1) * unit * (double)exact);
    CHECK(fabs(got - on_host) <=
          (depth + cpu_depth + both_errors) * unit * (double)exact);
}

/* Of all lengths: more than a launch describes for the 2-norm, some for the others,
 * whose launches are the same but for the power. */
static spans
spans_for(double p, random_numbers *numbers)
{
    spans all;
    size_t k = 0;
    for (size_t n : lengths(p == 2.0 ? 1300 : 40)) {
        all.add(float_dtypes[k++ % 4], n, numbers);
    }
    all.collect();
    return all;
}

static void
test_norm_is_within_its_bound()
{
    random_numbers numbers = {5};
    for (double p : powers) {
        check_bound(p, spans_for(p, &numbers));
    }

    for (ct_dtype dtype : float_dtypes) {
        spans one;
        one.add(dtype, 300001, &numbers);
        one.collect();
        check_bound(2.0, one);
        check_bound(3.0, one);
    }
}

static std::vector<double>
sums_on_device(double p, const std::vector<ct_span> &list)
{
    ct_scratch scratch = {}, result = {};
    ct_error err;
    std::vector<double> sums(list.size());
    check_ok(
        ct_device_cuda.scratch_grow(&result, list.size() * sizeof(double) + 1, &err),
        err);
    double *on_device = (double *)result.data;
    check_ok(ct_device_cuda.norms(stream(), &scratch, p, list.data(), list.size(),
                                  on_device, &err),
             err);
    for (size_t i = 0; i < list.size(); i++) {
        check_ok(ct_device_cuda.read(stream(), on_device + i, &sums[i], &err), err);
    }
    ct_device_cuda.scratch_release(&scratch);
    ct_device_cuda.scratch_release(&result);
    return sums;
}

static void
test_each_span_has_the_sum_that_it_has_alone()
{
    random_numbers numbers = {6};
    for (double p : powers) {
        const spans all = spans_for(p, &numbers);
        const std::vector<double> sums = sums_on_device(p, all.device);
        for (size_t i = 0; i < all.device.size(); i += i < 20 ? 1 : 97) {
            CHECK(sums[i] == sum_on_device(p, {all.device[i]}));
        }
    }
    CHECK(sums_on_device(2.0, {}).empty());
    spans long_one;
    long_one.add(CT_BF16, 300001, &numbers);
    long_one.collect();
    for (double p : powers) {
        CHECK(sums_on_device(p, long_one.device)[0] ==
              sum_on_device(p, long_one.device));
    }
}

/* Squares that a float cannot hold, and chunks in which only few elements are of that
 * size; zeros change nothing. */
static void
test_sizes_beyond_a_floats_range_are_within_the_bound()
{
    random_numbers numbers = {8};
    for (double size : {1e-30, 1e-22, 1e19, 1e38}) {
        for (ct_dtype dtype : {CT_F32, CT_BF16, CT_F64}) {
            for (size_t every : {1, 500}) {
                spans all;
                all.add(dtype, 20011, &numbers);
                for (size_t i = 0; i < 20011; i += every) {
                    const double x = get(dtype, all.arrays[0].host.data(), i);
                    put(dtype, all.arrays[0].host.data(), i, size * x / 3);
                }
                all.collect();
                check_bound(2.0, all);
                check_bound(1.0, all);
            }
        }
    }
    spans zeros;
    zeros.add(CT_F32, 20011, &numbers);
    memset(zeros.arrays[0].host.data(), 0, zeros.arrays[0].host.size());
    zeros.collect();
    for (double p : powers) {
        CHECK(sum_on_device(p, zeros.device) == 0.0);
    }
}

static void
test_the_address_changes_nothing()
{
    for (ct_dtype dtype : float_dtypes) {
        std::vector<double> sums;
        for (size_t shift : {0, 1, 2, 3}) {
            random_numbers numbers = {4};
            twin x(dtype, 30011, shift);
            x.fill(&numbers, -1.0, 1.0);
            for (double p : powers) {
                sums.push_back(sum_on_device(p, {x.on_device()}));
            }
        }
        for (size_t i = 0; i < sums.size(); i++) {
            CHECK(sums[i] == sums[i % (sums.size() / 4)]);
        }
    }
}

static double first_sum; /* of the first order of threads */

static void
test_norm_has_one_order()
{
    random_numbers numbers = {9};
    spans all;
    for (size_t n : {70000, 1, 513, 8191}) {
        all.add(CT_F32, n, &numbers);
    }
    all.collect();
    const double sum = sum_on_device(2.0, all.device);
    const double again = sum_on_device(2.0, all.device);
    first_sum = first_sum == 0 ? sum : first_sum;
    CHECK(memcmp(&sum, &again, sizeof sum) == 0);
    CHECK(memcmp(&sum, &first_sum, sizeof sum) == 0);
}

static void
test_norm_of_nothing_is_zero()
{
    random_numbers numbers = {1};
    spans empty;
    CHECK(sum_on_device(2.0, empty.device) == 0.0);
    empty.add(CT_F32, 0, &numbers);
    empty.collect();
    CHECK(sum_on_device(INFINITY, empty.device) == 0.0);
}

static void
test_norm_finds_one_bad_element()
{
    random_numbers numbers = {13};
    const double bad[] = {INFINITY, -INFINITY, NAN};
    for (ct_dtype dtype : float_dtypes) {
        for (double value : bad) {
            for (size_t at : {0, 8192, 19999}) {
                spans all;
                all.add(CT_F32, 100, &numbers);
                all.add(dtype, 20000, &numbers);
                put(dtype, all.arrays[1].host.data(), at, value);
                all.collect();
                for (double p : powers) {
                    const double sum = sum_on_device(p, all.device);
                    CHECK(isnan(value) ? isnan(sum) : isinf(sum));
                }
            }
        }
    }
}

static void
test_a_device_is_left_for_another_that_there_is()
{
    int before = -1;
    ct_error err;
    CHECK(ct_device_cuda.use(0, &before, &err) == CT_OK && before == 0);
    CHECK(ct_device_cuda.use(1000, &before, &err) == CT_EDEVICE && before == 0);
    CHECK(ct_device_cuda.use(0, &before, &err) == CT_OK && before == 0);
}

int
main()
{
    skip_without_device();
    test_a_device_is_left_for_another_that_there_is();
    in_two_orders([] {
        test_norm_is_within_its_bound();
        test_sizes_beyond_a_floats_range_are_within_the_bound();
        test_the_address_changes_nothing();
        test_each_span_has_the_sum_that_it_has_alone();
        test_norm_has_one_order();
        test_norm_of_nothing_is_zero();
        test_norm_finds_one_bad_element();
    });
    return 0;
}
