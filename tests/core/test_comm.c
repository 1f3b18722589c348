#include "core/ct_alloc.h"
#include "core/ct_comm.h"
#include "ct_test.h"

#include <string.h>

static void
test_a_group_of_one_is_rank_zero_of_one(void)
{
    ct_comm *comm = ct_comm_self_new();
    CHECK(comm != NULL && comm->rank == 0 && comm->world_size == 1);
    CHECK(strcmp(comm->ops->name, "self") == 0);
    CHECK(comm->ops->barrier(comm, NULL) == CT_OK);
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
        CHECK(comm->ops->all_reduce(comm, &span, ops[i], NULL) == CT_OK);
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
    CHECK(comm->ops->all_gather(comm, &out, &in, NULL) == CT_OK);
    CHECK(to[0] == 1.0f && to[1] == 2.0f);
    to[0] = to[1] = 0.0f;
    CHECK(comm->ops->reduce_scatter(comm, &out, &in, CT_REDUCE_MEAN, NULL) == CT_OK);
    CHECK(to[0] == 1.0f && to[1] == 2.0f);
    CHECK(comm->ops->all_gather(comm, &in, &in, NULL) == CT_OK && from[1] == 2.0f);

    ct_error err;
    const ct_span longer = {to, 3, CT_F32};
    CHECK(comm->ops->all_gather(comm, &longer, &in, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "3 of float32") != NULL);
    const ct_span other = {to, 2, CT_I32};
    CHECK(comm->ops->reduce_scatter(comm, &other, &in, CT_REDUCE_SUM, &err) ==
          CT_EINVAL);
    CHECK(strstr(err.message, "int32") != NULL);
    comm->ops->free(comm);
}

static void
test_only_rank_zero_can_broadcast(void)
{
    ct_comm *comm = ct_comm_self_new();
    ct_error err;
    const ct_span nothing = {NULL, 0, CT_F32};
    CHECK(comm->ops->broadcast(comm, &nothing, 0, &err) == CT_OK);
    CHECK(comm->ops->broadcast(comm, &nothing, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "got 1") != NULL);
    comm->ops->free(comm);
}

static void
test_no_memory_gives_no_group(void)
{
    ct_alloc_fail_after(1);
    CHECK(ct_comm_self_new() == NULL);
    ct_alloc_fail_after(0);
}

int
main(void)
{
    test_a_group_of_one_is_rank_zero_of_one();
    test_reductions_of_one_rank_change_nothing();
    test_gather_and_scatter_of_one_rank_copy();
    test_only_rank_zero_can_broadcast();
    test_no_memory_gives_no_group();
    return 0;
}
