/* Gradients of threads in 16 bits, and the rounding to 8. */
#include "core/ddp/reducer.h"
#include "ct_ranks.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    RANKS = 2,
    ROWS = 24,
    COLS = 16,
    VECTOR = 5
};

/* A matrix and a vector in one bucket. */
typedef struct model {
    ct_reducer reducer;
    float memory[ROWS * COLS + VECTOR], matrix[ROWS * COLS], vector[VECTOR];
    ct_span spans[2];
} model;

static void
model_init(model *m, const int *owners)
{
    const ct_owners of_both = {owners, RANKS};
    const ct_bucket_limits limits = {.first_bytes = 1 << 20, .cap_bytes = 1 << 20};
    m->spans[0] = (ct_span){m->matrix, ROWS * COLS, CT_F32};
    m->spans[1] = (ct_span){m->vector, VECTOR, CT_F32};
    CHECK(ct_reducer_init(&m->reducer, &ct_device_streamed, &ct_the_stream, m->spans, 2,
                          &limits, &of_both, NULL) == CT_OK);
    CHECK(m->reducer.plan.n_buckets == 1);
    ct_reducer_set_memory(&m->reducer, 0, m->memory);
}

/* One pass; the averages are then in place. */
static void
pass(model *m, ct_comm *comm)
{
    ct_reducer_begin(&m->reducer);
    for (size_t i = 2; i-- > 0;) {
        CHECK(ct_reducer_announce(&m->reducer, comm, i, &m->spans[i], NULL) == CT_OK);
    }
    CHECK(ct_reducer_finish(&m->reducer, comm, NULL) == CT_OK);
}

static const float *
average_of(const model *m, size_t param)
{
    return m->reducer.params[param].place.data;
}

/* Of rank 1: the product of two vectors; each rank has a multiple of it. */
static float
outer(size_t i)
{
    return (1.0f + (float)(i / COLS) / 8.0f) * (2.0f - (float)(i % COLS) / 4.0f);
}

static void
fill(model *m, int rank)
{
    for (size_t i = 0; i < ROWS * COLS; i++) {
        m->matrix[i] = outer(i) * (float)(1 + 2 * rank);
    }
    for (size_t i = 0; i < VECTOR; i++) {
        m->vector[i] = (float)(i + 1) * (float)(1 + 2 * rank);
    }
}

/* ---- 16 bits --------------------------------------------------------------------- */

static void
round_to_half(ct_comm *comm, void *arg)
{
    const ct_dtype dtype = *(const ct_dtype *)arg;
    model m;
    model_init(&m, NULL);
    m.reducer.rounds = true;
    m.reducer.rounded = dtype;
    fill(&m, comm->rank);
    m.matrix[1] = comm->rank == 0 ? 1.0f + 0x1p-20f : 1.0f;
    m.matrix[2] = 60000.0f; /* whose sum no half holds */
    pass(&m, comm);
    CHECK(average_of(&m, 1)[0] == 2.0f && average_of(&m, 1)[4] == 10.0f);
    CHECK(average_of(&m, 0)[1] == 1.0f);
    CHECK(fabsf(average_of(&m, 0)[2] - 60000.0f) <= 60000.0f / 256.0f);
    m.vector[3] = comm->rank == 1 ? NAN : 1.0f;
    pass(&m, comm);
    CHECK(isnan(average_of(&m, 1)[3]) && !isnan(average_of(&m, 1)[2]));
    ct_reducer_fini(&m.reducer);
}

static void
round_to_half_for_rank_1(ct_comm *comm, void *arg)
{
    static const int owners[] = {1, 1};
    model m;
    (void)arg;
    model_init(&m, owners);
    m.reducer.rounds = true;
    m.reducer.rounded = CT_F16;
    for (int cycle = 0; cycle < 2; cycle++) {
        fill(&m, comm->rank);
        m.matrix[1] = comm->rank == 0 ? 1.0f + 0x1p-20f : 1.0f;
        pass(&m, comm);
        CHECK(comm->rank != 1 || average_of(&m, 1)[4] == 10.0f);
        CHECK(comm->rank != 1 || average_of(&m, 0)[1] == 1.0f);
        CHECK(comm->rank == 1 || average_of(&m, 1)[4] == 2.5f); /* its own share */
    }
    ct_reducer_fini(&m.reducer);
}

static void
test_halves_are_rounded_sums_of_shares(void)
{
    run_ranks(RANKS, 30.0, round_to_half_for_rank_1, NULL);
    ct_dtype dtypes[] = {CT_F16, CT_BF16};
    run_ranks(RANKS, 30.0, round_to_half, &dtypes[0]);
    run_ranks(RANKS, 30.0, round_to_half, &dtypes[1]);
}

/* ---- 8 bits ---------------------------------------------------------------------- */

static float
spread(size_t i)
{
    return (float)((i * 7919 + 13) % 101) / 101.0f - 0.5f;
}

static void
encode_with(const char *isa, float *residual, int8_t *quantized, float *scales)
{
    float values[ROWS * COLS];
    const ct_encoding e = {
        {values, ROWS * COLS, CT_F32},
        residual, quantized, scales, 8
    };
    for (size_t i = 0; i < ROWS * COLS; i++) {
        values[i] = spread(i) * (i < 256 ? 1e-39f : 3e38f);
        residual[i] = spread(i + 1) * (i < 256 ? 1e-39f : 1e36f);
    }
    CHECK(ct_cpu_set_isa(isa, NULL) == CT_OK);
    CHECK(ct_device_cpu.encode(NULL, &e, NULL) == CT_OK);
}

/* The least numbers that there are, and the largest. */
static void
test_codes_are_the_same_with_every_instruction_set(void)
{
    static const char *const names[] = {"v3", "v4"};
    float residual[2][ROWS * COLS], scales[2][2];
    int8_t quantized[2][ROWS * COLS];
    encode_with("base", residual[0], quantized[0], scales[0]);
    CHECK(quantized[0][300] != 0 && isfinite(residual[0][300]));
    for (size_t i = 0; i < 2; i++) {
        if (ct_cpu_set_isa(names[i], NULL) == CT_OK) {
            encode_with(names[i], residual[1], quantized[1], scales[1]);
            CHECK(memcmp(residual[0], residual[1], sizeof residual[0]) == 0);
            CHECK(memcmp(quantized[0], quantized[1], sizeof quantized[0]) == 0);
            CHECK(memcmp(scales[0], scales[1], sizeof scales[0]) == 0);
        }
    }
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK);
}

int
main(void)
{
    test_codes_are_the_same_with_every_instruction_set();
    test_halves_are_rounded_sums_of_shares();
    return 0;
}
