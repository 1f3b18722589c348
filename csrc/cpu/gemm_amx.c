/* Both factors are packed once. A batch is a row of blocks of the result: their sums go
 * through k in stretches whose panels stay in the first-level cache, and are scaled and
 * rounded from there. An element is one sum over k in rising order, so the number of
 * threads changes no bit. */
#include "cpu/gemm_amx.h"

#include "cpu/amx.h"

#ifdef CT_HAVE_AMX

/* Every processor with AMX has these. */
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,f16c,fma,bmi,bmi2")
#pragma GCC target("prefer-vector-width=512")

#include "core/ct_pool.h"
#include "math/ct_half_math.h"

#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

enum {
    HALF = CT_BLOCK / 2, /* rows or pairs of a half panel */
    STRETCH = 8,         /* panels: half of the first-level cache */
    ROW = 8              /* blocks of a batch */
};

/* A factor as rows of the result and k: element (row, k) lies at row + k * ld where
 * rows are adjacent, else at row * ld + k. */
typedef struct factor {
    const uint16_t *data;
    size_t ld;
    size_t n_rows;
    bool rows_adjacent;
    bool pairs_first; /* packed as b is, else as a */
    uint16_t *packed;
} factor;

typedef struct amx_job {
    const ct_gemm *gemm;
    factor a, b;
    size_t n_panels, a_blocks, b_blocks;
} amx_job;

static size_t
count(size_t n, size_t size)
{
    return (n + size - 1) / size;
}

static size_t
least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- packing -----------------------------------------------------------------------
 */

/* Up to 32 elements; a whole line's length is known to the compiler. */
static void
copy_line(uint16_t *restrict to, const uint16_t *restrict from, size_t n)
{
    if (n == CT_BLOCK) {
        memcpy(to, from, CT_BLOCK * sizeof *to);
    }
    else {
        memcpy(to, from, n * sizeof *to);
    }
}

/* `n` lines of `length` elements, ld apart, in a square filled up with zeros. */
static void
load_square(uint16_t *restrict square, const uint16_t *restrict from, size_t ld,
            size_t n, size_t length)
{
    if (n < CT_BLOCK || length < CT_BLOCK) {
        memset(square, 0, CT_PANEL * sizeof *square);
    }
    for (size_t i = 0; i < n; i++) {
        copy_line(square + i * CT_BLOCK, from + i * ld, length);
    }
}

/* square[k][row] to pairs[half][k / 2][row][k % 2]. */
static void
interleave(uint32_t *restrict pairs, const uint16_t *restrict square)
{
    for (size_t half = 0; half < 2; half++) {
        for (size_t p = 0; p < HALF; p++) {
            const uint16_t *const even = square + 2 * p * CT_BLOCK + half * HALF;
            const uint16_t *const odd = even + CT_BLOCK;
            uint32_t *const line = pairs + (half * HALF + p) * HALF;
            for (size_t r = 0; r < HALF; r++) {
                line[r] = even[r] | (uint32_t)odd[r] << 16;
            }
        }
    }
}

/* 16 x 16 pairs. At distances of 1, 2, 4 and 8, lines i and i + d swap the d lanes next
 * to each other. */
static void
transpose_half(uint32_t *restrict to, const uint32_t *restrict from)
{
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i line[HALF];
    for (size_t i = 0; i < HALF; i++) {
        line[i] = _mm512_loadu_si512(from + i * HALF);
    }
#pragma GCC unroll 4
    for (int d = 1; d < HALF; d *= 2) {
        const __m512i step = _mm512_set1_epi32(d), other = _mm512_set1_epi32(HALF);
        const __mmask16 odd = _mm512_test_epi32_mask(lane, step);
        const __m512i of_first =
            _mm512_mask_add_epi32(lane, odd, lane, _mm512_sub_epi32(other, step));
        const __m512i of_second =
            _mm512_add_epi32(lane, _mm512_mask_blend_epi32(odd, step, other));
#pragma GCC unroll 16
        for (int i = 0; i < HALF; i++) {
            if ((i & d) == 0) {
                const __m512i first = line[i], second = line[i + d];
                line[i] = _mm512_permutex2var_epi32(first, of_first, second);
                line[i + d] = _mm512_permutex2var_epi32(first, of_second, second);
            }
        }
    }
    for (size_t i = 0; i < HALF; i++) {
        _mm512_storeu_si512(to + i * HALF, line[i]);
    }
}

/* Each half between [row][pair] and [pair][row]: HALF and HALF are equal. */
static void
transpose_pairs(uint32_t *restrict to, const uint32_t *restrict from)
{
    transpose_half(to, from);
    transpose_half(to + HALF * HALF, from + HALF * HALF);
}

static void
pack_panel(const factor *f, uint16_t *to, size_t row, size_t k, size_t depth)
{
    _Alignas(64) uint16_t square[CT_PANEL];
    _Alignas(64) uint32_t turned[CT_PANEL / 2];
    uint32_t *const pairs = (uint32_t *)(void *)to;
    const size_t rows = least(f->n_rows - row, CT_BLOCK);
    if (f->rows_adjacent) {
        load_square(square, f->data + k * f->ld + row, f->ld, depth, rows);
        interleave(f->pairs_first ? pairs : turned, square);
    }
    else {
        load_square(f->pairs_first ? (uint16_t *)(void *)turned : to,
                    f->data + row * f->ld + k, f->ld, rows, depth);
    }
    if (f->rows_adjacent != f->pairs_first) {
        transpose_pairs(pairs, turned);
    }
}

static void
pack_batch(void *arg, size_t batch)
{
    const amx_job *job = arg;
    const bool is_a = batch < job->a_blocks;
    const factor *f = is_a ? &job->a : &job->b;
    const size_t block = is_a ? batch : batch - job->a_blocks;
    const size_t k_end = job->gemm->k;
    for (size_t panel = 0; panel < job->n_panels; panel++) {
        const size_t k = panel * CT_BLOCK;
        uint16_t *to = f->packed + (block * job->n_panels + panel) * CT_PANEL;
        pack_panel(f, to, block * CT_BLOCK, k, least(k_end - k, CT_BLOCK));
    }
}

/* ---- multiplying -------------------------------------------------------------------
 */

/* C's block from the sums, in `block` as well. */
static void
store_block(const ct_gemm *g, const float *restrict sums, size_t row, size_t col,
            uint16_t *restrict block)
{
    const size_t rows = least(g->m - row, CT_BLOCK);
    const size_t cols = least(g->n - col, CT_BLOCK);
    const float alpha = (float)g->alpha, beta = (float)g->beta;
    uint16_t *c = (uint16_t *)g->c + row * g->ldc + col;
    for (size_t r = 0; r < rows; r++) {
        uint16_t *restrict line = block + r * CT_BLOCK;
        memset(line, 0, CT_BLOCK * sizeof *line);
        if (beta != 0.0f) {
            copy_line(line, c, cols);
        }
        for (size_t j = 0; j < CT_BLOCK; j++) {
            line[j] = ct_bf16_from_f32(alpha * sums[r * CT_BLOCK + j] +
                                       beta * ct_f32_from_bf16(line[j]));
        }
        copy_line(c, line, cols);
        c += g->ldc;
    }
}

/* The block on the other side of a symmetric result's diagonal. */
static void
mirror_block(const ct_gemm *g, const uint16_t *restrict block, size_t row, size_t col)
{
    _Alignas(64) uint32_t pairs[CT_PANEL / 2], turned[CT_PANEL / 2];
    const uint16_t *mirrored = (const uint16_t *)(const void *)turned;
    interleave(pairs, block);
    transpose_pairs(turned, pairs);
    for (size_t r = 0; r < least(g->n - col, CT_BLOCK); r++) {
        copy_line((uint16_t *)g->c + (col + r) * g->ldc + row, mirrored + r * CT_BLOCK,
                  least(g->m - row, CT_BLOCK));
    }
}

/* The sums of the blocks of row `row` from column first to end. */
static void
multiply_row(const amx_job *job, size_t row, size_t first, size_t end, float *sums)
{
    const size_t strip = job->n_panels * CT_PANEL;
    for (size_t panel = 0; panel < job->n_panels; panel += STRETCH) {
        const size_t n = least(job->n_panels - panel, STRETCH);
        const uint16_t *const a = job->a.packed + row * strip + panel * CT_PANEL;
        const uint16_t *const b = job->b.packed + panel * CT_PANEL;
        for (size_t col = first; col < end; col++) {
            ct_amx_multiply(a, b + col * strip, n, sums + (col - first) * CT_PANEL);
        }
    }
}

/* A symmetric result's blocks left of the diagonal are mirrors of others. */
static void
multiply_batch(void *arg, size_t batch)
{
    const amx_job *job = arg;
    const ct_gemm *g = job->gemm;
    const size_t row = batch % job->a_blocks;
    const size_t start = batch / job->a_blocks * ROW;
    const size_t end = least(start + ROW, job->b_blocks);
    const size_t first = g->symmetric && row > start ? row : start;
    _Alignas(64) float sums[ROW * CT_PANEL] = {0};
    _Alignas(64) uint16_t block[CT_PANEL] = {0};
    if (first >= end) {
        return;
    }
    ct_amx_begin();
    multiply_row(job, row, first, end, sums);
    ct_amx_end();
    for (size_t col = first; col < end; col++) {
        store_block(g, sums + (col - first) * CT_PANEL, row * CT_BLOCK, col * CT_BLOCK,
                    block);
        if (g->symmetric && col > row) {
            mirror_block(g, block, row * CT_BLOCK, col * CT_BLOCK);
        }
    }
}

ct_status
ct_cpu_gemm_amx(ct_scratch *scratch, const ct_gemm *g, ct_error *err)
{
    amx_job job = {
        .gemm = g,
        .a = {g->a, g->lda, g->m, g->trans_a,  false, NULL},
        .b = {g->b, g->ldb, g->n, !g->trans_b, true,  NULL},
        .n_panels = count(g->k, CT_BLOCK),
        .a_blocks = count(g->m, CT_BLOCK),
        .b_blocks = count(g->n, CT_BLOCK),
    };
    const size_t strip = job.n_panels * CT_PANEL;
    const size_t n_strips = job.a_blocks + job.b_blocks;
    ct_status status =
        ct_device_cpu.scratch_grow(scratch, n_strips * strip * sizeof(uint16_t), err);
    if (status == CT_OK) {
        job.a.packed = scratch->data;
        job.b.packed = job.a.packed + job.a_blocks * strip;
        ct_pool_run(pack_batch, &job, n_strips);
        ct_pool_run(multiply_batch, &job, job.a_blocks * count(job.b_blocks, ROW));
    }
    return status;
}

#endif
