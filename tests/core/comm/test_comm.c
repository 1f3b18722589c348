#define _POSIX_C_SOURCE 200809L
#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "ct_comm_local.h"
#include "ct_random.h"
#include "ct_random.h"
#include "ct_ranks.h"
#include "ct_reduce_to.h"
#include "ct_test.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* ---- one rank -------------------------------------------------------------------- */

static void
test_a_group_of_one_is_rank_zero_of_one(void)
{
    ct_comm *comm = ct_comm_self_new();
    CHECK(comm != NULL && comm->rank == 0 && comm->world_size == 1);
    CHECK(strcmp(comm->ops->name, "self") == 0);
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    comm->ops->free(comm);
}

static void
test_reductions_of_one_rank_change_nothing(void)
{
    ct_comm *comm = ct_comm_self_new();
    float values[3] = {1.0f, -2.0f, 3.0f};
    const ct_span span = {values, 3, CT_F32};
    static const ct_reduce_op ops[] = {CT_REDUCE_SUM, CT_REDUCE_MEAN, CT_REDUCE_MAX,
                                       CT_REDUCE_MIN};
    for (int i = 0; i < 4; i++) {
        CHECK(ct_comm_all_reduce(comm, &span, ops[i], NULL) == CT_OK);
    }
    CHECK(values[0] == 1.0f && values[1] == -2.0f && values[2] == 3.0f);
    comm->ops->free(comm);
}

static void
test_gather_and_scatter_of_one_rank_copy(void)
{
    ct_comm *comm = ct_comm_self_new();
    float from[2] = {1.0f, 2.0f}, to[2] = {0.0f, 0.0f};
    const ct_span in = {from, 2, CT_F32}, out = {to, 2, CT_F32};
    CHECK(ct_comm_all_gather(comm, &out, &in, NULL) == CT_OK);
    CHECK(to[0] == 1.0f && to[1] == 2.0f);
    to[0] = to[1] = 0.0f;
    CHECK(ct_comm_reduce_scatter(comm, &out, &in, CT_REDUCE_MEAN, NULL) == CT_OK);
    CHECK(to[0] == 1.0f && to[1] == 2.0f);
    CHECK(ct_comm_all_gather(comm, &in, &in, NULL) == CT_OK && from[1] == 2.0f);
    to[0] = to[1] = 0.0f;
    CHECK(ct_comm_all_to_all(comm, &out, &in, NULL) == CT_OK && to[1] == 2.0f);

    ct_error err;
    const ct_span longer = {to, 3, CT_F32};
    CHECK(ct_comm_all_gather(comm, &longer, &in, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "3 of float32") != NULL);
    const ct_span other = {to, 2, CT_I32};
    CHECK(ct_comm_reduce_scatter(comm, &other, &in, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "int32") != NULL);
    comm->ops->free(comm);
}

static void
test_only_rank_zero_can_broadcast(void)
{
    ct_comm *comm = ct_comm_self_new();
    ct_error err;
    const ct_span nothing = {NULL, 0, CT_F32};
    CHECK(ct_comm_broadcast(comm, &nothing, 0, &err) == CT_OK);
    CHECK(ct_comm_broadcast(comm, &nothing, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got 1") != NULL);
    CHECK(reduce_to(comm, &nothing, CT_REDUCE_SUM, 0, &err) == CT_OK);
    CHECK(reduce_to(comm, &nothing, CT_REDUCE_SUM, -1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got -1") != NULL);
    comm->ops->free(comm);
}

static void
test_no_memory_gives_no_group(void)
{
    ct_alloc_fail_after(1);
    CHECK(ct_comm_self_new() == NULL);
    ct_alloc_fail_after(0);
}

/* ---- ranks that are threads ------------------------------------------------------ */

static void
all_reduce_values(ct_comm *comm, void *arg)
{
    static const size_t lengths[] = {0, 1, 3, 4, 10, 1001};
    (void)arg;
    for (size_t k = 0; k < 6; k++) {
        float values[1001];
        for (size_t i = 0; i < lengths[k]; i++) {
            values[i] = (float)(i + 1) * (float)(comm->rank + 1);
        }
        const ct_span span = {values, lengths[k], CT_F32};
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
        for (size_t i = 0; i < lengths[k]; i++) {
            CHECK(values[i] == (float)(i + 1) * 10.0f); /* 1 + 2 + 3 + 4 */
        }
    }
}

static void
test_every_rank_gets_the_sum(void)
{
    run_ranks(4, 60.0, all_reduce_values, NULL);
}

/* The order of ranks shows: 1e16 + 1 is 1e16. */
static void
sum_in_order(ct_comm *comm, void *arg)
{
    static const double of_rank[] = {1e16, 1.0, -1e16, 1.0};
    (void)arg;
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
    run_ranks(4, 60.0, sum_in_order, NULL);
}

static void
gather_and_scatter(ct_comm *comm, void *arg)
{
    const int rank = comm->rank;
    int32_t all[6] = {0}, mine[2] = {10 * rank, 10 * rank + 1}, sum[2] = {0};
    const ct_span whole = {all, 6, CT_I32}, part = {mine, 2, CT_I32};
    const ct_span own = {&all[2 * rank], 2, CT_I32}, out = {sum, 2, CT_I32};
    (void)arg;
    CHECK(ct_comm_all_gather(comm, &whole, &part, NULL) == CT_OK);
    for (int r = 0; r < 3; r++) {
        CHECK(all[2 * r] == 10 * r && all[2 * r + 1] == 10 * r + 1);
    }
    CHECK(ct_comm_reduce_scatter(comm, &out, &whole, CT_REDUCE_SUM, NULL) == CT_OK);
    CHECK(sum[0] == 30 * rank && sum[1] == 30 * rank + 3);
    /* in place: a rank's part lies within its whole */
    CHECK(ct_comm_reduce_scatter(comm, &own, &whole, CT_REDUCE_MAX, NULL) == CT_OK);
    CHECK(ct_comm_all_gather(comm, &whole, &own, NULL) == CT_OK);
    CHECK(all[4] == 20 && all[5] == 21 && all[0] == 0);
}

static void
test_gather_and_scatter_are_in_rank_order(void)
{
    run_ranks(3, 60.0, gather_and_scatter, NULL);
}

static void
exchange_parts(ct_comm *comm, void *arg)
{
    int64_t from[6], to[6] = {0};
    (void)arg;
    for (int i = 0; i < 6; i++) {
        from[i] = 10 * comm->rank + i;
    }
    const ct_span in = {from, 6, CT_I64}, out = {to, 6, CT_I64};
    CHECK(ct_comm_all_to_all(comm, &out, &in, NULL) == CT_OK);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(to[2 * rank] == 10 * rank + 2 * comm->rank);
        CHECK(to[2 * rank + 1] == 10 * rank + 2 * comm->rank + 1);
    }
    ct_error err;
    const ct_span four = {to, 4, CT_I64};
    CHECK(ct_comm_all_to_all(comm, &four, &four, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "all_to_all over 3 ranks") == err.message);
}

static void
test_a_part_goes_to_every_rank(void)
{
    run_ranks(3, 60.0, exchange_parts, NULL);
}

/* Every collective as a request, begun and then waited for. */
static void
start_each(ct_comm *comm, void *arg)
{
    double mine[2] = {comm->rank, 1.0}, all[4] = {0};
    const ct_span part = {mine, 2, CT_F64}, whole = {all, 4, CT_F64};
    const ct_request wanted[] = {
        {.what = CT_ALL_GATHER, .in = part, .out = whole},
        {.what = CT_REDUCE_SCATTER, .in = whole, .out = part, .op = CT_REDUCE_MAX},
        {.what = CT_ALL_TO_ALL, .in = part, .out = {all, 2, CT_F64}},
        {.what = CT_BROADCAST, .in = part, .root = 1},
        {.what = CT_ALL_REDUCE, .in = part, .op = CT_REDUCE_MEAN},
        {.what = CT_BARRIER},
    };
    (void)arg;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        ct_work *work = NULL;
        CHECK(ct_comm_start(comm, &wanted[i], &work, NULL) == CT_OK);
        CHECK(ct_comm_wait(comm, work, NULL) == CT_OK);
    }
    /* gathered 0 1 1 1, of which rank 1 has 1 1; exchanged; sent by rank 1; averaged */
    CHECK(all[0] == 0.0 + comm->rank && all[1] == 1.0);
    CHECK(mine[0] == 1.0 && mine[1] == 1.0);
}

static void
test_requests_are_the_collectives_they_name(void)
{
    run_ranks(2, 60.0, start_each, NULL);
}

/* Rank r gives r letters, rank 0 nothing. */
static void
gather_letters(ct_comm *comm, void *arg)
{
    static const char letters[] = "abc";
    ct_gathered all;
    (void)arg;
    CHECK(ct_comm_gather_bytes(comm, letters, (size_t)comm->rank, &all, NULL) == CT_OK);
    for (int rank = 0; rank < 4; rank++) {
        CHECK(all.n[rank] == rank);
        CHECK(memcmp(all.data + (size_t)rank * all.stride, letters, (size_t)rank) == 0);
    }
    ct_gathered_fini(&all);
    CHECK(ct_comm_gather_bytes(comm, NULL, 0, &all, NULL) == CT_OK);
    CHECK(all.n[3] == 0 && all.data == NULL);
    ct_gathered_fini(&all);
}

static void
test_bytes_of_different_lengths_are_gathered(void)
{
    run_ranks(4, 60.0, gather_letters, NULL);
}

static void
test_gathering_bytes_survives_a_lack_of_memory(void)
{
    ct_comm *comm = ct_comm_self_new();
    ct_gathered all;
    ct_error err;
    for (size_t n = 1; n <= 2; n++) {
        ct_alloc_fail_after(n);
        CHECK(ct_comm_gather_bytes(comm, "abc", 3, &all, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(all.data == NULL && all.n == NULL);
    }
    CHECK(ct_comm_gather_bytes(comm, "abc", 3, &all, &err) == CT_OK);
    CHECK(all.n[0] == 3 && memcmp(all.data, "abc", 3) == 0);
    ct_gathered_fini(&all);
    comm->ops->free(comm);
}

static void
broadcast_from_each(ct_comm *comm, void *arg)
{
    (void)arg;
    for (int root = 0; root < comm->world_size; root++) {
        double values[2] = {comm->rank, -comm->rank};
        const ct_span span = {values, 2, CT_F64};
        CHECK(ct_comm_broadcast(comm, &span, root, NULL) == CT_OK);
        CHECK(values[0] == root && values[1] == -root);
        CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    }
}

static void
reduce_to_each(ct_comm *comm, void *arg)
{
    const int ranks = comm->world_size;
    (void)arg;
    for (int root = 0; root < ranks; root++) {
        double values[2] = {comm->rank, -comm->rank};
        const ct_span span = {values, 2, CT_F64};
        CHECK(reduce_to(comm, &span, CT_REDUCE_SUM, root, NULL) == CT_OK);
        CHECK(comm->rank != root || (values[0] == 6.0 && values[1] == -6.0));
        CHECK(reduce_to(comm, &span, CT_REDUCE_MAX, ranks, NULL) == CT_EINVAL);
    }
}

static void
test_a_broadcast_is_the_roots(void)
{
    run_ranks(4, 60.0, broadcast_from_each, NULL);
    run_ranks(4, 60.0, reduce_to_each, NULL);
}

/* All ranks draw the same collectives, and some dawdle. */
static void
draw_collectives(ct_comm *comm, void *arg)
{
    ct_random shared = {7}, own = {(uint64_t)comm->rank + 1};
    (void)arg;
    for (int i = 0; i < 400; i++) {
        double all[32], part[8];
        const size_t n = 1 + ct_random_below(&shared, 8);
        const size_t ranks = (size_t)comm->world_size;
        const ct_span whole = {all, n * ranks, CT_F64}, piece = {part, n, CT_F64};
        for (size_t k = 0; k < n * ranks; k++) {
            all[k] = comm->rank;
        }
        if (ct_random_below(&own, 16) == 0) {
            const struct timespec while_ = {0, 50000};
            (void)nanosleep(&while_, NULL);
        }
        switch (ct_random_below(&shared, 3)) {
        case 0:
            CHECK(ct_comm_all_reduce(comm, &whole, CT_REDUCE_MEAN, NULL) == CT_OK);
            CHECK(all[0] == 1.5 && all[n * ranks - 1] == 1.5);
            break;
        case 1:
            CHECK(ct_comm_reduce_scatter(comm, &piece, &whole, CT_REDUCE_SUM, NULL) ==
                  CT_OK);
            CHECK(part[0] == 6.0 && part[n - 1] == 6.0);
            break;
        default:
            part[0] = part[n - 1] = comm->rank;
            CHECK(ct_comm_all_gather(comm, &whole, &piece, NULL) == CT_OK);
            CHECK(all[0] == 0.0 && all[n * ranks - 1] == 3.0);
        }
    }
}

static void
test_many_collectives_in_a_row(void)
{
    run_ranks(4, 60.0, draw_collectives, NULL);
}

static void
call_differently(ct_comm *comm, void *arg)
{
    ct_error err;
    double value = 1.0;
    const ct_span one = {&value, 1, CT_F64}, none = {&value, 0, CT_F64};
    (void)arg;
    CHECK((comm->rank == 2
               ? ct_comm_barrier(comm, &err)
               : ct_comm_all_reduce(comm, &one, CT_REDUCE_SUM, &err)) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 0 called all_reduce of 1 float64") != NULL);
    CHECK(strstr(err.message, "rank 2 barrier") != NULL);
    CHECK(ct_comm_all_reduce(comm, comm->rank == 1 ? &none : &one, CT_REDUCE_SUM,
                             &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 1 all_reduce of 0 float64") != NULL);
    CHECK(ct_comm_all_gather(comm, &one, &one, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "all_gather over 3 ranks needs 3 times") != NULL);
    CHECK(ct_comm_reduce_scatter(comm, &one, &one, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(ct_comm_broadcast(comm, &one, 3, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "root must be in [0, 3), got 3") != NULL);
    CHECK(value == 1.0);
    CHECK(ct_comm_all_reduce(comm, &one, CT_REDUCE_SUM, &err) == CT_OK);
    CHECK(value == 3.0);
}

/* One shape, but for other things: the odd one out is named on all ranks. */
static void
call_for_other_things(ct_comm *comm, void *arg)
{
    ct_error err;
    ct_label label;
    float value = 1.0f;
    const ct_span span = {&value, 1, CT_F32};
    (void)arg;
    comm->label = &label;
    ct_label_set(&label, comm->rank == 0 ? "a" : "layers.1", 7);
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 0 averages 'a', rank 1 averages 'layers.1'; 3 of 4 "
                              "ranks are with rank 1") != NULL);
    ct_label_set(&label, "a", comm->rank == 3 ? 8 : 7);
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 3 averages 'a'; 3 of 4 ranks are with rank 0") !=
          NULL);
    ct_label_set(&label, "a", 7);
    label.call = comm->rank == 2 ? 5 : 4;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 0 averages 'a' (number 4), rank 2 averages 'a' "
                              "(number 5)") != NULL);
    comm->label = comm->rank == 1 ? NULL : &label;
    label.call = 4;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 1 calls all_reduce of 1 float32") != NULL);
    CHECK(value == 1.0f);
    comm->label = &label;
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_OK);
    CHECK(value == 4.0f);
    comm->label = NULL;
}

static void
test_ranks_in_collectives_for_other_things_are_rejected(void)
{
    run_ranks(4, 30.0, call_for_other_things, NULL);
}

static void
test_ranks_that_disagree_are_all_rejected_and_may_go_on(void)
{
    run_ranks(3, 60.0, call_differently, NULL);
}

static void
leave_early(ct_comm *comm, void *arg)
{
    ct_error err;
    char expected[80];
    float value = 1.0f;
    const ct_span span = {&value, 1, CT_F32};
    (void)arg;
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    if (comm->rank == 2) {
        return; /* as a rank does whose own work failed */
    }
    (void)snprintf(expected, sizeof expected,
                   "all_reduce on rank %d of 4: rank 2 has left the group", comm->rank);
    for (int i = 0; i < 2; i++) {
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
        CHECK(strcmp(err.message, expected) == 0 && value == 1.0f);
    }
}

static void
test_a_rank_that_leaves_makes_the_others_fail(void)
{
    run_ranks(4, 60.0, leave_early, NULL);
}

/* Rank 0 comes when the others have given up. It is the first that is looked for:
 * however late another one is, it is not taken for the late one. */
static void
come_late(ct_comm *comm, void *arg)
{
    atomic_int *n_told = arg;
    ct_error err;
    while (comm->rank == 0 && atomic_load(n_told) < comm->world_size - 1) {
        const struct timespec while_ = {0, 1000000};
        (void)nanosleep(&while_, NULL);
    }
    CHECK(ct_comm_barrier(comm, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "barrier on rank ") == err.message);
    CHECK(strstr(err.message, "rank 0 did not come within 0.5 seconds") != NULL);
    (void)atomic_fetch_add(n_told, 1);
}

static void
test_a_rank_that_does_not_come_in_time_breaks_the_group(void)
{
    atomic_int n_told = 0;
    run_ranks(3, 0.5, come_late, &n_told);
}

static void
test_no_group_of_threads_without_ranks_time_or_memory(void)
{
    ct_comm *comms[2] = {NULL, NULL};
    ct_error err;
    static const double bad_times[] = {0.0, -1.0, INFINITY, NAN};
    CHECK(ct_comm_local_new(comms, 0, 1.0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "world_size") == err.message);
    for (int i = 0; i < 4; i++) {
        CHECK(ct_comm_local_new(comms, 2, bad_times[i], &err) == CT_EINVAL);
        CHECK(strstr(err.message, "timeout_seconds") == err.message);
    }
    for (size_t n = 1; n <= 3; n++) {
        ct_alloc_fail_after(n);
        CHECK(ct_comm_local_new(comms, 2, 1.0, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(comms[0] == NULL && comms[1] == NULL);
    }
    CHECK(ct_comm_local_new(comms, 2, 1.0, &err) == CT_OK);
    comms[0]->ops->free(comms[0]);
    comms[1]->ops->free(comms[1]);
}

/* Draws colors, of which -1 is none, and keys, which may be alike: a group has the
 * ranks of one color, by key and then by rank. */
static void
split_group(ct_comm *comm, void *arg)
{
    ct_random r = {7};
    (void)arg;
    for (int draw = 0; draw < 40; draw++) {
        int colors[MAX_RANKS], keys[MAX_RANKS], sorted[MAX_RANKS];
        int n = 0, all[MAX_RANKS], own = comm->rank;
        ct_comm *part;
        for (int rank = 0; rank < comm->world_size; rank++) {
            colors[rank] = (int)ct_random_below(&r, 4) - 1;
            keys[rank] = (int)ct_random_below(&r, 5) - 2;
        }
        for (int key = -2; key <= 2; key++) {
            for (int rank = 0; rank < comm->world_size; rank++) {
                if (colors[rank] == colors[own] && keys[rank] == key) {
                    sorted[n++] = rank;
                }
            }
        }
        CHECK(ct_comm_split(comm, colors[own], keys[own], &part, NULL) == CT_OK);
        CHECK((part == NULL) == (colors[own] < 0));
        if (part == NULL) {
            continue;
        }
        const ct_span in = {&own, 1, CT_I32}, out = {all, (size_t)n, CT_I32};
        CHECK(part->world_size == n && sorted[part->rank] == own);
        CHECK(ct_comm_all_gather(part, &out, &in, NULL) == CT_OK);
        CHECK(memcmp(all, sorted, (size_t)n * sizeof *all) == 0);
        part->ops->free(part);
    }
}

static void
test_a_group_is_split_by_color_and_key(void)
{
    run_ranks(MAX_RANKS, 30.0, split_group, NULL);
}

int
main(void)
{
    test_a_group_of_one_is_rank_zero_of_one();
    test_reductions_of_one_rank_change_nothing();
    test_gather_and_scatter_of_one_rank_copy();
    test_only_rank_zero_can_broadcast();
    test_no_memory_gives_no_group();
    test_every_rank_gets_the_sum();
    test_ranks_are_added_in_order_whoever_comes_first();
    test_gather_and_scatter_are_in_rank_order();
    test_a_part_goes_to_every_rank();
    test_requests_are_the_collectives_they_name();
    test_bytes_of_different_lengths_are_gathered();
    test_gathering_bytes_survives_a_lack_of_memory();
    test_a_broadcast_is_the_roots();
    test_many_collectives_in_a_row();
    test_ranks_that_disagree_are_all_rejected_and_may_go_on();
    test_ranks_in_collectives_for_other_things_are_rejected();
    test_a_rank_that_leaves_makes_the_others_fail();
    test_a_rank_that_does_not_come_in_time_breaks_the_group();
    test_no_group_of_threads_without_ranks_time_or_memory();
    test_a_group_is_split_by_color_and_key();
    return 0;
}
