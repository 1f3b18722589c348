/* Gradients of threads, bucket by bucket. */
#include "core/ddp/reducer.h"
#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "ct_ranks.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    RANKS = 3,
    PARAMS = 5,
    MOST = 64
};

static const ct_bucket_limits small = {.first_bytes = 16, .cap_bytes = 64};
static const ct_owners for_all = {.of = NULL};

/* ---- the plan -------------------------------------------------------------------- */

static void
test_buckets_take_parameters_in_reverse_up_to_their_limits(void)
{
    const ct_span params[] = {
        {.n = 10},
        {.n = 8},
        {.n = 8},
        {.n = 3, .dtype = CT_F64},
        {.n = 2},
        {.n = 2}
    };
    ct_reducer r;
    CHECK(ct_reducer_init(&r, &ct_device_cpu, NULL, params, 6, &small, &for_all,
                          NULL) == CT_OK);
    CHECK(r.plan.n_buckets == 4);
    CHECK(r.plan.buckets[0].n == 4 && r.plan.buckets[0].n_params == 2);
    CHECK(r.plan.buckets[1].n == 3 && r.plan.buckets[1].dtype == CT_F64);
    CHECK(r.plan.buckets[2].n == 16 && r.plan.buckets[3].n == 10);
    CHECK(r.plan.order[0] == 5 && r.plan.order[1] == 4 && r.plan.order[2] == 3);
    CHECK(r.plan.order[3] == 2 && r.plan.order[4] == 1 && r.plan.order[5] == 0);
    CHECK(r.plan.offset[4] == 2 && r.plan.offset[1] == 8);
    ct_reducer_fini(&r);
}

static void
test_long_parameters_are_alone(void)
{
    const ct_span params[] = {{.n = 1}, {.n = 25}, {.n = 1}};
    const ct_bucket_limits limits = {
        .first_bytes = 64, .cap_bytes = 64, .alone_bytes = 100};
    ct_reducer r;
    CHECK(ct_reducer_init(&r, &ct_device_cpu, NULL, params, 3, &limits, &for_all,
                          NULL) == CT_OK);
    CHECK(r.plan.n_buckets == 2 && r.plan.buckets[0].n == 2 && r.plan.buckets[1].alone);
    CHECK(r.plan.bucket_of[0] == 0 && r.plan.bucket_of[1] == 1 &&
          r.plan.bucket_of[2] == 0);
    ct_reducer_fini(&r);
}

static void
test_every_owner_has_one_bucket_of_a_dtype(void)
{
    const int owners[] = {0, 1, 0, CT_EVERY_RANK, 0, 1, 0};
    const ct_span params[] = {
        {.n = 8},
        {.n = 4},
        {.n = 9},
        {.n = 1},
        {.n = 3},
        {.n = 4},
        {.n = 2, .dtype = CT_F64}
    };
    const ct_owners of_two = {owners, 2};
    ct_reducer r;
    CHECK(ct_reducer_init(&r, &ct_device_cpu, NULL, params, 7, &small, &of_two, NULL) ==
          CT_OK);
    CHECK(r.plan.n_buckets == 5);
    CHECK(r.plan.buckets[0].dtype == CT_F64 && r.plan.buckets[0].owner == 0);
    CHECK(r.plan.buckets[1].owner == 1 && r.plan.buckets[1].n == 8);
    CHECK(r.plan.buckets[2].owner == 0 && r.plan.buckets[2].n == 12);
    CHECK(r.plan.buckets[3].owner == CT_EVERY_RANK && r.plan.buckets[3].n == 1);
    CHECK(r.plan.bucket_of[2] == 2 && r.plan.bucket_of[1] == 1);
    CHECK(r.plan.bucket_of[0] == 4 && r.plan.buckets[4].alone);
    CHECK(r.plan.buckets[4].owner == 0);
    ct_reducer_fini(&r);
}

static void
test_an_owner_is_a_rank(void)
{
    const int owners[] = {0, 2};
    const ct_span params[] = {{.n = 8}, {.n = 4}};
    const ct_owners of_two = {owners, 2};
    ct_reducer r;
    ct_error err;
    CHECK(ct_reducer_init(&r, &ct_device_cpu, NULL, params, 2, &small, &of_two, &err) ==
          CT_EINVAL);
    CHECK(strstr(err.message, "owner of parameter 1 is 2; expected a rank of 2"));
}

static void
test_a_plan_survives_every_lack_of_memory(void)
{
    const ct_span params[] = {{.n = 1}, {.n = 25}};
    ct_status status = CT_ENOMEM;
    for (size_t n = 1; status == CT_ENOMEM; n++) {
        ct_reducer r;
        ct_alloc_fail_after(n);
        status = ct_reducer_init(&r, &ct_device_streamed, &ct_the_stream, params, 2,
                                 &small, &for_all, NULL);
        ct_alloc_fail_after(0);
        CHECK((status == CT_OK) == (n > 8));
        if (status == CT_OK) {
            ct_reducer_fini(&r);
        }
    }
}

/* ---- cycles ---------------------------------------------------------------------- */

/* What a rank has: gradients of all parameters, and the buckets' memory. */
typedef struct model {
    ct_reducer reducer;
    float memory[PARAMS][MOST], grads[PARAMS][MOST];
    ct_span spans[PARAMS];
    ct_owners owners;
} model;

static void
model_init(model *m, const ct_bucket_limits *limits)
{
    static const size_t lengths[PARAMS] = {20, 3, 1, 9, 2};
    for (size_t i = 0; i < PARAMS; i++) {
        m->spans[i] = (ct_span){m->grads[i], lengths[i], CT_F32};
    }
    CHECK(ct_reducer_init(&m->reducer, &ct_device_streamed, &ct_the_stream, m->spans,
                          PARAMS, limits, &m->owners, NULL) == CT_OK);
    for (size_t b = 0; b < m->reducer.plan.n_buckets; b++) {
        if (!m->reducer.plan.buckets[b].alone) {
            ct_reducer_set_memory(&m->reducer, b, m->memory[b]);
        }
    }
}

static float
value(int rank, size_t param, size_t at)
{
    return (float)(rank + 1) * ((float)param + 0.25f * (float)at);
}

static void
fill(model *m, int rank)
{
    for (size_t i = 0; i < PARAMS; i++) {
        for (size_t k = 0; k < m->spans[i].n; k++) {
            m->grads[i][k] = value(rank, i, k);
        }
    }
}

/* The mean of 1, 2 and 3 times a value is twice the value. */
static void
check_means(const model *m, int rank)
{
    for (size_t i = 0; i < PARAMS; i++) {
        const int owner = m->owners.of == NULL ? CT_EVERY_RANK : m->owners.of[i];
        if (owner != CT_EVERY_RANK && owner != rank) {
            continue;
        }
        const float *got = m->reducer.params[i].place.data;
        for (size_t k = 0; k < m->spans[i].n; k++) {
            CHECK(got[k] == value(1, i, k));
        }
    }
}

/* Ranks announce in different orders: the collectives are the same all the same. */
static void
average_in_any_order(ct_comm *comm, void *arg)
{
    model m = {0};
    model_init(&m, arg);
    for (int cycle = 0; cycle < 3; cycle++) {
        fill(&m, comm->rank);
        ct_reducer_begin(&m.reducer);
        for (size_t k = 0; k < PARAMS; k++) {
            const size_t i = (k * (size_t)(comm->rank + 1) + (size_t)cycle) % PARAMS;
            CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
            CHECK(ct_reducer_is_complete(&m.reducer, i));
        }
        CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
        check_means(&m, comm->rank);
    }
    CHECK(m.reducer.label.call == 3 * m.reducer.plan.n_buckets);
    ct_reducer_fini(&m.reducer);
}

/* Parameters come in their order, the reverse of the plan's: in the first cycle nothing
 * can go before the last has come, in the second each goes as soon as it is full. Rank
 * 0 says what the order is, whatever it was on the others. */
static void
learn_the_order(ct_comm *comm, void *arg)
{
    model m = {0};
    model_init(&m, arg);
    const size_t n = m.reducer.plan.n_buckets;
    CHECK(n == PARAMS);
    for (int cycle = 0; cycle < 3; cycle++) {
        fill(&m, comm->rank);
        ct_reducer_begin(&m.reducer);
        for (size_t k = 0; k < PARAMS; k++) {
            const size_t i = comm->rank == 1 && cycle == 0 ? PARAMS - 1 - k : k;
            CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
            CHECK(m.reducer.started ==
                  (cycle > 0 || comm->rank == 1 || k == PARAMS - 1 ? k + 1 : 0));
        }
        CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
        check_means(&m, comm->rank);
        for (size_t turn = 0; turn < n; turn++) {
            CHECK(m.reducer.turns[turn] == (int64_t)(n - 1 - turn));
        }
    }
    ct_reducer_fini(&m.reducer);
}

static void
test_buckets_take_turns_as_they_were_full_on_rank_0(void)
{
    ct_bucket_limits alone = small;
    alone.alone_bytes = 1;
    run_ranks(RANKS, 30.0, learn_the_order, &alone);
}

/* Only the owner's are averages, in buckets and where they lie; with nothing allowed
 * under way, all but the last are settled as soon as they are started. */
static void
average_for_owners(ct_comm *comm, void *arg)
{
    static const int owners[PARAMS] = {0, 1, 1, 2, CT_EVERY_RANK};
    model m = {
        .owners = {owners, RANKS}
    };
    model_init(&m, arg);
    for (int cycle = 0; cycle < 3; cycle++) {
        fill(&m, comm->rank);
        ct_reducer_begin(&m.reducer);
        for (size_t i = PARAMS; i-- > 0;) {
            CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
            CHECK(m.reducer.settled + 1 >= m.reducer.started);
        }
        CHECK(m.reducer.started == m.reducer.plan.n_buckets);
        CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
        CHECK(m.reducer.settled == m.reducer.started && m.reducer.under_way == 0);
        check_means(&m, comm->rank);
    }
    ct_reducer_fini(&m.reducer);
}

static void
test_owners_get_the_averages(void)
{
    ct_bucket_limits limits = small;
    run_ranks(RANKS, 30.0, average_for_owners, &limits);
    limits.alone_bytes = 1;
    run_ranks(RANKS, 30.0, average_for_owners, &limits);
}

static void
bring_averages_back(ct_comm *comm, void *arg)
{
    model m = {0};
    model_init(&m, arg);
    fill(&m, comm->rank);
    m.reducer.copies_back = true;
    m.reducer.factor = 0.5;
    ct_reducer_begin(&m.reducer);
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
    }
    CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK(m.grads[i][0] == value(0, i, 0));
    }
    ct_reducer_fini(&m.reducer);
}

static void
test_averages_do_not_depend_on_the_order_of_arrival(void)
{
    ct_bucket_limits limits = small;
    run_ranks(RANKS, 30.0, average_in_any_order, &limits);
    limits.alone_bytes = 20;
    run_ranks(RANKS, 30.0, average_in_any_order, &limits);
    run_ranks(RANKS, 30.0, bring_averages_back, &limits);
}

static void
miss_a_gradient(ct_comm *comm, void *arg)
{
    model m = {0};
    ct_error err;
    model_init(&m, arg);
    fill(&m, comm->rank);
    ct_reducer_begin(&m.reducer);
    for (size_t i = 1; i < PARAMS; i++) {
        CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
    }
    CHECK(ct_reducer_finish(&m.reducer, comm, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "parameter 0 has no gradient") == 0);
    CHECK(!m.reducer.active);
    ct_reducer_fini(&m.reducer);
}

/* The first cycle counts how often each comes; the next waits for as many. */
static void
learn_how_often(ct_comm *comm, void *arg)
{
    model m = {0};
    model_init(&m, arg);
    fill(&m, comm->rank);
    m.reducer.learning = true;
    ct_reducer_begin(&m.reducer);
    for (size_t k = 0; k < PARAMS + 1; k++) {
        const size_t i = k % PARAMS;
        CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
        CHECK(m.reducer.started == 0 && !ct_reducer_is_complete(&m.reducer, i));
    }
    CHECK(m.reducer.params[0].seen == 2 && m.reducer.params[1].seen == 1);
    CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
    check_means(&m, comm->rank);
    ct_reducer_fini(&m.reducer);
}

static void
spread_a_nan(ct_comm *comm, void *arg)
{
    model m = {0};
    model_init(&m, arg);
    fill(&m, comm->rank);
    m.grads[3][4] = comm->rank == 1 ? NAN : 0.0f;
    m.grads[0][0] = comm->rank == 2 ? INFINITY : 0.0f;
    ct_reducer_begin(&m.reducer);
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK(ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], NULL) == CT_OK);
    }
    CHECK(ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
    CHECK(isnan(((float *)m.reducer.params[3].place.data)[4]));
    CHECK(isinf(((float *)m.reducer.params[0].place.data)[0]));
    ct_reducer_fini(&m.reducer);
}

static void
test_cycles_that_are_out_of_the_ordinary(void)
{
    ct_bucket_limits limits = small;
    run_ranks(RANKS, 30.0, miss_a_gradient, &limits);
    run_ranks(RANKS, 30.0, learn_how_often, &limits);
    run_ranks(RANKS, 30.0, spread_a_nan, &limits);
}

/* Where another rank is gone, the cycle ends with the reason and can be left. */
static void
lose_a_rank(ct_comm *comm, void *arg)
{
    model m = {0};
    ct_error err;
    ct_status status = CT_OK;
    if (comm->rank == 1) {
        return;
    }
    model_init(&m, arg);
    fill(&m, comm->rank);
    ct_reducer_begin(&m.reducer);
    for (size_t i = PARAMS; status == CT_OK && i-- > 0;) {
        status = ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], &err);
    }
    CHECK(status == CT_ECOMM && strstr(err.message, "all_reduce") != NULL);
    ct_reducer_abort(&m.reducer, comm);
    CHECK(!m.reducer.active);
    ct_reducer_fini(&m.reducer);
}

static void
test_a_rank_that_is_gone_is_told(void)
{
    ct_bucket_limits limits = small;
    run_ranks(RANKS, 30.0, lose_a_rank, &limits);
}

/* Gradients are never averaged with what another rank means as something else, however
 * alike both are in shape, be it in the first cycle or later. */
static void
average_something_else(ct_comm *comm, void *arg)
{
    const int cycles = *(const int *)arg;
    ct_bucket_limits limits = small;
    float other[MOST] = {0};
    model m = {0};
    ct_error err;
    model_init(&m, &limits);
    for (int cycle = 0; cycle <= cycles; cycle++) {
        fill(&m, comm->rank);
        ct_reducer_begin(&m.reducer);
        ct_status status = CT_OK;
        const ct_span alike = {other, m.reducer.plan.buckets[0].n, CT_F32};
        if (cycle == cycles && comm->rank == 1) {
            status = ct_comm_all_reduce(comm, &alike, CT_REDUCE_MEAN, &err);
        }
        for (size_t i = PARAMS; status == CT_OK && i-- > 0;) {
            status = ct_reducer_announce(&m.reducer, comm, i, &m.spans[i], &err);
        }
        if (cycle < cycles) {
            CHECK(status == CT_OK &&
                  ct_reducer_finish(&m.reducer, comm, NULL) == CT_OK);
            continue;
        }
        CHECK(status == CT_EINVAL);
        CHECK(strstr(err.message, "averages 'gradients of replicated parameters'"));
        CHECK(strstr(err.message, "rank 1 calls all_reduce"));
        ct_reducer_abort(&m.reducer, comm);
    }
    ct_reducer_fini(&m.reducer);
}

static void
test_gradients_are_not_averaged_with_something_else(void)
{
    for (int cycles = 0; cycles < 3; cycles++) {
        run_ranks(RANKS, 30.0, average_something_else, &cycles);
    }
}

/* ---- making ranks alike ---------------------------------------------------------- */

static void
take_over_spans(ct_comm *comm, void *arg)
{
    (void)arg;
    enum {
        LONG = 300000
    };
    double *longer = ct_calloc(LONG, sizeof *longer);
    int16_t words[3] = {(int16_t)comm->rank, 5, (int16_t)comm->rank};
    bool flag = comm->rank == 1;
    CHECK(longer != NULL);
    longer[LONG - 1] = comm->rank;
    const ct_span spans[] = {
        {words,  3,    CT_I16 },
        {NULL,   0,    CT_F32 },
        {&flag,  1,    CT_BOOL},
        {longer, LONG, CT_F64 },
        {words,  1,    CT_I16 },
    };
    CHECK(ct_comm_broadcast_spans(comm, spans, 5, 1, NULL) == CT_OK);
    CHECK(words[0] == 1 && words[2] == 1 && flag && longer[LONG - 1] == 1.0);
    ct_free(longer);
}

static void
compare_lines(ct_comm *comm, void *arg)
{
    (void)arg;
    static const char *const lines[RANKS] = {"a 1\nb 2\n", "a 1\nb 2\n", "a 1\nb 3\n"};
    static const char *const longer[RANKS] = {"a\n", "a\nb\n", "a\n"};
    ct_error err;
    CHECK(ct_comm_check_lines(comm, "line", "a\n", 2, &err) == CT_OK);
    CHECK(ct_comm_check_lines(comm, "line", "", 0, &err) == CT_OK);
    CHECK(ct_comm_check_lines(comm, "line", lines[comm->rank], 8, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "line 1 is 'b 2' on rank 0 and 'b 3' on rank 2"));
    CHECK(ct_comm_check_lines(comm, "line", longer[comm->rank],
                              strlen(longer[comm->rank]), &err) == CT_EINVAL);
    CHECK(strstr(err.message, "line 1 is 'none' on rank 0 and 'b' on rank 1"));
}

int
main(void)
{
    test_buckets_take_parameters_in_reverse_up_to_their_limits();
    test_long_parameters_are_alone();
    test_every_owner_has_one_bucket_of_a_dtype();
    test_an_owner_is_a_rank();
    test_a_plan_survives_every_lack_of_memory();
    test_averages_do_not_depend_on_the_order_of_arrival();
    test_buckets_take_turns_as_they_were_full_on_rank_0();
    test_owners_get_the_averages();
    test_cycles_that_are_out_of_the_ordinary();
    test_a_rank_that_is_gone_is_told();
    test_gradients_are_not_averaged_with_something_else();
    run_ranks(RANKS, 30.0, take_over_spans, NULL);
    run_ranks(RANKS, 30.0, compare_lines, NULL);
    return 0;
}
