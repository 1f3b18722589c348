#define _POSIX_C_SOURCE 200809L
#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "ct_ranks.h"
#include "ct_test.h"

#include <string.h>

/* Rank r gives r values of 10 + r, into parts of *arg elements. */
static void
gather_triangle(ct_comm *comm, void *arg)
{
    const size_t part = *(const size_t *)arg;
    const int rank = comm->rank, ranks = comm->world_size;
    float mine[4], all[4 * 4];
    int64_t lengths[4] = {-1, -1, -1, -1};
    for (int i = 0; i < rank; i++) {
        mine[i] = (float)(10 + rank);
    }
    memset(all, 0x7f, sizeof all);
    const ct_span in = {mine, (size_t)rank, CT_F32};
    const ct_span out = {all, part * (size_t)ranks, CT_F32};
    CHECK(ct_comm_gather_padded(comm, &out, &in, lengths, NULL) == CT_OK);
    for (int r = 0; r < ranks; r++) {
        CHECK(lengths[r] == r);
        for (size_t i = 0; i < part; i++) {
            CHECK(all[(size_t)r * part + i] == (i < (size_t)r ? (float)(10 + r) : 0));
        }
    }
}

static void
test_parts_of_different_lengths_are_gathered_with_zeros_behind(void)
{
    for (size_t part = 3; part <= 4; part++) {
        run_ranks(4, 30.0, gather_triangle, &part);
    }
}

static void
gather_misfits(ct_comm *comm, void *arg)
{
    const size_t last = (size_t)(comm->world_size - 1);
    double mine[3] = {1.0, 2.0, 3.0}, all[6];
    int64_t lengths[2];
    ct_error err;
    const struct {
        size_t in, out;
        ct_dtype dtype, out_dtype;
        const char *says;
    } cases[] = {
        {3, 4, CT_F64, CT_F64, "rank 1 gives 3 elements; a part of out has 2"},
        {1, 3, CT_F64, CT_F64, "out of rank 1 has no part"                   },
        {1, 6, CT_F64, CT_F64, "out of rank 1 has no part"                   },
        {1, 4, CT_I64, CT_I64, "rank 1 gathers int64 into int64, rank 0"     },
        {1, 4, CT_F64, CT_I64, "rank 1 gathers float64 into int64, rank 0"   },
    };
    (void)arg;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int wrong = (size_t)comm->rank == last;
        const ct_span in = {mine, wrong ? cases[i].in : 1,
                            wrong ? cases[i].dtype : CT_F64};
        const ct_span out = {all, wrong ? cases[i].out : 4,
                             wrong ? cases[i].out_dtype : CT_F64};
        CHECK(ct_comm_gather_padded(comm, &out, &in, lengths, &err) == CT_EINVAL);
        CHECK(strstr(err.message, cases[i].says) != NULL);
    }
}

static void
test_all_ranks_learn_of_a_part_that_does_not_fit(void)
{
    run_ranks(2, 30.0, gather_misfits, NULL);
}

static void
test_gathering_parts_survives_a_lack_of_memory(void)
{
    ct_comm *comm = ct_comm_self_new();
    int32_t mine = 7, all[2] = {0, 0};
    const ct_span in = {&mine, 1, CT_I32}, out = {all, 2, CT_I32};
    int64_t length;
    ct_error err;
    for (size_t n = 1; n <= 2; n++) {
        ct_alloc_fail_after(n);
        CHECK(ct_comm_gather_padded(comm, &out, &in, &length, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
    }
    CHECK(ct_comm_gather_padded(comm, &out, &in, &length, NULL) == CT_OK);
    CHECK(length == 1 && all[0] == 7 && all[1] == 0);
    comm->ops->free(comm);
}

int
main(void)
{
    test_parts_of_different_lengths_are_gathered_with_zeros_behind();
    test_all_ranks_learn_of_a_part_that_does_not_fit();
    test_gathering_parts_survives_a_lack_of_memory();
    return 0;
}
