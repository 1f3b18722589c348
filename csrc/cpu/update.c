/* The update on the CPU, a tile of a span at a time. Mirrors cuda/update.cu.
 *
 * Rules are compiled for float and double, and for bfloat16 in every array, to keep up
 * with memory. */
#include "cpu/quant_search.h"
#include "cpu/tile.h"

#include "core/base/pool.h"
#include "math/compact.h"
#include "math/philox.h"
#include "math/quant.h"

#include <string.h>

/* A constant number of elements lets the compiler unroll the loops. */
#if defined(__GNUC__)
#define CT_ALWAYS_INLINE __attribute__((always_inline)) inline
#else
#define CT_ALWAYS_INLINE inline
#endif

/* ---- stochastic rounding to bfloat16 --------------------------------------------- */

enum {
    BLOCKS = CT_TILE / 8 /* of Philox, of eight elements each */
};

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/dither.h"
#include "cpu/expand.h"

typedef void dither_body(const void *from, uint16_t *restrict to,
                         const ct_rounding *rounding, uint64_t number, size_t n);

static dither_body *const ditherers[CT_ISA_COUNT][CT_F64 + 1] = CT_REAL_BODIES(dither);

/* ---- 8-bit state ----------------------------------------------------------------- */

/* The two look-ups for every element use the gathers of AVX2; GCC does not generate
 * gathers from plain loops. The look-ups then take a third of the time, the update of
 * AdamW's quantized state two thirds. The loops of cpu/body/quant.h do the rest. */

#ifdef CT_HAVE_X86_LEVELS
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t
numbers_avx2(const uint8_t *quantized, const float *map, float absmax, float *to,
             size_t n)
{
    const __m256 scale = _mm256_set1_ps(absmax);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i eight =
            _mm_loadl_epi64((const __m128i *)(const void *)(quantized + i));
        const __m256 number = _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(eight), 4);
        _mm256_storeu_ps(to + i, _mm256_mul_ps(number, scale));
    }
    return i;
}

/* Eight quantized values, each in 32 bits. */
__attribute__((target("avx2"))) static inline __m256i
eight_quantized(const int32_t *keys, const uint32_t *entries)
{
    const __m256i key = _mm256_loadu_si256((const __m256i *)(const void *)keys);
    const __m256i entry =
        _mm256_i32gather_epi32((const int *)(const void *)(entries + QUANT_BUCKETS),
                               _mm256_srai_epi32(key, 16), 4);
    const __m256i above = _mm256_cmpgt_epi32(
        _mm256_and_si256(key, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(entry, 8));
    return _mm256_sub_epi32(_mm256_and_si256(entry, _mm256_set1_epi32(0xff)), above);
}

__attribute__((target("avx2"))) static size_t
quantized_avx2(const int32_t *keys, const uint32_t *entries, uint8_t *quantized,
               size_t n)
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i low = _mm256_packus_epi32(eight_quantized(keys + i, entries),
                                                eight_quantized(keys + i + 8, entries));
        const __m256i high =
            _mm256_packus_epi32(eight_quantized(keys + i + 16, entries),
                                eight_quantized(keys + i + 24, entries));
        const __m256i all =
            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
        _mm256_storeu_si256((__m256i *)(void *)(quantized + i), all);
    }
    return i;
}
#endif

/* to[i] = map[quantized[i]] * absmax; returns the number of elements done, 0 for the
 * base set.
 */
static size_t
gather_numbers(ct_isa isa, const uint8_t *quantized, const float *map, float absmax,
               float *to, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return numbers_avx2(quantized, map, absmax, to, n);
    }
#endif
    (void)isa, (void)quantized, (void)map, (void)absmax, (void)to, (void)n;
    return 0;
}

/* quantized[i] from keys[i], by the entries of a quant_search; returns as above. */
static size_t
gather_quantized(ct_isa isa, const int32_t *keys, const uint32_t *entries,
                 uint8_t *quantized, size_t n)
{
#ifdef CT_HAVE_X86_LEVELS
    if (isa != CT_ISA_BASE) {
        return quantized_avx2(keys, entries, quantized, n);
    }
#endif
    (void)isa, (void)keys, (void)entries, (void)quantized, (void)n;
    return 0;
}

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/quant.h"
#include "cpu/expand.h"

typedef void
dequantise_body(const uint8_t *restrict quantized, const float *restrict map,
                float absmax, void *to, size_t from, size_t n);
typedef float quantise_body(ct_isa isa, const void *from, const quant_search *search,
                            uint8_t *restrict quantized, size_t n);

static dequantise_body *const dequantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(dequantise);
static quantise_body *const quantisers[CT_ISA_COUNT][CT_F64 + 1] =
    CT_REAL_BODIES(quantise);

_Static_assert(CT_TILE % CT_QUANT_BLOCK == 0, "a tile is made of whole blocks");

/* ---- compact state and master weights -------------------------------------------- */

#define CT_ONLY_F32
#define CT_BODY "cpu/body/compact.h"
#include "cpu/expand.h"

typedef void compact_load_body(size_t k, const uint8_t *from, const uint16_t *scales,
                               float *to, size_t n);
typedef void compact_store_body(size_t k, const float *from, uint8_t *to,
                                uint16_t *scales, size_t n);
typedef void
master_load_body(const uint16_t *restrict param, const int8_t *restrict correction,
                 float *restrict to, size_t n);
typedef void master_store_body(const float *restrict from, uint16_t *restrict param,
                               int8_t *restrict correction, size_t n);

static compact_load_body *const compact_loaders[] = CT_F32_BODY(compact_load);
static compact_store_body *const compact_storers[] = CT_F32_BODY(compact_store);
static master_load_body *const master_loaders[] = CT_F32_BODY(master_load);
static master_store_body *const master_storers[] = CT_F32_BODY(master_store);

_Static_assert(CT_TILE % CT_COMPACT_GROUP == 0, "a tile is made of whole groups");
_Static_assert(CT_PARTITION_ALIGN % CT_COMPACT_GROUP == 0, "a batch, too");

/* ---- a tile of a span ------------------------------------------------------------ */

/* A rule works in place on arrays of the type of its computation; others pass through
 * tiles, so that rules are compiled for float and double alone and every mixture of
 * dtypes costs little more than the traffic. */
typedef struct update_tile {
    const ct_update_span *span;
    size_t at, n; /* n elements from `at` on */
    size_t n_states;
    ct_dtype real; /* the rule's arguments */
    ct_isa isa;
    const quant_searches *searches; /* for state that is U8 */
} update_tile;

/* Elements to work on, of the type that the rule computes in. */
typedef struct ct_operands {
    void *grad, *param;
    void *state[CT_RULE_MAX_STATES];
} ct_operands;

typedef struct operand_tiles {
    ct_tile grad, param, state[CT_RULE_MAX_STATES];
} operand_tiles;

static void *
element(const update_tile *s, void *data, ct_dtype dtype)
{
    return (char *)data + s->at * ct_dtype_size(dtype);
}

static size_t
block_at(size_t done, size_t n)
{
    return n - done < CT_QUANT_BLOCK ? n - done : CT_QUANT_BLOCK;
}

/* State k of the elements into a tile; s->at is a multiple of CT_QUANT_BLOCK. */
static void
quant_load(const update_tile *s, ct_tile *tile, size_t k)
{
    const ct_quant quant = s->span->quant[k];
    const uint8_t *quantized = (const uint8_t *)s->span->state[k] + s->at;
    for (size_t done = 0; done < s->n; done += CT_QUANT_BLOCK) {
        const float absmax = quant.absmax[(s->at + done) / CT_QUANT_BLOCK];
        const bool wide = s->real == CT_F64;
        void *to = wide ? (void *)&tile->f64[done] : (void *)&tile->f32[done];
        const size_t size = block_at(done, s->n);
        const size_t part = wide ? 0
                                 : gather_numbers(s->isa, quantized + done, quant.map,
                                                  absmax, to, size);
        dequantisers[s->isa][s->real](quantized + done, quant.map, absmax, to, part,
                                      size);
    }
}

/* And back. The blocks that n elements end in have no others. */
static void
quant_store(const update_tile *s, const ct_tile *tile, size_t k)
{
    uint8_t *quantized = (uint8_t *)s->span->state[k] + s->at;
    float *absmax = s->span->quant[k].absmax + s->at / CT_QUANT_BLOCK;
    for (size_t done = 0; done < s->n; done += CT_QUANT_BLOCK) {
        const void *x = s->real == CT_F64 ? (const void *)&tile->f64[done]
                                          : (const void *)&tile->f32[done];
        *absmax++ = quantisers[s->isa][s->real](s->isa, x, &s->searches->of[k],
                                                quantized + done, block_at(done, s->n));
    }
}

enum {
    IN_CACHE = 1536 /* elements at a time, for further passes: 24 KiB of four arrays */
};

/* An array for the rule: in place, or converted into the tile. */
static void *
borrow(const update_tile *s, void *data, ct_dtype dtype, ct_tile *tile)
{
    if (dtype == s->real) {
        return element(s, data, dtype);
    }
    ct_tile_load(s->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    return tile;
}

/* Writes a changed tile of borrow() back. */
static void
write_back(const update_tile *s, const void *from, void *data, ct_dtype dtype)
{
    if (dtype != s->real) {
        ct_tile_store(s->isa, from, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* Part of a row of row[i] * col[j], from element k of the tile on. */
static void
fill_row(const update_tile *s, ct_tile *tile, size_t k, size_t row, size_t col,
         size_t n)
{
    if (s->real == CT_F64) {
        const double factor = ((const double *)s->span->row)[row];
        const double *cols = (const double *)s->span->col + col;
        for (size_t j = 0; j < n; j++) {
            tile->f64[k + j] = factor * cols[j];
        }
    }
    else {
        const float factor = ((const float *)s->span->row)[row];
        const float *cols = (const float *)s->span->col + col;
        for (size_t j = 0; j < n; j++) {
            tile->f32[k + j] = factor * cols[j];
        }
    }
}

static void *
fill_outer(const update_tile *s, ct_tile *tile)
{
    const size_t rows = s->span->rows, cols = s->span->cols;
    const size_t first = s->span->begin + s->at;
    for (size_t k = 0; k < s->n;) {
        const size_t row = (first + k) / cols, j = (first + k) % cols;
        const size_t left = s->n - k, n = cols - j < left ? cols - j : left;
        fill_row(s, tile, k, row, row / rows * cols + j, n);
        k += n;
    }
    return tile;
}

/* The parameter, which may be the upper part of a master weight. */
static void *
borrow_param(const update_tile *s, ct_tile *tile)
{
    const ct_update_span *span = s->span;
    if (span->correction == NULL) {
        return borrow(s, span->param, span->dtype, tile);
    }
    master_loaders[s->isa]((const uint16_t *)span->param + s->at,
                           span->correction + s->at, tile->f32, s->n);
    return tile;
}

static void *
borrow_state(const update_tile *s, size_t k, ct_tile *tile)
{
    const ct_update_span *span = s->span;
    if (k == 0 && span->row != NULL) {
        return fill_outer(s, tile);
    }
    if (span->state_dtype == CT_U8) {
        quant_load(s, tile, k);
        return tile;
    }
    if (span->state_dtype == CT_I8) {
        compact_loaders[s->isa](k, (const uint8_t *)span->state[k] + s->at,
                                span->quant[k].scales + s->at / CT_COMPACT_GROUP,
                                tile->f32, s->n);
        return tile;
    }
    return borrow(s, span->state[k], span->state_dtype, tile);
}

/* Every array of the rule. */
static ct_operands
borrow_operands(const update_tile *s, operand_tiles *tiles)
{
    const ct_update_span *span = s->span;
    ct_operands at = {
        .grad = borrow(s, span->grad, span->grad_dtype, &tiles->grad),
        .param = borrow_param(s, &tiles->param),
    };
    for (size_t k = 0; k < s->n_states; k++) {
        at.state[k] = borrow_state(s, k, &tiles->state[k]);
    }
    return at;
}

static void
write_states(const update_tile *s, const ct_operands *at)
{
    const ct_update_span *span = s->span;
    for (size_t k = span->row != NULL ? 1 : 0; k < s->n_states; k++) {
        if (span->state_dtype == CT_U8) {
            quant_store(s, at->state[k], k);
        }
        else if (span->state_dtype == CT_I8) {
            compact_storers[s->isa](k, at->state[k], (uint8_t *)span->state[k] + s->at,
                                    span->quant[k].scales + s->at / CT_COMPACT_GROUP,
                                    s->n);
        }
        else {
            write_back(s, at->state[k], span->state[k], span->state_dtype);
        }
    }
}

/* Number of elements to process at a time: a tile if the span needs conversion, else a
 * part of the first-level cache if the elements are used `again`, copied or averaged,
 * else all. */
static size_t
length_at_a_time(const ct_update_span *span, ct_dtype real, size_t n_states, bool again)
{
    const bool direct = span->dtype == real && span->grad_dtype == real &&
                        (n_states == 0 || span->state_dtype == real) &&
                        (span->copy == NULL || span->copy_dtype == real) &&
                        (span->ema == NULL || span->ema_dtype == real) &&
                        span->row == NULL;
    const bool once = !again && span->copy == NULL && span->ema == NULL;
    return !direct ? CT_TILE : once ? SIZE_MAX : IN_CACHE;
}

/* ---- any rule -------------------------------------------------------------------- */

#define CT_NO_F16
#define CT_BODY "cpu/body/update.h"
#include "cpu/expand.h"

typedef void rule_body(const ct_rule_coef *coef, const ct_operands *at, size_t n);

static rule_body *const rules[CT_RULE_COUNT][CT_ISA_COUNT][CT_BF16 + 1] = {
#define CT_RULE(rule, constants, n_states)                                             \
    [CT_RULE_##rule] = CT_BODIES_NO_F16(update_##rule),
#include "math/rules.def"
#undef CT_RULE
};

static void
put(const update_tile *s, const ct_tile *tile, void *data, ct_dtype dtype)
{
    const ct_rounding *rounding = s->span->rounding;
    if (rounding != NULL && dtype == CT_BF16) {
        ditherers[s->isa][s->real](tile, (uint16_t *)data + s->at, rounding,
                                   s->span->first + s->at, s->n);
    }
    else {
        ct_tile_store(s->isa, tile, s->real == CT_F64, dtype, data, s->at, s->n);
    }
}

/* Averages the model's weights as stored: the copy, or without a copy the parameter. */
static void
average(const update_tile *s, double decay)
{
    const ct_update_span *span = s->span;
    const bool copied = span->copy != NULL;
    ct_average_elements(s->isa, s->real, span->ema, span->ema_dtype,
                        copied ? span->copy : span->param,
                        copied ? span->copy_dtype : span->dtype, s->at, s->n, decay);
}

static void
copy(const update_tile *s, const void *param)
{
    const ct_update_span *span = s->span;
    ct_tile tile;
    if (span->copy_dtype == s->real) {
        memcpy(element(s, span->copy, s->real), param, s->n * ct_dtype_size(s->real));
        return;
    }
    memcpy(&tile, param, s->n * ct_dtype_size(s->real));
    put(s, &tile, span->copy, span->copy_dtype);
}

static ct_rule_coef
constants_of(const ct_update *update, const ct_rule_coef *constants)
{
    ct_rule_coef coef = *constants;
    /* Muon's step has a direction for its gradient, and no factor. */
    if (update->rule != CT_RULE_descend) {
        coef.grad_scale = ct_clip_scaled(update->clip, coef.grad_scale);
    }
    return coef;
}

static void
run_tile(const ct_update *update, const update_tile *s)
{
    const ct_update_span *span = s->span;
    operand_tiles tiles;
    const ct_operands at = borrow_operands(s, &tiles);
    const ct_rule_coef coef = constants_of(
        update, span->settled != NULL ? span->settled : &update->coefs[span->coef]);
    rules[update->rule][s->isa][s->real](&coef, &at, s->n);
    write_states(s, &at);
    if (span->correction != NULL) {
        master_storers[s->isa](at.param, (uint16_t *)span->param + s->at,
                               span->correction + s->at, s->n);
    }
    else if (span->dtype != s->real) {
        put(s, at.param, span->param, span->dtype);
    }
    if (span->copy != NULL) {
        copy(s, at.param);
    }
    if (span->ema != NULL) {
        average(s, update->ema_decay);
    }
    if (update->zero_grads) {
        memset(element(s, span->grad, span->grad_dtype), 0,
               s->n * ct_dtype_size(span->grad_dtype));
    }
}

/* The dtype of a rule's operands: F32, F64, or BF16 throughout. */
static ct_dtype
choose_type(const ct_update_span *span, size_t n_states)
{
    const bool alike = span->grad_dtype == span->dtype &&
                       (n_states == 0 || span->state_dtype == span->dtype);
    const bool alone = span->copy == NULL && span->ema == NULL &&
                       span->rounding == NULL && span->row == NULL;
    return span->dtype == CT_BF16 && alike && alone ? CT_BF16 : ct_update_real(span);
}

typedef struct update_job {
    const ct_update *update;
    ct_isa isa;
    size_t n_states;
    ct_partition partition;
    quant_searches searches; /* for the maps of the first quantized state */
    double *partial;         /* of measured rules: CT_MEASURES for each piece */
} update_job;

/* No batch where there is no span. */
static ct_status
job_init(update_job *job, const ct_update *update, ct_error *err)
{
    job->update = update;
    job->n_states = ct_rule_n_states(update->rule);
    job->partition.n_batches = 0;
    if (update->n_spans != 0) {
        ct_partition_init(&job->partition, &update->spans[0].n, sizeof update->spans[0],
                          update->n_spans);
    }
    return ct_isa_get(&job->isa, err);
}

/* The first tile of a piece comes with n = 0; false behind the last. */
static bool
next_tile(update_tile *s, const ct_piece *piece, size_t length)
{
    s->at += s->n;
    const size_t left = piece->offset + piece->n - s->at;
    s->n = left < length ? left : length;
    return left != 0;
}

_Static_assert(CT_PARTITION_ALIGN % CT_QUANT_BLOCK == 0, "no block is in two batches");

static bool
is_quantized(const update_job *job, const ct_update_span *span)
{
    return job->n_states != 0 && span->state_dtype == CT_U8;
}

/* The shared tables or, for a span with other maps, `own`. */
static const quant_searches *
searches_for(const update_job *job, const ct_update_span *span, quant_searches *own)
{
    if (!is_quantized(job, span)) {
        return NULL;
    }
    if (quant_fits(&job->searches, span, job->n_states)) {
        return &job->searches;
    }
    quant_prepare(own, span, job->n_states);
    return own;
}

static void
prepare_searches(update_job *job)
{
    const ct_update *update = job->update;
    quant_searches_init(&job->searches);
    size_t i = 0;
    while (i < update->n_spans &&
           !(is_quantized(job, &update->spans[i]) && update->spans[i].n != 0)) {
        i++;
    }
    if (i < update->n_spans) {
        quant_prepare(&job->searches, &update->spans[i], job->n_states);
    }
}

static void
run_batch(void *arg, size_t batch)
{
    const update_job *job = arg;
    const bool again = job->update->zero_grads;
    ct_piece piece = ct_partition_start(&job->partition, batch);
    quant_searches own;
    quant_searches_init(&own);
    while (ct_partition_next(&job->partition, batch, &piece)) {
        const ct_update_span *span = &job->update->spans[piece.span];
        update_tile s = {
            .span = span,
            .at = piece.offset,
            .n_states = job->n_states,
            .real = choose_type(span, job->n_states),
            .isa = job->isa,
            .searches = searches_for(job, span, &own),
        };
        const size_t length = length_at_a_time(span, s.real, job->n_states, again);
        while (next_tile(&s, &piece, length)) {
            run_tile(job->update, &s);
        }
    }
}

ct_status
ct_cpu_update(void *stream, ct_update_table *table, const ct_update *update,
              ct_error *err)
{
    (void)stream; /* the CPU is done when the call returns */
    (void)table;
    update_job job;
    ct_status status = job_init(&job, update, err);
    if (status == CT_OK) {
        status = ct_update_check(update, err);
    }
    if (status == CT_OK && !ct_clip_skips(update->clip)) {
        prepare_searches(&job);
        ct_pool_run(run_batch, &job, job.partition.n_batches);
    }
    return status;
}

ct_status
ct_cpu_table_reserve(ct_update_table *table, size_t n, ct_error *err)
{
    (void)table, (void)n, (void)err;
    return CT_OK;
}

void
ct_cpu_table_release(ct_update_table *table)
{
    (void)table;
}

/* ---- measured rules: sums over a parameter, then its constants ------------------- */

/* Element k of a piece is added to lane k % LANES, the lanes of a piece are folded in
 * index order, then the pieces of a span are: neither the instruction set nor the
 * number of threads changes a bit. */
enum {
    LANES = 32
};

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/measure.h"
#include "cpu/expand.h"

typedef void
measure_body(const ct_rule_coef *coef, const ct_operands *at, size_t n, double *lanes);

static measure_body *const measures[CT_RULE_COUNT][CT_ISA_COUNT][CT_F64 + 1] = {
#define CT_MEASURED(rule, constants, n_states)                                         \
    [CT_RULE_##rule] = CT_REAL_BODIES(measure_##rule),
#include "math/measured.def"
#undef CT_MEASURED
};

static void
measure_tile(const ct_update *update, const update_tile *s, double *lanes)
{
    operand_tiles tiles;
    const ct_operands at = borrow_operands(s, &tiles);
    const ct_rule_coef coef = constants_of(update, &update->coefs[s->span->coef]);
    measures[update->rule][s->isa][s->real](&coef, &at, s->n, lanes);
    write_states(s, &at);
}

static void
measure_piece(const void *arg, const ct_piece *piece)
{
    const update_job *job = arg;
    const ct_update_span *span = &job->update->spans[piece->span];
    double *sums = job->partial + CT_MEASURES * piece->number;
    double lanes[CT_MEASURES * LANES] = {0.0};
    update_tile s = {
        .span = span,
        .at = piece->offset,
        .n_states = job->n_states,
        .real = ct_update_real(span),
        .isa = job->isa,
    };
    const size_t length = length_at_a_time(span, s.real, job->n_states, false);
    while (next_tile(&s, piece, length)) {
        measure_tile(job->update, &s, lanes);
    }
    for (size_t m = 0; m < CT_MEASURES; m++) {
        sums[m] = 0.0;
        for (size_t k = 0; k < LANES; k++) {
            sums[m] += lanes[m * LANES + k];
        }
    }
}

ct_status
ct_cpu_measure(void *stream, ct_scratch *scratch, const ct_update *update, double *sums,
               ct_error *err)
{
    (void)stream;
    update_job job;
    ct_status status = job_init(&job, update, err);
    if (status == CT_OK) {
        status = ct_measure_check(update, err);
    }
    const size_t n_partial = CT_MEASURES * (update->n_spans + job.partition.n_batches);
    if (status == CT_OK) {
        status = ct_cpu_scratch_grow(scratch, n_partial * sizeof(double), err);
    }
    if (status == CT_OK && ct_clip_skips(update->clip)) {
        memset(sums, 0, CT_MEASURES * update->n_spans * sizeof *sums);
    }
    else if (status == CT_OK) {
        job.partial = scratch->data;
        ct_partition_run(&job.partition, measure_piece, &job);
        ct_partition_fold(&job.partition, job.partial, CT_MEASURES, update->n_spans,
                          CT_NORM_TWO, sums);
    }
    return status;
}

/* The sums of an empty parameter are 0; the settled constants are never used. */
ct_status
ct_cpu_settle(void *stream, const ct_update *update, const double *sums,
              ct_rule_coef *settled, ct_error *err)
{
    (void)stream;
    ct_status status = ct_measure_check(update, err);
    for (size_t i = 0; status == CT_OK && i < update->n_spans; i++) {
        const ct_update_span *span = &update->spans[i];
        settled[i] = update->coefs[span->coef];
        ct_rule_settle(update->rule, &settled[i], sums + CT_MEASURES * i,
                       ct_update_whole(span));
        if (!ct_clip_skips(update->clip)) {
            ct_update_keep_rms(span->rms, ct_update_real(span), &settled[i]);
        }
    }
    return status;
}
