#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/arena.h"
#include "core/bmuf/bmuf.h"
#include "ct_kernels.h"
#include "ct_processes.h"
#include "ct_random.h"
#include "ct_ranks.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <malloc.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
    N_TENSORS = 4,
    MOST = 200003,
    BLOCKS = 3
};

static const size_t lengths[N_TENSORS] = {5, 0, MOST, 1001};

/* A model of a rank, and what it should be by the formula written out. */
typedef struct model {
    ct_comm *comm;
    ct_bmuf bmuf;
    ct_bmuf_tensor tensors[N_TENSORS];
    ct_bmuf_list list;
    float *expected[N_TENSORS], *global[N_TENSORS], *momentum[N_TENSORS];
} model;

/* What a rank's training has added to a parameter by the end of a block. */
static float
drift(int rank, int block, size_t tensor, size_t i)
{
    ct_random r = {((uint64_t)i << 16) + (uint64_t)(tensor * 64) +
                   (uint64_t)(block * 8 + rank) + 1};
    (void)ct_random_bits(&r);
    return (float)ct_random_unit(&r);
}

static float *
floats(size_t n)
{
    float *values = ct_calloc(n + 1, sizeof *values);
    CHECK(values != NULL);
    return values;
}

static model
model_new(ct_comm *comm)
{
    model m = {.comm = comm};
    for (size_t t = 0; t < N_TENSORS; t++) {
        float *values = floats(lengths[t]);
        m.expected[t] = floats(lengths[t]);
        m.global[t] = floats(lengths[t]);
        m.momentum[t] = floats(lengths[t]);
        for (size_t i = 0; i < lengths[t]; i++) {
            values[i] = drift(comm->rank, BLOCKS, t, i);
        }
        m.tensors[t].span = (ct_span){values, lengths[t], CT_F32};
    }
    ct_bmuf_init(&m.bmuf, &ct_device_streamed, &ct_the_stream);
    return m;
}

static void
model_free(model *m)
{
    for (size_t t = 0; t < N_TENSORS; t++) {
        ct_free(m->tensors[t].span.data);
        ct_free(m->expected[t]);
        ct_free(m->global[t]);
        ct_free(m->momentum[t]);
    }
    ct_bmuf_fini(&m->bmuf);
}

/* Two ranks: the formula of the original, an operation at a time. */
static void
expect_block(model *m, const ct_bmuf_config *c, int block)
{
    const float bm = (float)c->momentum, blr = (float)c->lr;
    for (size_t t = 0; t < N_TENSORS; t++) {
        for (size_t i = 0; i < lengths[t]; i++) {
            float share[2];
            for (int rank = 0; rank < 2; rank++) {
                const float p = m->expected[t][i] + drift(rank, block, t, i);
                share[rank] = (c->momentum == 0.0 ? p : m->global[t][i] - p) / 2.0f;
            }
            const float sum = share[0] + share[1];
            const float step = blr * sum, s = bm * m->momentum[t][i] + step;
            const float reach = (float)c->reach * s, plain = m->global[t][i] - reach;
            const float moved = c->look == CT_BLOCK_PLAIN ? plain
                                : c->look == CT_BLOCK_NBM
                                    ? plain - bm * s
                                    : m->global[t][i] - (step + bm * s);
            m->momentum[t][i] = s;
            m->expected[t][i] = c->momentum == 0.0 ? sum : moved;
            m->global[t][i] = m->expected[t][i];
        }
    }
}

static void
check_expected(const model *m)
{
    for (size_t t = 0; t < N_TENSORS; t++) {
        CHECK(lengths[t] == 0 || memcmp(m->tensors[t].span.data, m->expected[t],
                                        lengths[t] * sizeof(float)) == 0);
    }
}

static void
train_blocks(ct_comm *comm, const ct_bmuf_config *config)
{
    model m = model_new(comm);
    m.list = (ct_bmuf_list){m.tensors, N_TENSORS};
    for (size_t t = 0; t < N_TENSORS; t++) {
        for (size_t i = 0; i < lengths[t]; i++) {
            m.global[t][i] = m.expected[t][i] = drift(0, BLOCKS, t, i);
        }
    }
    m.bmuf.config = *config;
    CHECK(ct_bmuf_take_over(&m.bmuf, comm, &m.list, NULL) == CT_OK);
    check_expected(&m);
    for (int block = 0; block < BLOCKS; block++) {
        for (size_t t = 0; t < N_TENSORS; t++) {
            float *values = m.tensors[t].span.data;
            for (size_t i = 0; i < lengths[t]; i++) {
                values[i] += drift(comm->rank, block, t, i);
            }
        }
        expect_block(&m, config, block);
        CHECK(ct_bmuf_synchronize(&m.bmuf, comm, &m.list, NULL) == CT_OK);
        check_expected(&m);
    }
    model_free(&m);
}

static const ct_bmuf_config configs[] = {
    {1, 1, 0.9,  0.7, CT_BLOCK_PLAIN,    1.0, 0, 32},
    {1, 1, 0.5,  1.0, CT_BLOCK_NBM,      1.0, 0, 32},
    {1, 1, 0.9,  0.7, CT_BLOCK_NESTEROV, 1.0, 0, 32},
    {1, 1, 0.0,  1.0, CT_BLOCK_PLAIN,    1.0, 0, 32},
    {1, 1, 0.75, 0.0, CT_BLOCK_PLAIN,    1.0, 0, 32},
    {1, 1, 0.25, 8.0, CT_BLOCK_PLAIN,    0.1, 0, 32},
};

static void
train_each_config(ct_comm *comm)
{
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        train_blocks(comm, &configs[i]);
    }
}

static void
train_in_thread(ct_comm *comm, void *arg)
{
    (void)arg;
    train_each_config(comm);
}

/* Threads take everything in one collective, processes batch by batch. */
static void
test_blocks_are_those_of_the_formula_bit_for_bit(void)
{
    run_processes(2, 30.0, -1, train_each_config);
    run_ranks(2, 30.0, train_in_thread, NULL);
}

/* Every dtype in one list; 16-bit copies follow their parameter. */
static void
mix_dtypes(ct_comm *comm, void *arg)
{
    const ct_bmuf_config config = {1, 1, 0.5, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32};
    double f64 = 4.0 + comm->rank;
    float f32[2] = {1.0f + (float)comm->rank, 8.0f};
    uint16_t bf16 = 0, copy[2] = {0, 0};
    ct_store(CT_BF16, &bf16, 0, 2.0 + 2.0 * comm->rank);
    const ct_bmuf_tensor tensors[] = {
        {{f32, 2, CT_F32},    {copy, 2, CT_F16}},
        {{&bf16, 1, CT_BF16}, {NULL, 0, CT_F32}},
        {{&f64, 1, CT_F64},   {NULL, 0, CT_F32}},
    };
    float wide[3];
    double wider;
    const ct_bmuf_tensor to[] = {
        {.span = {wide, 2, CT_F32}},
        {.span = {wide + 2, 1, CT_F32}},
        {.span = {&wider, 1, CT_F64}},
    };
    const ct_bmuf_list list = {tensors, 3}, saved = {to, 3};
    ct_bmuf b;
    (void)arg;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = config;
    CHECK(ct_bmuf_take_over(&b, comm, &list, NULL) == CT_OK);
    CHECK(f64 == 4.0 && f32[0] == 1.0f && ct_load(CT_BF16, &bf16, 0) == 2.0);
    CHECK(ct_load(CT_F16, copy, 0) == 1.0 && ct_load(CT_F16, copy, 1) == 8.0);
    f32[0] += (float)comm->rank; /* 1 and 2: the average is 1.5 */
    f64 += 2.0 * comm->rank;
    ct_store(CT_BF16, &bf16, 0, 2.0 + 0x1p-6 * comm->rank); /* neighbours */
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK);
    CHECK(f64 == 5.0 && f32[0] == 1.5f && ct_load(CT_BF16, &bf16, 0) == 2.0);
    CHECK(ct_load(CT_F16, copy, 0) == 1.5 && ct_load(CT_F16, copy, 1) == 8.0);
    CHECK(ct_bmuf_save(&b, &b.global, &saved, NULL) == CT_OK);
    CHECK(wide[0] == 1.5f && wide[2] == 2.0f + 0x1p-7f && wider == 5.0);
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK);
    CHECK(f64 == 5.5 && f32[0] == 1.75f); /* the momentum goes on */
    ct_bmuf_fini(&b);
}

static void
test_every_dtype_and_copies_of_lower_precision(void)
{
    run_ranks(2, 30.0, mix_dtypes, NULL);
}

static void
test_momentum_and_global_model_can_be_saved(void)
{
    const ct_bmuf_config config = {1, 1, 0.5, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32};
    float value = 3.0f, saved = 0.0f, other = 7.0f;
    const ct_bmuf_tensor tensor = {
        .span = {&value, 1, CT_F32}
    };
    const ct_bmuf_tensor to = {
        .span = {&saved, 1, CT_F32}
    };
    const ct_bmuf_tensor from = {
        .span = {&other, 1, CT_F32}
    };
    const ct_bmuf_list list = {&tensor, 1}, out = {&to, 1}, in = {&from, 1};
    ct_comm *comm = ct_comm_self_new();
    ct_error err;
    ct_bmuf b;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = config;
    CHECK(ct_bmuf_start(&b, &list, NULL) == CT_OK);
    CHECK(ct_bmuf_save(&b, &b.global, &out, NULL) == CT_OK && saved == 3.0f);
    value = 1.0f;
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK && value == 1.0f);
    CHECK(ct_bmuf_save(&b, &b.momentum, &out, NULL) == CT_OK && saved == 2.0f);
    CHECK(ct_bmuf_load(&b, &b.momentum, &in, NULL) == CT_OK);
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK && value == -2.5f);
    const ct_bmuf_list none = {&tensor, 0};
    CHECK(ct_bmuf_synchronize(&b, comm, &none, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "0 elements of float32 and had 1") != NULL);
    ct_bmuf_fini(&b);
    comm->ops->free(comm);
}

/* Two ranks whose first block has been checked load other models. */
static void
load_apart(ct_comm *comm, void *arg)
{
    static const ct_bmuf_config config = {1, 0, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32};
    float values[3] = {1.0f, 2.0f, 3.0f}, loaded[3] = {1.0f, 2.0f, 3.0f};
    const ct_bmuf_tensor tensor =
                             {
                                 .span = {values, 3, CT_F32}
    },
                         from = {.span = {loaded, 3, CT_F32}};
    const ct_bmuf_list list = {&tensor, 1}, source = {&from, 1};
    ct_error err;
    ct_bmuf b;
    (void)arg;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = config;
    CHECK(ct_bmuf_start(&b, &list, NULL) == CT_OK && !b.alike);
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK && b.alike);
    CHECK(ct_bmuf_load(&b, &b.momentum, &source, NULL) == CT_OK && b.alike);
    loaded[2] = (float)comm->rank;
    CHECK(ct_bmuf_load(&b, &b.global, &source, NULL) == CT_OK && !b.alike);
    CHECK(ct_bmuf_synchronize(&b, comm, &list, &err) == CT_EINVAL && !b.alike);
    CHECK(strstr(err.message, "the block of rank 1 began with other parameters") !=
          NULL);
    loaded[2] = 0.0f;
    CHECK(ct_bmuf_load(&b, &b.global, &source, NULL) == CT_OK);
    CHECK(ct_bmuf_synchronize(&b, comm, &list, NULL) == CT_OK && b.alike);
    ct_bmuf_fini(&b);
}

static void
test_a_loaded_global_model_is_compared_before_the_next_block(void)
{
    run_ranks(2, 60.0, load_apart, NULL);
}

static void
test_integers_are_rejected(void)
{
    int64_t value = 3;
    const ct_bmuf_tensor tensor = {
        .span = {&value, 1, CT_I64}
    };
    const ct_bmuf_list list = {&tensor, 1};
    ct_error err;
    ct_bmuf b;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = configs[0];
    CHECK(ct_bmuf_start(&b, &list, &err) == CT_EINVAL);
    CHECK(strcmp(err.message,
                 "parameter 0 is int64; only float dtypes can be averaged") == 0);
    ct_bmuf_fini(&b);
}

static void
test_no_memory_is_an_error(void)
{
    float value = 3.0f;
    const ct_bmuf_tensor tensor = {
        .span = {&value, 1, CT_F32}
    };
    const ct_bmuf_list list = {&tensor, 1};
    ct_comm *comm = ct_comm_self_new();
    for (size_t n = 1; n <= 7; n++) {
        ct_bmuf b;
        ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
        b.config = configs[0];
        ct_alloc_fail_after(n);
        CHECK(ct_bmuf_take_over(&b, comm, &list, NULL) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(ct_bmuf_take_over(&b, comm, &list, NULL) == CT_OK);
        ct_bmuf_fini(&b);
    }
    comm->ops->free(comm);
}

static size_t
bytes_in_use(void)
{
    const struct mallinfo2 found = mallinfo2();
    return found.uordblks + found.hblkhd + ct_arena_measure().used;
}

static void
test_the_memory_of_blocks_is_given_back(void)
{
    static float values[MOST];
    const ct_bmuf_tensor tensor = {
        .span = {values, MOST, CT_F32}
    };
    const ct_bmuf_list list = {&tensor, 1};
    ct_comm *comm = ct_comm_self_new();
    const size_t before = bytes_in_use();
    ct_bmuf b;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = configs[0];
    CHECK(ct_bmuf_take_over(&b, comm, &list, NULL) == CT_OK);
    CHECK(bytes_in_use() >= before + sizeof values || bytes_in_use() == 0);
    ct_bmuf_fini(&b);
    CHECK(bytes_in_use() < before + sizeof values / 2);
    comm->ops->free(comm);
}

static int n_begun, n_waited;

/* No second collective begins. */
static ct_status
start_one(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    (void)comm;
    (void)request;
    if (n_begun == 1) {
        return ct_fail(err, CT_ECOMM, "another rank did not come");
    }
    *work = (ct_work *)&n_begun;
    n_begun++;
    return CT_OK;
}

static ct_status
wait_for_one(ct_comm *comm, ct_work *work, ct_error *err)
{
    (void)comm;
    (void)err;
    CHECK(work == (ct_work *)&n_begun);
    n_waited++;
    return CT_OK;
}

/* Nothing of a block is on its way where one of its sums could not begin. */
static void
test_a_sum_that_has_begun_is_waited_for_where_the_next_fails(void)
{
    float single = 3.0f;
    double twice = 4.0;
    const ct_bmuf_tensor tensors[] = {
        {.span = {&single, 1, CT_F32}},
        {.span = {&twice, 1, CT_F64}},
    };
    const ct_bmuf_list list = {tensors, 2};
    ct_comm *alone = ct_comm_self_new();
    ct_comm_ops ops = *alone->ops;
    ct_comm comm = *alone;
    ct_error err;
    ct_bmuf b;
    ops.start = start_one;
    ops.wait = wait_for_one;
    comm.ops = &ops;
    ct_bmuf_init(&b, &ct_device_streamed, &ct_the_stream);
    b.config = configs[0];
    CHECK(ct_bmuf_take_over(&b, &comm, &list, NULL) == CT_OK);
    n_begun = n_waited = 0;
    CHECK(ct_bmuf_begin(&b, &comm, &list, &err) == CT_ECOMM);
    CHECK(strcmp(err.message, "another rank did not come") == 0);
    CHECK(n_begun == 1 && n_waited == 1 && !b.is_pending);
    ct_bmuf_fini(&b);
    alone->ops->free(alone);
}

static void
test_when_workers_meet(void)
{
    const ct_bmuf_config config = {.sync_iter = 3, .warmup = 4, .delta_bits = 32};
    static const ct_bmuf_event after[] = {
        CT_BMUF_NOTHING,    CT_BMUF_NOTHING, CT_BMUF_NOTHING,
        CT_BMUF_WARMUP_END, CT_BMUF_NOTHING, CT_BMUF_BLOCK_END,
        CT_BMUF_NOTHING,    CT_BMUF_NOTHING, CT_BMUF_BLOCK_END};
    for (int64_t n = 1; n <= 9; n++) {
        CHECK(ct_bmuf_after(&config, n) == after[n - 1]);
    }
}

static void
check_named(ct_bmuf_config config, const char *name)
{
    ct_error err;
    CHECK(ct_bmuf_check(&config, &err) == CT_EINVAL);
    CHECK(strstr(err.message, name) == err.message);
}

static void
test_bad_options_are_named(void)
{
    CHECK(ct_bmuf_check(&configs[0], NULL) == CT_OK);
    check_named((ct_bmuf_config){0, 1, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32},
                "global_sync_iter");
    check_named((ct_bmuf_config){1, -1, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32},
                "warmup_iterations");
    check_named((ct_bmuf_config){1, 1, NAN, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32},
                "block_momentum");
    check_named((ct_bmuf_config){1, 1, -0.1, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 32},
                "block_momentum");
    check_named((ct_bmuf_config){1, 1, 0.9, INFINITY, CT_BLOCK_PLAIN, 1.0, 0, 32},
                "block_lr");
    check_named((ct_bmuf_config){1, 1, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 16},
                "delta_bits must be 32, 8 or 4, got 16");
    check_named((ct_bmuf_config){2, 1, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 2, 32},
                "overlap_steps must be at least 0 and below global_sync_iter");
    check_named((ct_bmuf_config){2, 1, 0.9, 1.0, CT_BLOCK_PLAIN, 1.0, 1, 4},
                "overlap_steps is 1, which needs block_momentum above 0 and");
    check_named((ct_bmuf_config){1, 1, 0.0, 1.0, CT_BLOCK_PLAIN, 1.0, 0, 8},
                "delta_bits is 8 with block_momentum 0");
}

int
main(void)
{
    test_blocks_are_those_of_the_formula_bit_for_bit();
    test_every_dtype_and_copies_of_lower_precision();
    test_momentum_and_global_model_can_be_saved();
    test_a_loaded_global_model_is_compared_before_the_next_block();
    test_integers_are_rejected();
    test_no_memory_is_an_error();
    test_the_memory_of_blocks_is_given_back();
    test_a_sum_that_has_begun_is_waited_for_where_the_next_fails();
    test_when_workers_meet();
    test_bad_options_are_named();
    return 0;
}
