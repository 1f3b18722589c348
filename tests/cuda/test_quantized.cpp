/* Quantized values for other ranks are the CPU's, and so is what is remembered and
 * decoded: equality is memcmp. */
#include "cuda_test.h"
#include "math/quantized.h"

/* The arrays of one encoding on both sides. */
struct quantized_fixture {
    twin values, residual, quantized, scales;
    int bits;

    quantized_fixture(random_numbers *numbers, ct_dtype dtype, size_t n,
                      int bits_of_value)
        : values(dtype, n, 0), residual(CT_F32, n, 0),
          quantized(CT_I8, ct_quantized_bytes(n, bits_of_value), 0),
          scales(CT_F32, ct_quantized_blocks(n), 0), bits(bits_of_value)
    {
        values.fill(numbers, -3.0, 3.0);
        residual.fill(numbers, -0.01, 0.01);
        if (n > 600) {
            put(dtype, values.host.data(), 300, NAN); /* the second block */
            for (size_t i = 512; i < 600; i++) {
                put(dtype, values.host.data(), i, 0.0);
                put(CT_F32, residual.host.data(), i, 0.0);
            }
            values.upload();
            residual.upload();
        }
    }

    ct_encoding encoding(bool on_host)
    {
        const auto at = [=](twin &x) { return on_host ? x.host.data() : x.device(); };
        return ct_encoding{
            {at(values), values.n, values.dtype},
            (float *)(void *)at(residual),
            (int8_t *)at(quantized),
            (float *)(void *)at(scales),
            bits
        };
    }

    ct_decoding decoding(bool on_host)
    {
        const ct_encoding e = encoding(on_host);
        return ct_decoding{e.values, e.quantized, e.scales, 1, 0, 0.25f, bits};
    }
};

static void
check_length(random_numbers *numbers, ct_dtype dtype, size_t n, int bits)
{
    quantized_fixture f(numbers, dtype, n, bits);
    const ct_encoding host = f.encoding(true), device = f.encoding(false);
    const ct_decoding back = f.decoding(true), device_back = f.decoding(false);
    ct_error err;
    check_ok(ct_device_cpu.encode(NULL, &host, &err), err);
    check_ok(ct_device_cuda.encode(stream(), &device, &err), err);
    CHECK(f.quantized.agree() && f.scales.agree() && f.residual.agree());
    check_ok(ct_device_cpu.decode(NULL, &back, &err), err);
    check_ok(ct_device_cuda.decode(stream(), &device_back, &err), err);
    CHECK(f.values.agree());
    CHECK(n <= 600 || isnan(get(dtype, f.values.host.data(), 400)));
    CHECK(n <= 600 || !isnan(get(dtype, f.values.host.data(), 100)));
}

int
main()
{
    skip_without_device();
    random_numbers numbers = {42};
    for (size_t n :
         {(size_t)0, (size_t)1, (size_t)255, (size_t)256, (size_t)700, (size_t)2049}) {
        for (ct_dtype dtype : float_dtypes) {
            check_length(&numbers, dtype, n, 8);
            check_length(&numbers, dtype, n, 4);
        }
    }
    return 0;
}
