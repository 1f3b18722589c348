#include "core/base/alloc.h"
#include "core/comm/staged.h"
#include "ct_ranks.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <string.h>

enum {
    WORLD = 3,
    MOST = 5000
};

typedef struct memory {
    int32_t in[WORLD * MOST], out[WORLD * MOST];
} memory;

static void
fill(memory *m, int rank)
{
    for (int i = 0; i < WORLD * MOST; i++) {
        m->in[i] = 100000 * rank + i;
        m->out[i] = -1;
    }
}

/* Of n elements for each rank. */
static ct_request
request_of(ct_collective what, memory *m, size_t n)
{
    ct_request request = {.what = what, .op = CT_REDUCE_SUM, .root = 1};
    const bool parts = what == CT_REDUCE_SCATTER || what == CT_ALL_TO_ALL;
    request.in = (ct_span){m->in, parts ? n * WORLD : n, CT_I32};
    if (what == CT_ALL_GATHER || what == CT_ALL_TO_ALL) {
        request.out = (ct_span){m->out, n * WORLD, CT_I32};
    }
    if (what == CT_REDUCE_SCATTER) {
        request.out = (ct_span){m->out, n, CT_I32};
    }
    return request;
}

static void
compare_with_the_group(ct_comm *comm, void *arg)
{
    static const ct_collective kinds[] = {CT_ALL_REDUCE, CT_BROADCAST, CT_ALL_GATHER,
                                          CT_REDUCE_SCATTER, CT_ALL_TO_ALL};
    static const size_t lengths[] = {1, 7, MOST, 16, 0};
    static memory here[WORLD], there[WORLD];
    memory *a = &here[comm->rank], *b = &there[comm->rank];
    ct_staged staged;
    (void)arg;
    ct_staged_init(&staged, comm, &ct_device_streamed, &ct_the_stream);
    CHECK(staged.base.rank == comm->rank && staged.base.world_size == WORLD);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            fill(a, comm->rank);
            fill(b, comm->rank);
            const ct_request own = request_of(kinds[k], a, lengths[i]);
            const ct_request over = request_of(kinds[k], b, lengths[i]);
            ct_work *work;
            CHECK(ct_comm_run(comm, &own, NULL) == CT_OK);
            CHECK(ct_comm_start(&staged.base, &over, &work, NULL) == CT_OK);
            CHECK(ct_comm_wait(&staged.base, work, NULL) == CT_OK);
            CHECK(memcmp(a, b, sizeof *a) == 0);
        }
    }
    ct_staged_fini(&staged);
}

static void
test_every_collective_is_that_of_the_group(void)
{
    run_ranks(WORLD, 30.0, compare_with_the_group, NULL);
}

static void
test_part_of_a_gathered_array(void)
{
    int32_t all[1] = {7};
    ct_comm *self = ct_comm_self_new();
    ct_staged staged;
    ct_staged_init(&staged, self, &ct_device_streamed, &ct_the_stream);
    const ct_span out = {all, 1, CT_I32};
    CHECK(ct_comm_all_gather(&staged.base, &out, &out, NULL) == CT_OK);
    CHECK(all[0] == 7);
    ct_staged_fini(&staged);
    self->ops->free(self);
}

static void
test_no_memory_is_an_error(void)
{
    float value = 1.0f;
    ct_comm *self = ct_comm_self_new();
    ct_staged staged;
    ct_error err;
    ct_staged_init(&staged, self, &ct_device_streamed, &ct_the_stream);
    const ct_span span = {&value, 1, CT_F32};
    ct_alloc_fail_after(1);
    CHECK(ct_comm_all_reduce(&staged.base, &span, CT_REDUCE_SUM, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(ct_comm_all_reduce(&staged.base, &span, CT_REDUCE_SUM, &err) == CT_OK);
    ct_staged_fini(&staged);
    self->ops->free(self);
}

int
main(void)
{
    test_every_collective_is_that_of_the_group();
    test_part_of_a_gathered_array();
    test_no_memory_is_an_error();
    return 0;
}
