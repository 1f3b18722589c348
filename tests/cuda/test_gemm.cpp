/* gemm is cuBLAS's on the device. Sums of k products in another order differ by at most
 * 2 * k * u * sum |a b|, u being 2^-24 or 2^-53; bfloat16 then rounds to 2^-8 of the
 * result, on either side. */
#include "cuda_test.h"

#ifdef CT_EMUL
#include "../../cuda/dynlib.h"
#endif

struct shape {
    size_t m, n, k;
};

static void
check_product(ct_dtype dtype, bool trans_a, bool trans_b, shape s, double beta)
{
    random_numbers numbers = {33};
    const size_t a_rows = trans_a ? s.k : s.m, a_cols = trans_a ? s.m : s.k;
    const size_t b_rows = trans_b ? s.n : s.k, b_cols = trans_b ? s.k : s.n;
    const size_t lda = a_cols + 3, ldb = b_cols + 1, ldc = s.n + 2;
    twin a(dtype, a_rows * lda, 0), b(dtype, b_rows * ldb, 0), c(dtype, s.m * ldc, 0);
    ct_error err;

    a.fill(&numbers, -1.0, 1.0);
    b.fill(&numbers, -1.0, 1.0);
    c.fill(&numbers, -1.0, 1.0);
    ct_gemm g = {};
    g.dtype = dtype;
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.m = s.m;
    g.n = s.n;
    g.k = s.k;
    g.alpha = 1.5;
    g.beta = beta;
    g.lda = lda;
    g.ldb = ldb;
    g.ldc = ldc;
    ct_gemm on_host = g, on_device = g;
    on_host.a = a.host.data();
    on_host.b = b.host.data();
    on_host.c = c.host.data();
    on_device.a = a.device();
    on_device.b = b.device();
    on_device.c = c.device();
    ct_scratch scratch = {};
    check_ok(ct_device_cpu.gemm(NULL, &scratch, &on_host, &err), err);
    ct_device_cpu.scratch_release(&scratch);
    check_ok(ct_device_cuda.gemm(stream(), &scratch, &on_device, &err), err);

    const double unit = dtype == CT_F64 ? 1.11e-16 : 5.96e-8;
    const double bound = 2 * ((double)s.k + 3) * unit * (1.5 * (double)s.k + 1);
    const std::vector<unsigned char> back = c.download();
    for (size_t i = 0; i < c.n; i++) {
        const double difference =
            get(dtype, back.data(), i) - get(dtype, c.host.data(), i);
        const double rounded =
            dtype == CT_BF16 ? fabs(get(dtype, c.host.data(), i)) / 128 : 0.0;
        CHECK(fabs(difference) <= (i % ldc < s.n ? bound + rounded : 0.0));
    }
}

static void
test_gemm_is_within_its_bound()
{
    const shape shapes[] = {
        {1,  1,  1   },
        {3,  5,  7   },
        {17, 1,  40  },
        {1,  30, 9   },
        {64, 33, 70  },
        {4,  3,  2000}
    };
    for (ct_dtype dtype : {CT_F32, CT_F64, CT_BF16}) {
        for (int transposed = 0; transposed < 4; transposed++) {
            for (const shape &s : shapes) {
                for (double beta : {0.0, 1.0, -0.5}) {
                    check_product(dtype, transposed & 1, transposed & 2, s, beta);
                }
            }
        }
    }
}

static void
test_gemm_rejects_what_the_cpu_rejects()
{
    float x[16] = {};
    ct_error err;
    ct_scratch scratch = {};
    ct_gemm g = {};
    g.dtype = CT_F16;
    g.m = g.n = g.k = g.lda = g.ldb = g.ldc = 2;
    g.a = g.b = g.c = x;
    CHECK(ct_device_cuda.gemm(stream(), &scratch, &g, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got float16") != NULL);
    g.dtype = CT_F32;
    g.ldb = 1;
    CHECK(ct_device_cpu.gemm(NULL, &scratch, &g, &err) == CT_EINVAL);
    CHECK(ct_device_cuda.gemm(stream(), &scratch, &g, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "ldb must be >= 2, got 1") != NULL);
}

#ifdef CT_EMUL
static void
test_more_devices_than_there_is_room_for_are_rejected()
{
    const ct_gemm gemm = {CT_F32, false, false, 1,    1, 1, 1,
                          0,      NULL,  NULL,  NULL, 1, 1, 1};
    ct_error err;
    emul::n_devices = 65;
    CHECK(cudaSetDevice(64) == cudaSuccess);
    CHECK(ct_device_cuda.gemm(NULL, NULL, &gemm, &err) == CT_EDEVICE);
    CHECK(strcmp(err.message, "device 64: at most 64 devices work") == 0);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    emul::n_devices = 1;
}
#endif

int
main()
{
    skip_without_device();
#ifdef CT_EMUL
    const char *folder = CT_EMUL_WHEELS;
    CHECK(ct_dynlib_set_path(&folder, 1, NULL) == CT_OK);
    test_more_devices_than_there_is_room_for_are_rejected();
#endif
    test_gemm_is_within_its_bound();
    test_gemm_rejects_what_the_cpu_rejects();
    return 0;
}
