/* The CPU as a device with one stream, which all that is enqueued is to go to. */
#ifndef CT_STREAMED_H
#define CT_STREAMED_H

#include "core/ct_device.h"
#include "ct_test.h"

static char ct_the_stream;

static ct_status
streamed_norm(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
              size_t n, double *sum, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.norm(NULL, scratch, p, spans, n, sum, err);
}

static ct_status
streamed_norms(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
               size_t n, double *sums, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.norms(NULL, scratch, p, spans, n, sums, err);
}

static ct_status
streamed_update(void *stream, const ct_update *update, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.update(NULL, update, err);
}

static ct_status
streamed_average(void *stream, const ct_span *averages, const ct_span *values, size_t n,
                 double decay, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.average(NULL, averages, values, n, decay, err);
}

static ct_status
streamed_measure(void *stream, ct_scratch *scratch, const ct_update *update,
                 double *sums, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.measure(NULL, scratch, update, sums, err);
}

static ct_status
streamed_settle(void *stream, const ct_update *update, const double *sums,
                ct_rule_coef *settled, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.settle(NULL, update, sums, settled, err);
}

static ct_status
streamed_factor_sums(void *stream, ct_scratch *scratch, const ct_factored *list,
                     size_t n, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.factor_sums(NULL, scratch, list, n, err);
}

static ct_status
streamed_factor(void *stream, const ct_factored *list, size_t n, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.factor(NULL, list, n, err);
}

static ct_status
streamed_scale(void *stream, double factor, double limit, const ct_span *spans,
               size_t n, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.scale(NULL, factor, limit, spans, n, err);
}

static ct_status
streamed_zero(void *stream, const ct_span *spans, size_t n, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.zero(NULL, spans, n, err);
}

static ct_status
streamed_copy(void *stream, const ct_span *to, const ct_span *from, size_t n,
              ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.copy(NULL, to, from, n, err);
}

static ct_status
streamed_add(void *stream, const ct_span *sums, const ct_span *values, size_t n,
             double factor, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.add(NULL, sums, values, n, factor, err);
}

static ct_status
streamed_gemm(void *stream, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.gemm(NULL, scratch, gemm, err);
}

static ct_status
streamed_encode(void *stream, const ct_encoding *encoding, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.encode(NULL, encoding, err);
}

static ct_status
streamed_decode(void *stream, const ct_decoding *decoding, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.decode(NULL, decoding, err);
}

static ct_status
streamed_transfer(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.transfer(NULL, to, from, bytes, err);
}

static ct_status
streamed_read(void *stream, const double *value, double *host, ct_error *err)
{
    CHECK(stream == &ct_the_stream);
    return ct_device_cpu.read(NULL, value, host, err);
}

static ct_status
streamed_grow(ct_scratch *scratch, size_t bytes, ct_error *err)
{
    return ct_device_cpu.scratch_grow(scratch, bytes, err);
}

static void
streamed_release(ct_scratch *scratch)
{
    ct_device_cpu.scratch_release(scratch);
}

static const ct_device ct_device_streamed = {
    .name = "streamed",
    .norm = streamed_norm,
    .norms = streamed_norms,
    .update = streamed_update,
    .average = streamed_average,
    .measure = streamed_measure,
    .settle = streamed_settle,
    .factor_sums = streamed_factor_sums,
    .factor = streamed_factor,
    .scale = streamed_scale,
    .zero = streamed_zero,
    .copy = streamed_copy,
    .add = streamed_add,
    .gemm = streamed_gemm,
    .encode = streamed_encode,
    .decode = streamed_decode,
    .transfer = streamed_transfer,
    .read = streamed_read,
    .scratch_grow = streamed_grow,
    .scratch_release = streamed_release,
    .dlpack = 1, /* kDLCPU */
};

#endif
