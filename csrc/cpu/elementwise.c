/* Kernels that take elements one by one, on the CPU: copies and conversions, zeros,
 * scaling, averages and sums. Mirrors cuda/elementwise.cu. */
#include "cpu/tile.h"

#include "core/comm/reduce.h"
#include "math/ema.h"
#include "math/scale.h"

#include <math.h>
#include <string.h>

/* ---- tiles: between the stored dtype and the type of the computation ------------- */

/* For float16 the processor has instructions with the same results as math/half.h; the
 * compiler does not find them behind the arithmetic. They halve the time of an update
 * of float16. */
#define CT_BODY "cpu/body/tile.h"
#include "cpu/expand.h"

typedef void
widen_body(const void *data, size_t from, size_t n, ct_tile *to, bool wide);
typedef void
narrow_body(const ct_tile *from, bool wide, void *data, size_t to, size_t n);

static widen_body *const wideners[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(widen);
static narrow_body *const narrowers[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(narrow);

#ifdef CT_HAVE_X86_LEVELS
#include <immintrin.h>

__attribute__((target("avx,f16c"))) static void
widen_f16_f16c(const uint16_t *from, size_t n, float *to)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
    }
    for (; i < n; i++) {
        to[i] = ct_f32_from_f16(from[i]);
    }
}

__attribute__((target("avx,f16c"))) static void
narrow_f16_f16c(const float *from, size_t n, uint16_t *to)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i half =
            _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(to + i), half);
    }
    for (; i < n; i++) {
        to[i] = ct_f16_from_f32(from[i]);
    }
}

static bool
has_f16c(ct_isa isa, ct_dtype dtype, bool wide)
{
    return isa != CT_ISA_BASE && dtype == CT_F16 && !wide;
}
#endif

void
ct_tile_load(ct_isa isa, ct_tile *tile, bool wide, ct_dtype dtype, const void *data,
             size_t from, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (has_f16c(isa, dtype, wide)) {
        widen_f16_f16c((const uint16_t *)data + from, n, tile->f32);
        return;
    }
#endif
    wideners[isa][dtype](data, from, n, tile, wide);
}

void
ct_tile_store(ct_isa isa, const ct_tile *tile, bool wide, ct_dtype dtype, void *data,
              size_t to, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (has_f16c(isa, dtype, wide)) {
        narrow_f16_f16c(tile->f32, n, (uint16_t *)data + to);
        return;
    }
#endif
    narrowers[isa][dtype](tile, wide, data, to, n);
}

/* ---- one pass over the pool ------------------------------------------------------ */

/* The operands of any kernel below. */
typedef struct pass {
    const ct_span *to, *from;
    double factor, limit;
    ct_isa isa;
} pass;

/* Runs fn over the pieces of job->to, unless a check has failed with `status`. */
static ct_status
run(pass *job, size_t n_spans, ct_piece_fn *fn, ct_status status, ct_error *err)
{
    if (status == CT_OK && n_spans != 0) {
        status = ct_isa_get(&job->isa, err);
    }
    if (status == CT_OK) {
        ct_for_pieces(job->to, n_spans, fn, job);
    }
    return status;
}

/* ---- copies and conversions ------------------------------------------------------ */

/* A conversion goes through a tile of floats, exact for every bf16 or fp16 value, or
 * of doubles if either side is F64: two small loops for each dtype instead of a loop
 * for each pair of dtypes. */
static void
convert(const pass *job, const ct_piece *piece)
{
    const ct_span *to = &job->to[piece->span];
    const ct_span *from = &job->from[piece->span];
    const bool wide = to->dtype == CT_F64 || from->dtype == CT_F64;
    ct_tile t;
    for (size_t done = 0; done < piece->n; done += CT_TILE) {
        const size_t at = piece->offset + done;
        const size_t n = piece->n - done < CT_TILE ? piece->n - done : CT_TILE;
        ct_tile_load(job->isa, &t, wide, from->dtype, from->data, at, n);
        ct_tile_store(job->isa, &t, wide, to->dtype, to->data, at, n);
    }
}

static void
copy(const void *arg, const ct_piece *piece)
{
    const pass *job = arg;
    const ct_span *to = &job->to[piece->span];
    const ct_span *from = &job->from[piece->span];
    if (to->dtype != from->dtype) {
        convert(job, piece);
        return;
    }
    const size_t size = ct_dtype_size(to->dtype);
    memcpy((char *)to->data + piece->offset * size,
           (const char *)from->data + piece->offset * size, piece->n * size);
}

static ct_status
check_pair(size_t i, const ct_span *to, const ct_span *from, ct_error *err)
{
    if (to->n != from->n) {
        return ct_fail(err, CT_EINVAL,
                       "copy: span %zu has %zu elements to fill from %zu", i, to->n,
                       from->n);
    }
    if (to->dtype == from->dtype) {
        return CT_OK;
    }
    ct_status status = ct_check_float("copy", i, to->dtype, err);
    return status == CT_OK ? ct_check_float("copy", i, from->dtype, err) : status;
}

ct_status
ct_cpu_copy(void *stream, const ct_span *to, const ct_span *from, size_t n_spans,
            ct_error *err)
{
    (void)stream;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = check_pair(i, &to[i], &from[i], err);
    }
    return run(&(pass){.to = to, .from = from}, n_spans, copy, status, err);
}

/* ---- zeros: memset picks its own instruction set --------------------------------- */

static void
zero(const void *spans, const ct_piece *piece)
{
    const ct_span *span = (const ct_span *)spans + piece->span;
    const size_t size = ct_dtype_size(span->dtype);
    memset((char *)span->data + piece->offset * size, 0, piece->n * size);
}

ct_status
ct_cpu_zero(void *stream, const ct_span *spans, size_t n_spans, ct_error *err)
{
    (void)stream;
    (void)err;
    ct_for_pieces(spans, n_spans, zero, spans);
    return CT_OK;
}

/* ---- a factor, within a limit ---------------------------------------------------- */

#define CT_BODY "cpu/body/scale.h"
#include "cpu/expand.h"

typedef void scale_body(void *data, size_t from, size_t n, double factor, double limit);

static scale_body *const scalers[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(scale);

static void
scale(const void *arg, const ct_piece *piece)
{
    const pass *job = arg;
    const ct_span *span = &job->to[piece->span];
    scalers[job->isa][span->dtype](span->data, piece->offset, piece->n, job->factor,
                                   job->limit);
}

ct_status
ct_cpu_scale(void *stream, double factor, double limit, const ct_span *spans,
             size_t n_spans, ct_error *err)
{
    (void)stream;
    pass job = {.to = spans, .factor = factor, .limit = limit};
    return run(&job, n_spans, scale, ct_check_floats("scale", spans, n_spans, err),
               err);
}

/* ---- exponential moving averages ------------------------------------------------- */

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/average.h"
#include "cpu/expand.h"

typedef void average_body(void *average, const void *value, double decay, size_t n);

static average_body *const averagers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(average);

void
ct_average_elements(ct_isa isa, ct_dtype real, void *average, ct_dtype average_dtype,
                    const void *value, ct_dtype value_dtype, size_t at, size_t n,
                    double decay)
{
    const bool wide = real == CT_F64;
    ct_tile a, x;
    void *to = &a;
    const void *from = &x;
    if (average_dtype == real) {
        to = (char *)average + at * ct_dtype_size(real);
    }
    else {
        ct_tile_load(isa, &a, wide, average_dtype, average, at, n);
    }
    if (value_dtype == real) {
        from = (const char *)value + at * ct_dtype_size(real);
    }
    else {
        ct_tile_load(isa, &x, wide, value_dtype, value, at, n);
    }
    averagers[isa][real](to, from, decay, n);
    if (average_dtype != real) {
        ct_tile_store(isa, &a, wide, average_dtype, average, at, n);
    }
}

static void
average_piece(const void *arg, const ct_piece *piece)
{
    const pass *job = arg;
    const ct_span *average = &job->to[piece->span];
    const ct_span *value = &job->from[piece->span];
    const ct_dtype real = value->dtype == CT_F64 ? CT_F64 : CT_F32;
    for (size_t done = 0; done < piece->n; done += CT_TILE) {
        const size_t left = piece->n - done;
        ct_average_elements(job->isa, real, average->data, average->dtype, value->data,
                            value->dtype, piece->offset + done,
                            left < CT_TILE ? left : CT_TILE, job->factor);
    }
}

ct_status
ct_cpu_average(void *stream, const ct_span *averages, const ct_span *values,
               size_t n_spans, double decay, ct_error *err)
{
    (void)stream;
    pass job = {.to = averages, .from = values, .factor = decay};
    return run(&job, n_spans, average_piece,
               ct_check_pairs("average", averages, values, n_spans, err), err);
}

/* ---- sums of pairs --------------------------------------------------------------- */

static void
add_tile(const ct_span *sum, const void *values)
{
    const void *const rows[2] = {sum->data, values};
    ct_reduce(sum->data, rows, 2, sum->n, sum->dtype, CT_REDUCE_SUM);
}

/* Values of another dtype, or with a factor, are made what is added a tile at a time.
 */
static ct_status
add_converted(const ct_span *sums, const ct_span *values, double factor, ct_error *err)
{
    ct_tile tile;
    ct_status status = CT_OK;
    for (size_t at = 0; status == CT_OK && at < sums->n; at += CT_TILE) {
        const size_t n = sums->n - at < CT_TILE ? sums->n - at : CT_TILE;
        const ct_span from = ct_span_part(*values, at, n);
        const ct_span sum = ct_span_part(*sums, at, n);
        const ct_span converted = {&tile, n, sum.dtype};
        status = ct_cpu_copy(NULL, &converted, &from, 1, err);
        if (status == CT_OK && factor != 1.0) {
            status = ct_cpu_scale(NULL, factor, (double)INFINITY, &converted, 1, err);
        }
        if (status == CT_OK) {
            add_tile(&sum, &tile);
        }
    }
    return status;
}

ct_status
ct_cpu_add(void *stream, const ct_span *sums, const ct_span *values, size_t n_spans,
           double factor, ct_error *err)
{
    (void)stream;
    ct_status status = ct_check_pairs("add", sums, values, n_spans, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        if (sums[i].dtype == values[i].dtype && factor == 1.0) {
            add_tile(&sums[i], values[i].data);
        }
        else {
            status = add_converted(&sums[i], &values[i], factor, err);
        }
    }
    return status;
}
