#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/copy_far.h"
#include "core/base/pages.h"
#include "ct_rank_moves.h"

#include <string.h>

enum {
    FAR_LENGTH = CT_FAR_BYTES / 4 + 5 /* floats */
};

/* In place, in memory that the others read: each op on what the last one left. */
static void
work_in_shared_memory(ct_comm *comm)
{
    const size_t ranks = (size_t)comm->world_size, n = LARGEST;
    const size_t mine = (size_t)comm->rank * n;
    ct_pages *memory;
    CHECK(ct_comm_memory(comm, n * ranks * sizeof(float), &memory, NULL) == CT_OK);
    CHECK(memory->is_shared && memory->bytes >= n * ranks * sizeof(float));
    float *whole = (float *)(void *)memory->data;
    const ct_span all = {whole, n * ranks, CT_F32}, own = {whole + mine, n, CT_F32};
    CHECK(whole[0] == 0.0f && whole[n * ranks - 1] == 0.0f);
    for (size_t i = 0; i < n * ranks; i++) {
        whole[i] = value_at(comm->rank, i);
    }
    CHECK(ct_comm_reduce_scatter(comm, &own, &all, CT_REDUCE_SUM, NULL) == CT_OK);
    for (size_t i = 0; i < n; i++) {
        CHECK(whole[mine + i] == reduced_at(comm->world_size, mine + i, CT_REDUCE_SUM));
    }
    CHECK(ct_comm_all_gather(comm, &all, &own, NULL) == CT_OK);
    for (size_t i = 0; i < n * ranks; i++) {
        CHECK(whole[i] == reduced_at(comm->world_size, i, CT_REDUCE_SUM));
    }
    for (size_t i = 0; i < n * ranks; i++) {
        whole[i] = value_at(comm->rank, i);
    }
    CHECK(ct_comm_all_reduce(comm, &all, CT_REDUCE_MEAN, NULL) == CT_OK);
    for (size_t i = 0; i < n * ranks; i++) {
        CHECK(whole[i] == reduced_at(comm->world_size, i, CT_REDUCE_MEAN));
    }
    ct_pages_free(memory);
}

static void
move_shared_memory(ct_comm *comm)
{
    ct_pages *memory, *more;
    const size_t ranks = (size_t)comm->world_size, n = LARGEST;
    CHECK(ct_comm_memory(comm, n * ranks * sizeof(float), &memory, NULL) == CT_OK);
    CHECK(ct_comm_memory(comm, n * sizeof(float), &more, NULL) == CT_OK);
    float *shared = (float *)(void *)memory->data;
    float *part = values_of(0, n), *whole = values_of(0, n * ranks);
    gather_scatter_and_exchange(comm, shared, part, n);
    gather_scatter_and_exchange(comm, whole, shared, n);
    gather_scatter_and_exchange(comm, shared, (float *)(void *)more->data, n);
    ct_free(part);
    ct_free(whole);
    ct_pages_free(more);
    gather_scatter_and_exchange(comm, shared, shared + n * (ranks - 1), 1);
    ct_pages_free(memory);
}

/* So long that copies leave the caches alone: from pieces, from others' memory, and
 * from the own place in the result, which is not copied at all. */
static void
move_far(ct_comm *comm)
{
    ct_pages *memory;
    const size_t n = FAR_LENGTH;
    CHECK(ct_comm_memory(comm, 2 * n * sizeof(float), &memory, NULL) == CT_OK);
    float *shared = (float *)(void *)memory->data,
          *own = shared + (size_t)comm->rank * n;
    float *part = values_of(comm->rank, n), *whole = values_of(comm->rank, 2 * n);
    gather_scatter_and_exchange(comm, whole, part, n);
    gather_scatter_and_exchange(comm, whole, shared, n);
    for (size_t i = 0; i < n; i++) {
        own[i] = value_at(comm->rank, i);
    }
    const ct_span all = {shared, 2 * n, CT_F32}, mine = {own, n, CT_F32};
    CHECK(ct_comm_all_gather(comm, &all, &mine, NULL) == CT_OK);
    CHECK(ct_comm_broadcast(comm, &all, 1, NULL) == CT_OK);
    for (size_t i = 0; i < 2 * n; i++) {
        CHECK(shared[i] == value_at((int)(i / n), i % n));
    }
    ct_free(part);
    ct_free(whole);
    ct_pages_free(memory);
}

static void
test_long_copies_arrive_whole(void)
{
    run_processes(2, 30.0, -1, move_far);
}

/* Pages come back as zeroes, on every rank by itself; the others' stay. */
static void
discard_memory(ct_comm *comm)
{
    ct_pages *memory;
    ct_error err;
    float seen[3];
    const size_t page = ct_pages_round(1);
    CHECK(ct_comm_memory(comm, 2 * page, &memory, NULL) == CT_OK);
    float *values = (float *)(void *)memory->data;
    const ct_span own = {values, 1, CT_F32}, all = {seen, 3, CT_F32};
    values[0] = values[page / sizeof(float)] = (float)(comm->rank + 1);
    CHECK(ct_comm_all_gather(comm, &all, &own, NULL) == CT_OK && seen[1] == 2.0f);
    if (comm->rank == 1) {
        CHECK(ct_pages_discard(memory, 0, page, NULL) == CT_OK);
        CHECK(values[0] == 0.0f && values[page / sizeof(float)] == 2.0f);
    }
    CHECK(ct_comm_all_gather(comm, &all, &own, NULL) == CT_OK);
    CHECK(seen[0] == 1.0f && seen[1] == 0.0f && seen[2] == 3.0f);
    CHECK(ct_pages_discard(memory, 1, page, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "must be whole pages") != NULL);
    CHECK(ct_pages_discard(memory, 2 * page, page, &err) == CT_EINVAL);
    ct_pages_free(memory);
}

static void
test_discarded_memory_reads_as_zeroes(void)
{
    run_processes(3, 30.0, -1, discard_memory);
}

static void
test_memory_of_the_group_is_read_where_it_is(void)
{
    run_processes(2, 30.0, -1, work_in_shared_memory);
    run_processes(3, 30.0, -1, work_in_shared_memory);
    run_processes(3, 30.0, -1, move_shared_memory);
}

static void
ask_for_different_memory(ct_comm *comm)
{
    ct_error err;
    ct_pages *memory = NULL;
    CHECK(ct_comm_memory(comm, comm->rank == 1 ? 100 : 50, &memory, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got 50 to 100") != NULL && memory == NULL);
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
}

static void
test_memory_of_different_sizes_is_rejected(void)
{
    run_processes(2, 30.0, -1, ask_for_different_memory);
}

int
main(void)
{
    test_memory_of_the_group_is_read_where_it_is();
    test_long_copies_arrive_whole();
    test_memory_of_different_sizes_is_rejected();
    test_discarded_memory_reads_as_zeroes();
    return 0;
}
