/* A unit's groups are gathered, released, reduced and accounted for on 1 to 4 ranks. */
#include "core/base/alloc.h"
#include "core/fsdp/unit.h"
#include "ct_ranks.h"
#include "ct_streamed.h"

#include <string.h>

enum {
    SHARE = 96, /* elements that a rank has of each group */
    GROUPS = 2
};

typedef struct fixture {
    ct_fsdp unit;
    ct_fsdp_ledger ledger;
    ct_mapping full, grads;
    float shards[GROUPS][SHARE];
    ct_span spans[GROUPS];
} fixture;

static float
value_of(size_t group, size_t element)
{
    return (float)(group * 1000 + element) / 8.0F; /* exact in bfloat16 up to 32 */
}

static void
open_unit(fixture *f, const ct_comm *comm, ct_dtype compute, ct_dtype reduce)
{
    const size_t n = SHARE * (size_t)comm->world_size;
    const ct_fsdp_group groups[GROUPS] = {
        {.n = n, .trainable = true, .full = compute},
        {.n = n, .full = compute},
    };
    CHECK(ct_fsdp_init(&f->unit, &ct_device_streamed, groups, GROUPS, comm->world_size,
                       NULL) == CT_OK);
    CHECK(ct_mapping_open(&f->full, ct_fsdp_full_bytes(&f->unit), false, NULL) ==
          CT_OK);
    CHECK(ct_mapping_open(&f->grads, ct_fsdp_grad_bytes(&f->unit), false, NULL) ==
          CT_OK);
    f->ledger = (ct_fsdp_ledger){.live = 0};
    f->unit.ledger = &f->ledger;
    f->unit.stream = &ct_the_stream;
    f->unit.full = &f->full;
    f->unit.grads = &f->grads;
    f->unit.config = (ct_fsdp_config){
        .reduce = reduce, .predivide = 1.0, .postdivide = (double)comm->world_size};
    for (size_t g = 0; g < GROUPS; g++) {
        for (size_t i = 0; i < SHARE; i++) {
            f->shards[g][i] = value_of(g, (size_t)comm->rank * SHARE + i);
        }
        f->spans[g] = (ct_span){f->shards[g], SHARE, CT_F32};
    }
}

static void
close_unit(fixture *f)
{
    ct_fsdp_fini(&f->unit);
    ct_mapping_close(&f->full);
    ct_mapping_close(&f->grads);
    ct_fsdp_ledger_close(&f->ledger, &ct_device_streamed);
}

static void
gathers_and_releases(ct_comm *comm, void *arg)
{
    fixture f;
    const size_t n = SHARE * (size_t)comm->world_size;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    CHECK(comm->label == NULL); /* the next collective is not the unit's */
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK); /* nothing to do */
    const float *full = f.full.data;
    for (size_t g = 0; g < GROUPS; g++) {
        for (size_t i = 0; i < n; i++) {
            CHECK(full[f.unit.groups[g].at / sizeof *full + i] == value_of(g, i));
        }
    }
    CHECK(f.ledger.live == f.full.bytes && f.ledger.peak == f.full.bytes);
    ct_fsdp_release(&f.unit);
    CHECK(full[1] == 0.0F && f.ledger.live == 0 && f.ledger.peak == f.full.bytes);
    close_unit(&f);
}

/* Begun once, on the account from then on; the shards may change meanwhile. */
static void
begins_to_gather(ct_comm *comm, void *arg)
{
    fixture f;
    const size_t n = SHARE * (size_t)comm->world_size;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    CHECK(f.ledger.begun == 1 && f.ledger.live == f.full.bytes && !f.unit.gathered);
    memset(f.shards, 0, sizeof f.shards);
    ct_fsdp_ledger other = {.live = 0};
    ct_fsdp_set_ledger(&f.unit, &other);
    CHECK(f.ledger.begun == 0 && other.begun == 1 && other.live == f.full.bytes);
    CHECK(ct_fsdp_gather(&f.unit, comm, NULL, NULL) == CT_OK);
    const float *full = f.full.data;
    for (size_t g = 0; g < GROUPS; g++) {
        for (size_t i = 0; i < n; i++) {
            CHECK(full[f.unit.groups[g].at / sizeof *full + i] == value_of(g, i));
        }
    }
    CHECK(other.begun == 0 && other.peak == f.full.bytes && f.unit.gathered);
    ct_fsdp_release(&f.unit);
    CHECK(other.live == 0);
    ct_fsdp_ledger_close(&other, &ct_device_streamed);
    close_unit(&f);
}

static void
drops_what_has_begun(ct_comm *comm, void *arg)
{
    fixture f;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    ct_fsdp_cancel_gather(&f.unit, comm); /* nothing to do */
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    ct_fsdp_cancel_gather(&f.unit, comm);
    CHECK(f.ledger.begun == 0 && f.ledger.live == 0 && !f.unit.begun);
    CHECK(((const float *)f.full.data)[1] == 0.0F);
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK); /* in step again */
    CHECK(((const float *)f.full.data)[1] == value_of(0, 1));
    ct_fsdp_release(&f.unit);
    close_unit(&f);
}

/* The second group cannot be begun: the first is waited for and let go. */
static void
begins_all_groups_or_none(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    f.spans[1].n = SHARE - 1;
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "a shard has 95 elements") != NULL);
    CHECK(f.ledger.begun == 0 && f.ledger.live == 0 && !f.unit.begun);
    f.spans[1].n = SHARE;
    f.unit.config.gather_bits = 8;
    CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "quantized to 8 bits") != NULL);
    close_unit(&f);
}

/* Rank 0 is alone, and has nothing then; where that shows first is the group's own. */
static void
ends_in_an_error_without_the_others(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    (void)arg;
    if (comm->rank != 0) {
        return;
    }
    open_unit(&f, comm, CT_F32, CT_F32);
    ct_status status = ct_fsdp_begin_gather(&f.unit, comm, f.spans, &err);
    status = status == CT_OK ? ct_fsdp_gather(&f.unit, comm, NULL, &err) : status;
    CHECK(status == CT_ECOMM);
    CHECK(!f.unit.begun && !f.unit.gathered);
    CHECK(f.ledger.begun == 0 && f.ledger.live == 0);
    close_unit(&f);
}

/* Each rank gives rank + 1 for every element, twice where `adds`. */
static void
give_gradients(fixture *f, const ct_comm *comm, bool wide, bool adds)
{
    const size_t n = SHARE * (size_t)comm->world_size;
    const size_t full = f->ledger.live;
    float grad[SHARE * MAX_RANKS];
    const ct_span span = {grad, n, CT_F32};
    for (size_t i = 0; i < n; i++) {
        grad[i] = (float)(comm->rank + 1);
    }
    for (int k = 0; k < (adds ? 2 : 1); k++) {
        CHECK(ct_fsdp_take_grad(&f->unit, 0, 0, &span, k > 0, wide, NULL) == CT_OK);
        const ct_dtype held = wide ? CT_F32 : f->unit.config.reduce;
        CHECK(f->unit.holds_grads && f->unit.grad_dtype == held);
        CHECK(f->ledger.live ==
              full + f->unit.groups[GROUPS].grad_at * ct_dtype_size(held));
    }
}

static void
check_reduced(fixture *f, ct_comm *comm, bool adds_to_shard, float expected)
{
    float out[SHARE];
    const ct_span span = {out, SHARE, CT_F32};
    for (size_t i = 0; i < SHARE; i++) {
        out[i] = 100.0F;
    }
    CHECK(ct_fsdp_reduce(&f->unit, comm, 0, NULL, &span, adds_to_shard, NULL) == CT_OK);
    CHECK(comm->label == NULL);
    for (size_t i = 0; i < SHARE; i++) {
        CHECK(out[i] == expected + (adds_to_shard ? 100.0F : 0.0F));
    }
    const uint16_t *held = f->grads.data;
    CHECK(held[1] != 0); /* the upper half of a float, or what has two bytes */
    ct_fsdp_drop_grads(&f->unit);
    CHECK(held[1] == 0 && !f->unit.holds_grads && f->ledger.live == 0);
}

/* 1, 2, ... world_size have the mean (world_size + 1) / 2, exact in every dtype. */
static void
averages_gradients(ct_comm *comm, void *arg)
{
    fixture f;
    const ct_dtype reduce = *(const ct_dtype *)arg;
    const float mean = (float)(comm->world_size + 1) / 2.0F;
    open_unit(&f, comm, reduce, reduce);
    for (int adds = 0; adds < 2; adds++) {
        for (int wide = 0; wide < 2; wide++) {
            give_gradients(&f, comm, wide != 0, adds != 0);
            check_reduced(&f, comm, wide == 0, adds ? 2.0F * mean : mean);
        }
    }
    close_unit(&f);
}

static void
divides_before_and_after(ct_comm *comm, void *arg)
{
    fixture f;
    const float sum = (float)(comm->world_size * (comm->world_size + 1)) / 2.0F;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    f.unit.config.predivide = 2.0;
    f.unit.config.postdivide = 8.0;
    give_gradients(&f, comm, false, false);
    check_reduced(&f, comm, false, sum / 16.0F);
    give_gradients(&f, comm, false, false);
    check_reduced(&f, comm, true, sum / 16.0F);
    close_unit(&f);
}

/* Where other gradients were before. */
static void
takes_cleared_gradients_as_zero(ct_comm *comm, void *arg)
{
    fixture f;
    float one = 1.0F, out[SHARE];
    const ct_span span = {&one, 1, CT_F32}, shard = {out, SHARE, CT_F32};
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    give_gradients(&f, comm, false, false);
    ct_fsdp_drop_grads(&f.unit);
    CHECK(ct_fsdp_take_grad(&f.unit, 0, 2, &span, false, false, NULL) == CT_OK);
    CHECK(ct_fsdp_clear_grads(&f.unit, 0, 0, 2, NULL) == CT_OK);
    CHECK(ct_fsdp_clear_grads(&f.unit, 0, 3, f.unit.groups[0].n - 3, NULL) == CT_OK);
    CHECK(ct_fsdp_reduce(&f.unit, comm, 0, NULL, &shard, false, NULL) == CT_OK);
    for (size_t i = 0; i < SHARE; i++) {
        CHECK(out[i] == (comm->rank == 0 && i == 2 ? 1.0F : 0.0F));
    }
    close_unit(&f);
}

/* Every tenth parameter is on no rank, every tenth on the last alone, which has -0 of
 * it, and one begins with a value that vanishes; more than the device is given at once.
 */
static void
tells_what_no_rank_has(ct_comm *comm, void *arg)
{
    fixture f;
    enum {
        N = 7
    };
    ct_fsdp_param params[SHARE * MAX_RANKS / N];
    float out[SHARE], values[N];
    const ct_span shard = {out, SHARE, CT_F32};
    const bool last = comm->rank == comm->world_size - 1;
    open_unit(&f, comm, CT_F32, *(const ct_dtype *)arg);
    const size_t n = f.unit.groups[0].n, count = n / N;
    CHECK(ct_fsdp_clear_grads(&f.unit, 0, 0, n, NULL) == CT_OK);
    for (size_t i = 0; i < count; i++) {
        const bool vanishes = i % 10 == 8, zeros = i % 10 == 7;
        params[i] = (ct_fsdp_param){i * N, N, i % 10 == 3 ? false : !zeros || last};
        for (size_t k = 0; k < N; k++) {
            values[k] = zeros ? -0.0F : vanishes ? -1e-45F * (float)(k == 0) : 2.0F;
        }
        values[N - 1] = vanishes ? 1.0F : values[N - 1];
        const ct_span grad = {values, N, CT_F32};
        CHECK(!params[i].there ||
              ct_fsdp_take_grad(&f.unit, 0, i * N, &grad, false, false, NULL) == CT_OK);
    }
    ct_fsdp_presence presence = {params, count};
    CHECK(ct_fsdp_reduce(&f.unit, comm, 0, &presence, &shard, false, NULL) == CT_OK);
    for (size_t i = 0; i < count; i++) {
        const size_t from = (size_t)comm->rank * SHARE;
        const bool here = i * N < from + SHARE && (i + 1) * N > from;
        CHECK(!here || params[i].there == (i % 10 != 3));
    }
    for (size_t i = 0; i < SHARE; i++) {
        const size_t owner = ((size_t)comm->rank * SHARE + i) / N;
        CHECK(owner >= count || owner % 10 > 6 ||
              out[i] == (owner % 10 == 3 ? 0.0F : 2.0F));
    }
    close_unit(&f);
}

static void
lone_collectives_keep_to_this_rank(ct_comm *comm, void *arg)
{
    fixture f;
    (void)arg;
    open_unit(&f, comm, CT_F32, CT_F32);
    f.unit.config.lone_gather = f.unit.config.lone_reduce = true;
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
    const float *full = f.full.data;
    for (size_t i = 0; i < SHARE * (size_t)comm->world_size; i++) {
        const bool own = i / SHARE == (size_t)comm->rank;
        CHECK(full[i] == (own ? value_of(0, i) : 0.0F));
    }
    give_gradients(&f, comm, false, false);
    ct_fsdp_release(&f.unit);
    check_reduced(&f, comm, false,
                  (float)(comm->rank + 1) * (1.0F / (float)comm->world_size));
    close_unit(&f);
}

static void
rejects_what_does_not_fit(void)
{
    fixture f;
    ct_comm *comm = ct_comm_self_new();
    ct_error err;
    ct_fsdp unit;
    const ct_fsdp_group odd = {.n = 7, .trainable = true};
    CHECK(comm != NULL);
    CHECK(ct_fsdp_init(&unit, &ct_device_streamed, &odd, 1, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "group 0 has 7 elements") != NULL);
    const ct_fsdp_group wrong[] = {
        {.n = 8, .shard = CT_U8, .full = CT_F32},
        {.n = 8, .shard = CT_I8, .full = CT_I8, .trainable = true},
        {.n = 8, .shard = CT_F64, .full = CT_F64, .trainable = true},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(ct_fsdp_init(&unit, &ct_device_streamed, &wrong[i], 1, 2, &err) ==
              CT_EINVAL);
        CHECK(strstr(err.message, "floats alone are converted") != NULL);
    }
    ct_alloc_fail_after(1);
    CHECK(ct_fsdp_init(&unit, &ct_device_streamed, &odd, 1, 7, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    ct_fsdp_fini(&unit);
    open_unit(&f, comm, CT_F32, CT_F32);
    f.spans[1].n = SHARE - 1;
    CHECK(ct_fsdp_gather(&f.unit, comm, f.spans, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "a shard has 95 elements of float32") != NULL);
    CHECK(!f.unit.gathered && f.ledger.live == 0);
    const ct_span grad = {f.shards[0], SHARE, CT_F32};
    CHECK(ct_fsdp_take_grad(&f.unit, 0, 1, &grad, false, false, &err) == CT_EINVAL);
    CHECK(ct_fsdp_reduce(&f.unit, comm, 0, NULL, &f.spans[1], false, &err) ==
          CT_EINVAL);
    close_unit(&f);
    comm->ops->free(comm);
}

/* Of the groups' collectives, those in `lost` fail when they are waited for. */
static char works[GROUPS];
static int n_started, n_waited, lost;

static ct_status
start_a_work(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    (void)comm;
    (void)request;
    (void)err;
    *work = (ct_work *)(void *)&works[n_started++];
    return CT_OK;
}

static ct_status
wait_for_work(ct_comm *comm, ct_work *work, ct_error *err)
{
    const int i = (int)((char *)(void *)work - works);
    (void)comm;
    n_waited++;
    return (lost >> i & 1) ? ct_fail(err, CT_ECOMM, "work %d is lost", i) : CT_OK;
}

static void
waits_for_all_groups_and_tells_of_the_first_that_failed(void)
{
    fixture f;
    ct_error err;
    ct_comm *comm = ct_comm_self_new();
    CHECK(comm != NULL);
    const ct_comm_ops *own = comm->ops;
    ct_comm_ops later = *own;
    later.start = start_a_work;
    later.wait = wait_for_work;
    comm->ops = &later;
    open_unit(&f, comm, CT_F32, CT_F32);
    for (lost = 3; lost >= 0; lost--) {
        n_started = n_waited = 0;
        CHECK(ct_fsdp_begin_gather(&f.unit, comm, f.spans, NULL) == CT_OK);
        CHECK(n_started == GROUPS && f.ledger.live == f.full.bytes);
        const ct_status status = ct_fsdp_gather(&f.unit, comm, NULL, &err);
        CHECK(status == (lost == 0 ? CT_OK : CT_ECOMM) && n_waited == GROUPS);
        CHECK(!f.unit.begun && f.unit.gathered == (lost == 0) && f.ledger.begun == 0);
        if (lost != 0) {
            const char *first = lost & 1 ? "work 0 is lost" : "work 1 is lost";
            CHECK(strcmp(err.message, first) == 0 && f.ledger.live == 0);
            CHECK(((const float *)f.full.data)[1] == 0.0F);
        }
    }
    ct_fsdp_release(&f.unit);
    close_unit(&f);
    comm->ops = own;
    own->free(comm);
}

static void
an_empty_unit_is_fine(void)
{
    ct_fsdp unit;
    ct_mapping none;
    ct_fsdp_ledger ledger = {.live = 0}, other = {.live = 5, .peak = 5};
    CHECK(ct_fsdp_init(&unit, &ct_device_streamed, NULL, 0, 3, NULL) == CT_OK);
    CHECK(ct_fsdp_full_bytes(&unit) == 0 && ct_fsdp_grad_bytes(&unit) == 0);
    CHECK(ct_mapping_open(&none, 0, true, NULL) == CT_OK);
    ct_mapping_release(&none, &ledger.cache);
    CHECK(ct_mapping_obtain(&none, none.bytes, &ledger.cache, NULL) == CT_OK);
    unit.ledger = &ledger;
    unit.full = unit.grads = &none;
    ct_fsdp_set_ledger(&unit, &other);
    CHECK(unit.ledger == &other && other.live == 5);
    ct_fsdp_fini(&unit);
    ct_mapping_close(&none);
}

int
main(void)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_BF16, CT_F16};
    run_ranks(2, 0.2, ends_in_an_error_without_the_others, NULL);
    waits_for_all_groups_and_tells_of_the_first_that_failed();
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_ranks(ranks, 30.0, gathers_and_releases, NULL);
        run_ranks(ranks, 30.0, begins_to_gather, NULL);
        run_ranks(ranks, 30.0, drops_what_has_begun, NULL);
        run_ranks(ranks, 30.0, begins_all_groups_or_none, NULL);
        for (size_t d = 0; d < 3; d++) {
            ct_dtype dtype = dtypes[d];
            run_ranks(ranks, 30.0, tells_what_no_rank_has, &dtype);
            run_ranks(ranks, 30.0, averages_gradients, &dtype);
        }
        run_ranks(ranks, 30.0, divides_before_and_after, NULL);
        run_ranks(ranks, 30.0, takes_cleared_gradients_as_zero, NULL);
        run_ranks(ranks, 30.0, lone_collectives_keep_to_this_rank, NULL);
    }
    rejects_what_does_not_fit();
    an_empty_unit_is_fine();
    return 0;
}
