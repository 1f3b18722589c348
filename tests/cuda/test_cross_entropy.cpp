/* The cross entropy on the device is the CPU's but for the order of the sums: a sum of
 * n exponentials in double differs by less than n * 2^-52, so a gradient by one
 * rounding to its dtype, and a loss by n * 2^-51. The device's log() may be an ulp off.
 */
#include "cuda_test.h"

struct rows {
    size_t n, classes;
    twin logits;
    std::vector<int64_t> targets;
    std::vector<double> losses;
    ct_cross_entropy work;

    rows(ct_dtype dtype, size_t count, size_t of, double smoothing)
        : n(count), classes(of), logits(dtype, count * (of + 3), 1), targets(count),
          losses(count), work()
    {
        random_numbers numbers = {41};
        logits.fill(&numbers, -10.0, 10.0);
        for (size_t i = 0; i < n; i++) {
            targets[i] = (int64_t)((i * 7) % classes);
        }
        work.dtype = dtype;
        work.rows = n;
        work.classes = classes;
        work.stride = classes + 3;
        work.smoothing = smoothing;
        work.scale = 0.75;
        work.gradient = true;
    }

    ct_status on_host(ct_error *err)
    {
        ct_cross_entropy w = work;
        w.logits = logits.host.data();
        w.targets = targets.data();
        w.losses = losses.data();
        return ct_device_cpu.cross_entropy(NULL, &w, err);
    }

    /* Returns the device's losses. */
    std::vector<double> on_device() const
    {
        std::vector<double> back(n);
        ct_cross_entropy w = work;
        ct_error err;
        void *t = NULL, *l = NULL;
        CHECK(cudaMalloc(&t, n * 8) == cudaSuccess);
        CHECK(cudaMalloc(&l, n * 8) == cudaSuccess);
        CHECK(cudaMemcpyAsync(t, targets.data(), n * 8, cudaMemcpyHostToDevice,
                              stream()) == cudaSuccess);
        w.logits = logits.device();
        w.targets = (const int64_t *)t;
        w.losses = (double *)l;
        check_ok(ct_device_cuda.cross_entropy(stream(), &w, &err), err);
        CHECK(cudaMemcpyAsync(back.data(), l, n * 8, cudaMemcpyDeviceToHost,
                              stream()) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream()) == cudaSuccess);
        (void)cudaFree(t);
        (void)cudaFree(l);
        return back;
    }
};

static double
unit_of(ct_dtype dtype)
{
    return dtype == CT_F32    ? 0x1p-23
           : dtype == CT_F64  ? 0x1p-40
           : dtype == CT_BF16 ? 0x1p-7
                              : 0x1p-10;
}

static void
check_rows(ct_dtype dtype, size_t n, size_t classes, double smoothing)
{
    rows r(dtype, n, classes, smoothing);
    ct_error err;
    check_ok(r.on_host(&err), err);
    const std::vector<double> losses = r.on_device();
    const std::vector<unsigned char> back = r.logits.download();
    for (size_t i = 0; i < n; i++) {
        CHECK(fabs(losses[i] - r.losses[i]) <= 0x1p-50 * (double)(classes + 64));
    }
    for (size_t i = 0; i < r.logits.n; i++) {
        const double host = get(dtype, r.logits.host.data(), i);
        const double difference = fabs(get(dtype, back.data(), i) - host);
        const bool is_class = i % r.work.stride < classes;
        CHECK(difference <= (is_class ? unit_of(dtype) * (fabs(host) + 1e-6) : 0.0));
    }
}

static void
test_losses_and_gradients_are_the_cpus()
{
    in_two_orders([] {
        for (ct_dtype dtype : float_dtypes) {
            for (size_t classes : {1, 31, 257, 1000}) {
                check_rows(dtype, 5, classes, 0.0);
                check_rows(dtype, 5, classes, 0.1);
            }
        }
    });
}

/* Nobody waits for the device to report them. */
static void
test_a_target_of_no_class_makes_its_row_nan()
{
    for (int64_t wrong : {(int64_t)-1, (int64_t)40, INT64_MIN}) {
        rows r(CT_F32, 3, 40, 0.1);
        r.targets[1] = wrong;
        const std::vector<double> losses = r.on_device();
        const std::vector<unsigned char> back = r.logits.download();
        CHECK(isfinite(losses[0]) && isnan(losses[1]) && isfinite(losses[2]));
        for (size_t i = 0; i < 40; i++) {
            CHECK(isfinite(get(CT_F32, back.data(), i)));
            CHECK(isnan(get(CT_F32, back.data(), r.work.stride + i)));
        }
    }
}

static void
test_masked_logits_have_no_probability_and_nan_spreads()
{
    rows r(CT_F32, 3, 600, 0.0);
    for (size_t i = 300; i < 600; i++) {
        put(CT_F32, r.logits.host.data(), i, -INFINITY);
    }
    put(CT_F32, r.logits.host.data(), 2 * r.work.stride + 599, NAN);
    r.logits.upload();
    const std::vector<double> losses = r.on_device();
    const std::vector<unsigned char> back = r.logits.download();
    CHECK(isfinite(losses[0]) && isfinite(losses[1]) && isnan(losses[2]));
    for (size_t i = 300; i < 600; i++) {
        CHECK(get(CT_F32, back.data(), i) == 0.0);
        CHECK(isnan(get(CT_F32, back.data(), 2 * r.work.stride + i)));
    }
}

static void
test_without_gradient_the_logits_stay()
{
    rows r(CT_BF16, 4, 300, 0.1);
    r.work.gradient = false;
    (void)r.on_device();
    CHECK(r.logits.agree());
    r.work.dtype = CT_I64;
    ct_error err;
    CHECK(ct_device_cuda.cross_entropy(stream(), &r.work, &err) == CT_EINVAL);
}

int
main()
{
    skip_without_device();
    test_losses_and_gradients_are_the_cpus();
    test_a_target_of_no_class_makes_its_row_nan();
    test_masked_logits_have_no_probability_and_nan_spreads();
    test_without_gradient_the_logits_stay();
    return 0;
}
