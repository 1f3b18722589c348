/* The CPU as a device with one stream, which all that is enqueued is to go to. */
#ifndef CT_STREAMED_H
#define CT_STREAMED_H

#include "core/device/device.h"
#include "ct_test.h"

static char ct_the_stream;

/* A function of the CPU's, which is to be given the stream. */
#define STREAMED(name, parameters, arguments)                                          \
    static ct_status streamed_##name parameters                                        \
    {                                                                                  \
        CHECK(stream == &ct_the_stream);                                               \
        return ct_device_cpu.name arguments;                                           \
    }

STREAMED(norm,
         (void *stream, ct_scratch *scratch, double p, const ct_span *spans, size_t n,
          double *sum, ct_error *err),
         (NULL, scratch, p, spans, n, sum, err))
STREAMED(norms,
         (void *stream, ct_scratch *scratch, double p, const ct_span *spans, size_t n,
          double *sums, ct_error *err),
         (NULL, scratch, p, spans, n, sums, err))
STREAMED(clip,
         (void *stream, ct_scratch *scratch, const ct_clip_request *request,
          const ct_span *spans, size_t n, ct_clip_outcome *outcome, ct_error *err),
         (NULL, scratch, request, spans, n, outcome, err))
STREAMED(decide,
         (void *stream, const ct_clip_request *request, const double *sum,
          const double *all, ct_clip_outcome *outcome, ct_error *err),
         (NULL, request, sum, all, outcome, err))
STREAMED(update,
         (void *stream, ct_update_table *table, const ct_update *update, ct_error *err),
         (NULL, table, update, err))
STREAMED(average,
         (void *stream, const ct_span *averages, const ct_span *values, size_t n,
          double decay, ct_error *err),
         (NULL, averages, values, n, decay, err))
STREAMED(measure,
         (void *stream, ct_scratch *scratch, const ct_update *update, double *sums,
          ct_error *err),
         (NULL, scratch, update, sums, err))
STREAMED(settle,
         (void *stream, const ct_update *update, const double *sums,
          ct_rule_coef *settled, ct_error *err),
         (NULL, update, sums, settled, err))
STREAMED(factor_sums,
         (void *stream, ct_scratch *scratch, const ct_factored *list, size_t n,
          ct_error *err),
         (NULL, scratch, list, n, err))
STREAMED(factor, (void *stream, const ct_factored *list, size_t n, ct_error *err),
         (NULL, list, n, err))
STREAMED(scale,
         (void *stream, double factor, double limit, const ct_span *spans, size_t n,
          ct_error *err),
         (NULL, factor, limit, spans, n, err))
STREAMED(zero, (void *stream, const ct_span *spans, size_t n, ct_error *err),
         (NULL, spans, n, err))
STREAMED(copy,
         (void *stream, const ct_span *to, const ct_span *from, size_t n,
          ct_error *err),
         (NULL, to, from, n, err))
STREAMED(add,
         (void *stream, const ct_span *sums, const ct_span *values, size_t n,
          double factor, ct_error *err),
         (NULL, sums, values, n, factor, err))
STREAMED(gemm, (void *stream, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err),
         (NULL, scratch, gemm, err))
STREAMED(encode, (void *stream, const ct_encoding *encoding, ct_error *err),
         (NULL, encoding, err))
STREAMED(decode, (void *stream, const ct_decoding *decoding, ct_error *err),
         (NULL, decoding, err))
STREAMED(transfer,
         (void *stream, void *to, const void *from, size_t bytes, ct_error *err),
         (NULL, to, from, bytes, err))
STREAMED(read, (void *stream, const double *value, double *host, ct_error *err),
         (NULL, value, host, err))

STREAMED(read_begin,
         (void *stream, ct_pending_read *read, const void *values, size_t bytes,
          ct_error *err),
         (NULL, read, values, bytes, err))

static ct_status
streamed_read_end(const ct_pending_read *read, void *values, ct_error *err)
{
    return ct_device_cpu.read_end(read, values, err);
}

static void
streamed_read_release(ct_pending_read *read)
{
    ct_device_cpu.read_release(read);
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

static ct_status
streamed_table_reserve(ct_update_table *table, size_t n, ct_error *err)
{
    return ct_device_cpu.table_reserve(table, n, err);
}

static void
streamed_table_release(ct_update_table *table)
{
    ct_device_cpu.table_release(table);
}

static const ct_device ct_device_streamed = {
    .name = "streamed",
    .norm = streamed_norm,
    .norms = streamed_norms,
    .clip = streamed_clip,
    .decide = streamed_decide,
    .update = streamed_update,
    .table_reserve = streamed_table_reserve,
    .table_release = streamed_table_release,
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
    .read_begin = streamed_read_begin,
    .read_end = streamed_read_end,
    .read_release = streamed_read_release,
    .scratch_grow = streamed_grow,
    .scratch_release = streamed_release,
    .dlpack = 1, /* kDLCPU */
};

#endif
