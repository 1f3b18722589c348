#include "core/comm/hierarchical.h"

#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_ranks.h"
#include "ct_reduce_to.h"

#include <stdint.h>
#include <string.h>

enum {
    RANKS = 6,
    OF_A_MACHINE = 3,
    LARGEST = 5003 /* more than what is gathered whole, and odd */
};

/* Small whole numbers: sums are exact, in whatever order. */
static double
value_at(int rank, size_t i)
{
    return (double)((i * 7 + (size_t)rank * 13) % 31) - 12.0;
}

static void
fill(const ct_span *span, int rank)
{
    for (size_t i = 0; i < span->n; i++) {
        const double value = value_at(rank, i);
        if (span->dtype == CT_I64) {
            ((int64_t *)span->data)[i] = (int64_t)value;
        }
        else if (span->dtype == CT_U8) {
            ((uint8_t *)span->data)[i] = (uint8_t)(value + 12.0);
        }
        else {
            ct_store(span->dtype, span->data, i, value);
        }
    }
}

/* The same collective over both; what they leave has to have the same bytes. */
static void
check_same(ct_comm *hierarchical, ct_comm *plain, const ct_request *like)
{
    const size_t item = ct_dtype_size(like->in.dtype);
    void *in[2], *out[2];
    for (int k = 0; k < 2; k++) {
        ct_request r = *like;
        in[k] = r.in.data = ct_calloc(r.in.n + 1, item);
        out[k] = r.out.data = ct_calloc(r.out.n + 1, item);
        CHECK(in[k] != NULL && out[k] != NULL);
        fill(&r.in, plain->rank);
        CHECK(ct_comm_run(k == 0 ? hierarchical : plain, &r, NULL) == CT_OK);
    }
    CHECK(memcmp(in[0], in[1], like->in.n * item) == 0);
    CHECK(memcmp(out[0], out[1], like->out.n * item) == 0);
    for (int k = 0; k < 2; k++) {
        ct_free(in[k]);
        ct_free(out[k]);
    }
}

static void
check_moves(ct_comm *hierarchical, ct_comm *plain, ct_dtype dtype, size_t n)
{
    const ct_span part = {NULL, n, dtype}, whole = {NULL, n * RANKS, dtype};
    const ct_request gathers = {.what = CT_ALL_GATHER, .in = part, .out = whole};
    const ct_request exchanges = {.what = CT_ALL_TO_ALL, .in = whole, .out = whole};
    check_same(hierarchical, plain, &gathers);
    check_same(hierarchical, plain, &exchanges);
    for (int root = 0; root < RANKS; root++) {
        const ct_request sends = {.what = CT_BROADCAST, .in = part, .root = root};
        check_same(hierarchical, plain, &sends);
    }
}

/* The roots have the same bytes; what the others have is not said. */
static void
check_reduce(ct_comm *hierarchical, ct_comm *plain, const ct_span *like,
             ct_reduce_op op)
{
    const size_t bytes = like->n * ct_dtype_size(like->dtype);
    for (int root = 0; root < RANKS; root++) {
        ct_span of[2] = {*like, *like};
        for (int k = 0; k < 2; k++) {
            of[k].data = ct_calloc(bytes + 1, 1);
            CHECK(of[k].data != NULL);
            fill(&of[k], plain->rank);
            ct_comm *comm = k == 0 ? hierarchical : plain;
            CHECK(reduce_to(comm, &of[k], op, root, NULL) == CT_OK);
        }
        CHECK(plain->rank != root || memcmp(of[0].data, of[1].data, bytes) == 0);
        ct_free(of[0].data);
        ct_free(of[1].data);
    }
}

static void
check_reductions(ct_comm *hierarchical, ct_comm *plain, ct_dtype dtype, size_t n)
{
    const ct_span part = {NULL, n, dtype}, whole = {NULL, n * RANKS, dtype};
    for (int op = CT_REDUCE_SUM; op <= CT_REDUCE_MIN; op++) {
        /* A sixth of a float is rounded twice here: see the header. */
        if (op == CT_REDUCE_MEAN && ct_dtype_is_float(dtype)) {
            continue;
        }
        const ct_request reduces = {
            .what = CT_ALL_REDUCE, .in = part, .op = (ct_reduce_op)op};
        const ct_request scatters = {.what = CT_REDUCE_SCATTER,
                                     .in = whole,
                                     .out = part,
                                     .op = (ct_reduce_op)op};
        check_same(hierarchical, plain, &reduces);
        check_same(hierarchical, plain, &scatters);
        check_reduce(hierarchical, plain, &part, (ct_reduce_op)op);
    }
}

static ct_comm *
hierarchical_of(ct_comm *comm)
{
    ct_comm *inner, *outer, *whole, *hierarchical = NULL;
    const int machine = comm->rank / OF_A_MACHINE, place = comm->rank % OF_A_MACHINE;
    CHECK(ct_comm_split(comm, machine, 0, &inner, NULL) == CT_OK);
    CHECK(ct_comm_split(comm, place, 0, &outer, NULL) == CT_OK);
    CHECK(ct_comm_split(comm, 0, 0, &whole, NULL) == CT_OK);
    CHECK(ct_comm_hierarchical_new_steal(&hierarchical, inner, outer, whole, false,
                                         NULL) == CT_OK);
    CHECK(hierarchical->rank == comm->rank && hierarchical->world_size == RANKS);
    return hierarchical;
}

static void
compare_everything(ct_comm *comm, void *arg)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_I64, CT_U8};
    static const size_t lengths[] = {0, 1, 100, LARGEST};
    ct_comm *hierarchical = hierarchical_of(comm);
    (void)arg;
    for (size_t d = 0; d < 5; d++) {
        for (size_t k = 0; k < 4; k++) {
            check_moves(hierarchical, comm, dtypes[d], lengths[k]);
            check_reductions(hierarchical, comm, dtypes[d], lengths[k]);
        }
    }
    CHECK(ct_comm_barrier(hierarchical, NULL) == CT_OK);
    hierarchical->ops->free(hierarchical);
}

static void
test_every_collective_is_that_of_one_level(void)
{
    run_ranks(RANKS, 30.0, compare_everything, NULL);
}

/* Means of 1 to 6 are exact in steps: 3 machines' ranks have 2 and 5, and 3.5. */
static void
average(ct_comm *comm, void *arg)
{
    ct_comm *hierarchical = hierarchical_of(comm);
    float *values = ct_alloc(LARGEST * sizeof *values);
    const ct_span span = {values, LARGEST, CT_F32};
    (void)arg;
    for (size_t i = 0; i < LARGEST; i++) {
        values[i] = (float)(comm->rank + 1);
    }
    CHECK(ct_comm_all_reduce(hierarchical, &span, CT_REDUCE_MEAN, NULL) == CT_OK);
    for (size_t i = 0; i < LARGEST; i++) {
        CHECK(values[i] == 3.5f);
    }
    ct_free(values);
    hierarchical->ops->free(hierarchical);
}

static void
test_means_are_those_of_all_ranks(void)
{
    run_ranks(RANKS, 30.0, average, NULL);
}

/* Several at once, of odd lengths, with a short one and a barrier in between, and one
 * run while others are under way; memory of those that have ended is used again. */
static void
begin_several(ct_comm *comm, void *arg)
{
    enum {
        MANY = 4
    };
    static const size_t lengths[MANY] = {LARGEST, 2, LARGEST - 1, LARGEST};
    ct_comm *hierarchical = hierarchical_of(comm);
    ct_work *works[MANY];
    double *values[MANY + 1];
    (void)arg;
    for (int k = 0; k <= MANY; k++) {
        values[k] = ct_alloc(LARGEST * sizeof **values);
        CHECK(values[k] != NULL);
    }
    for (int turn = 0; turn < 3; turn++) {
        for (int k = 0; k < MANY; k++) {
            const ct_request r = {
                .what = CT_ALL_REDUCE, .in = {values[k], lengths[k], CT_F64}
            };
            fill(&r.in, comm->rank + k);
            CHECK(ct_comm_start(hierarchical, &r, &works[k], NULL) == CT_OK);
            CHECK(ct_comm_barrier(hierarchical, NULL) == CT_OK);
        }
        const ct_span run = {values[MANY], LARGEST, CT_F64};
        fill(&run, comm->rank);
        CHECK(ct_comm_all_reduce(hierarchical, &run, CT_REDUCE_SUM, NULL) == CT_OK);
        for (int k = 0; k <= MANY; k++) {
            CHECK(k == MANY || ct_comm_wait(hierarchical, works[k], NULL) == CT_OK);
            for (size_t i = 0; i < (k == MANY ? LARGEST : lengths[k]); i++) {
                double sum = 0.0;
                for (int rank = 0; rank < RANKS; rank++) {
                    sum += value_at(rank + (k == MANY ? 0 : k), i);
                }
                CHECK(values[k][i] == sum);
            }
        }
    }
    for (int k = 0; k <= MANY; k++) {
        ct_free(values[k]);
    }
    hierarchical->ops->free(hierarchical);
}

static void
begin_a_broadcast(ct_comm *comm, void *arg)
{
    ct_comm *hierarchical = hierarchical_of(comm);
    ct_work *work;
    double *values = ct_alloc(LARGEST * sizeof *values);
    const ct_request r = {
        .what = CT_BROADCAST, .root = RANKS - 1, .in = {values, LARGEST, CT_F64}
    };
    (void)arg;
    CHECK(values != NULL);
    fill(&r.in, comm->rank);
    CHECK(ct_comm_start(hierarchical, &r, &work, NULL) == CT_OK);
    CHECK(ct_comm_wait(hierarchical, work, NULL) == CT_OK);
    for (size_t i = 0; i < LARGEST; i++) {
        CHECK(values[i] == value_at(RANKS - 1, i));
    }
    ct_free(values);
    hierarchical->ops->free(hierarchical);
}

static void
test_a_broadcast_may_be_begun_as_an_all_reduce_may(void)
{
    run_ranks(RANKS, 30.0, begin_a_broadcast, NULL);
}

static void
test_all_reduces_work_side_by_side(void)
{
    run_ranks(RANKS, 30.0, begin_several, NULL);
}

/* Rank 4 leaves while others have begun: each is told by wait, once for each. */
static void
lose_one_under_way(ct_comm *comm, void *arg)
{
    ct_comm *hierarchical = hierarchical_of(comm);
    float *values = ct_calloc(2 * LARGEST, sizeof *values);
    ct_work *works[2] = {NULL, NULL};
    ct_status status = CT_OK;
    int begun = 0;
    (void)arg;
    for (; comm->rank != 4 && status == CT_OK && begun < 2; begun++) {
        const ct_request r = {
            .what = CT_ALL_REDUCE, .in = {values + begun * LARGEST, LARGEST, CT_F32}
        };
        status = ct_comm_start(hierarchical, &r, &works[begun], NULL);
    }
    for (int k = 0; k < 2; k++) {
        CHECK(works[k] == NULL ||
              ct_comm_wait(hierarchical, works[k], NULL) == CT_ECOMM);
    }
    hierarchical->ops->free(hierarchical);
    ct_free(values);
}

static void
reject(ct_comm *comm, void *arg)
{
    ct_comm *hierarchical = hierarchical_of(comm), *pair = NULL,
            *one = ct_comm_self_new(), *other = ct_comm_self_new();
    float values[7] = {0};
    ct_error err;
    const ct_span part = {values, 1, CT_F32}, seven = {values, 7, CT_F32};
    (void)arg;
    CHECK(ct_comm_all_gather(hierarchical, &seven, &part, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "all_gather over 6 ranks needs 6 times") != NULL);
    CHECK(ct_comm_broadcast(hierarchical, &part, 6, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "root must be in [0, 6), got 6") != NULL);
    CHECK(ct_comm_split(hierarchical, comm->rank % 2, 0, &pair, NULL) == CT_OK);
    CHECK(pair->world_size == 3 && pair->rank == comm->rank / 2);
    CHECK(ct_comm_hierarchical_new_steal(&hierarchical, one, other, hierarchical, false,
                                         &err) == CT_EINVAL);
    CHECK(strstr(err.message, "cannot be rank 0 of the 1 of machine 0 of 1") != NULL);
    pair->ops->free(pair);
}

static void
test_what_does_not_fit_is_rejected_on_every_rank(void)
{
    run_ranks(RANKS, 30.0, reject, NULL);
}

/* Rank 4 leaves: the others are told where it was missed. */
static void
miss_one(ct_comm *comm, void *arg)
{
    ct_comm *hierarchical = hierarchical_of(comm);
    ct_error err;
    (void)arg;
    if (comm->rank != 4) {
        ct_status status = CT_OK;
        while (status == CT_OK) {
            status = ct_comm_barrier(hierarchical, &err);
        }
        CHECK(status == CT_ECOMM && strstr(err.message, "barrier on rank ") != NULL);
        CHECK(strstr(err.message, comm->rank < 3 ? " of 6, across machines: "
                                                 : " of 6, within its machine: "));
    }
    hierarchical->ops->free(hierarchical);
}

static void
test_a_missing_rank_is_reported_with_its_level(void)
{
    run_ranks(RANKS, 1.0, miss_one, NULL);
    run_ranks(RANKS, 1.0, lose_one_under_way, NULL);
}

int
main(void)
{
    test_every_collective_is_that_of_one_level();
    test_means_are_those_of_all_ranks();
    test_all_reduces_work_side_by_side();
    test_a_broadcast_may_be_begun_as_an_all_reduce_may();
    test_what_does_not_fit_is_rejected_on_every_rank();
    test_a_missing_rank_is_reported_with_its_level();
    return 0;
}
