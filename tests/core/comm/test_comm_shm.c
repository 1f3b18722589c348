#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/comm/shm.h"
#include "core/base/pages.h"
#include "ct_rank_moves.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

static const size_t lengths[] = {0, 1, 3, 1001, 16384, 16385, LARGEST};

/* ---- results --------------------------------------------------------------------- */

static void
all_reduce_everything(ct_comm *comm)
{
    static const ct_reduce_op ops[] = {CT_REDUCE_SUM, CT_REDUCE_MEAN, CT_REDUCE_MAX,
                                       CT_REDUCE_MIN};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        for (int o = 0; o < 4; o++) {
            float *values = values_of(comm->rank, lengths[k]);
            const ct_span span = {values, lengths[k], CT_F32};
            const float behind = 7.0f + (float)comm->rank;
            values[lengths[k]] = behind;
            CHECK(ct_comm_all_reduce(comm, &span, ops[o], NULL) == CT_OK);
            CHECK(values[lengths[k]] == behind);
            for (size_t i = 0; i < lengths[k]; i++) {
                CHECK(values[i] == reduced_at(comm->world_size, i, ops[o]));
            }
            ct_free(values);
        }
    }
}

static void
test_every_rank_gets_the_reduction(void)
{
    run_processes(2, 30.0, -1, all_reduce_everything);
    run_processes(3, 30.0, -1, all_reduce_everything);
}

static void
move_everything(ct_comm *comm)
{
    const size_t ranks = (size_t)comm->world_size;
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        float *part = values_of(0, lengths[k]),
              *whole = values_of(0, lengths[k] * ranks);
        gather_scatter_and_exchange(comm, whole, part, lengths[k]);
        ct_free(part);
        ct_free(whole);
    }
}

static void
test_parts_go_where_they_belong(void)
{
    run_processes(2, 30.0, -1, move_everything);
    run_processes(4, 30.0, -1, move_everything);
}

/* Begun on one rank before the other comes near; large and small, staged and not. */
static void
begin_several(ct_comm *comm)
{
    enum {
        MANY = 6
    };
    ct_work *works[MANY];
    ct_pages *memory;
    float *values[MANY];
    const size_t n = LARGEST;
    CHECK(ct_comm_memory(comm, 2 * n * sizeof(float), &memory, NULL) == CT_OK);
    for (int k = 0; k < MANY; k++) {
        const size_t length = k < 2 ? n : k == 2 ? 3 : lengths[k];
        values[k] = k < 2 ? (float *)(void *)memory->data + (size_t)k * n
                          : values_of(comm->rank, length);
        for (size_t i = 0; i < length; i++) {
            values[k][i] = value_at(comm->rank, i);
        }
        const ct_request r = {
            .what = k == 2   ? CT_BROADCAST
                    : k == 3 ? CT_REDUCE
                             : CT_ALL_REDUCE,
            .in = {values[k], length, CT_F32}
        };
        CHECK(ct_comm_start(comm, &r, &works[k], NULL) == CT_OK);
    }
    CHECK(ct_comm_wait(comm, works[1], NULL) == CT_OK); /* and the one before */
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    for (int k = 0; k < MANY; k++) {
        const size_t length = k < 2 ? n : k == 2 ? 3 : lengths[k];
        CHECK(k == 1 || ct_comm_wait(comm, works[k], NULL) == CT_OK);
        for (size_t i = 0; (k != 3 || comm->rank == 0) && i < length; i++) {
            CHECK(values[k][i] ==
                  (k == 2 ? value_at(0, i)
                          : reduced_at(comm->world_size, i, CT_REDUCE_SUM)));
        }
        if (k >= 2) {
            ct_free(values[k]);
        }
    }
    ct_pages_free(memory);
}

static void
test_what_has_begun_ends_in_order(void)
{
    run_processes(2, 30.0, -1, begin_several);
    run_processes(3, 30.0, -1, begin_several);
}

static void
begin_alone(ct_comm *comm)
{
    float value = (float)comm->rank + 1.0f;
    ct_work *work;
    ct_error err;
    const ct_request r = {
        .what = CT_ALL_REDUCE, .in = {&value, 1, CT_F32}
    };
    const ct_request other = {.what = CT_BARRIER};
    if (comm->rank == 1) {
        CHECK(ct_comm_barrier(comm, &err) == CT_EINVAL);
        CHECK(strstr(err.message, "rank 0 called all_reduce") != NULL);
        CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
        return;
    }
    CHECK(ct_comm_start(comm, &r, &work, NULL) == CT_OK);
    CHECK(value == 1.0f);
    CHECK(ct_comm_run(comm, &other, NULL) == CT_OK);
    CHECK(ct_comm_wait(comm, work, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 1 barrier") != NULL);
}

static void
test_what_ranks_disagree_on_is_told_by_wait(void)
{
    run_processes(2, 30.0, -1, begin_alone);
}

static void
broadcast_from_each(ct_comm *comm)
{
    for (int root = 0; root < comm->world_size; root++) {
        for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
            float *values = values_of(comm->rank, lengths[k]);
            const ct_span span = {values, lengths[k], CT_F32};
            CHECK(ct_comm_broadcast(comm, &span, root, NULL) == CT_OK);
            for (size_t i = 0; i < lengths[k]; i++) {
                CHECK(values[i] == value_at(root, i));
            }
            ct_free(values);
        }
    }
}

static void
test_a_broadcast_is_the_roots(void)
{
    run_processes(3, 30.0, -1, broadcast_from_each);
}

/* The order of ranks shows: 1e16 + 1 is 1e16. */
static void
sum_in_order(ct_comm *comm)
{
    static const double of_rank[] = {1e16, 1.0, -1e16, 1.0};
    for (int i = 0; i < 200; i++) {
        double value = of_rank[comm->rank];
        const ct_span span = {&value, 1, CT_F64};
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
        CHECK(value == 1.0);
    }
}

static void
test_ranks_are_added_in_order_whoever_comes_first(void)
{
    run_processes(4, 30.0, -1, sum_in_order);
}

static void
add_each_dtype(ct_comm *comm)
{
    static const ct_dtype dtypes[] = {CT_F64, CT_F32, CT_BF16, CT_F16, CT_I64};
    for (int d = 0; d < 5; d++) {
        uint64_t words[9] = {0}, expected[9];
        const void *rows[2] = {words, words};
        memset(words, 0x3c, sizeof words); /* a small number of each */
        ct_reduce(expected, rows, 2, 9, dtypes[d], CT_REDUCE_SUM);
        const ct_span span = {words, 9, dtypes[d]};
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
        CHECK(memcmp(words, expected, 9 * ct_dtype_size(dtypes[d])) == 0);
    }
}

static void
test_every_dtype_is_added(void)
{
    run_processes(2, 30.0, -1, add_each_dtype);
}

static void
do_nothing_alone(ct_comm *comm)
{
    float value = 2.0f, other = 0.0f;
    const ct_span in = {&value, 1, CT_F32}, out = {&other, 1, CT_F32};
    CHECK(ct_comm_all_reduce(comm, &in, CT_REDUCE_MEAN, NULL) == CT_OK);
    CHECK(ct_comm_all_gather(comm, &out, &in, NULL) == CT_OK);
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    CHECK(value == 2.0f && other == 2.0f);
}

static void
test_a_rank_may_be_alone(void)
{
    run_processes(1, 30.0, -1, do_nothing_alone);
}

int
main(void)
{
    test_every_rank_gets_the_reduction();
    test_parts_go_where_they_belong();
    test_what_has_begun_ends_in_order();
    test_what_ranks_disagree_on_is_told_by_wait();
    test_a_broadcast_is_the_roots();
    test_ranks_are_added_in_order_whoever_comes_first();
    test_every_dtype_is_added();
    test_a_rank_may_be_alone();
    return 0;
}
