/* Shards are gathered and gradients reduced in quantized values, on 1 to 4 ranks. */
#include "core/base/alloc.h"
#include "core/fsdp/unit.h"
#include "ct_ranks.h"
#include "ct_streamed.h"

#include <math.h>
#include <string.h>

enum {
    SHARE = 300, /* a whole block of quantized values and a part of one */
    MOST = 4 * SHARE
};

/* Of a block whose largest value is 1. */
static double
half_step(int bits)
{
    return 0.5 / (bits == 4 ? 7.0 : 127.0);
}

/* In [-1, 1], both ends in every block. */
static float
value_of(size_t i, int rank)
{
    const float between = (float)((i * 37 + (size_t)rank * 11) % 101) / 50.0F - 1.0F;
    return i % 8 == 0 ? 1.0F : between;
}

typedef struct fixture {
    ct_fsdp unit;
    ct_fsdp_ledger ledger;
    ct_mapping full, grads;
    float residual[MOST];
} fixture;

/* A unit of one group, SHARE elements a rank. */
static void
open_unit(fixture *f, const ct_comm *comm, int bits, bool mean)
{
    const size_t n = SHARE * (size_t)comm->world_size;
    const ct_fsdp_group group = {.n = n, .trainable = true};
    *f = (fixture){.full = {0}};
    CHECK(ct_fsdp_init(&f->unit, &ct_device_streamed, &group, 1, comm->world_size,
                       NULL) == CT_OK);
    CHECK(ct_mapping_open(&f->full, ct_fsdp_full_bytes(&f->unit), false, NULL) ==
          CT_OK);
    CHECK(ct_mapping_open(&f->grads, ct_fsdp_grad_bytes(&f->unit), false, NULL) ==
          CT_OK);
    f->unit.ledger = &f->ledger;
    f->unit.stream = &ct_the_stream;
    f->unit.full = &f->full;
    f->unit.grads = &f->grads;
    f->unit.config = (ct_fsdp_config){.reduce = CT_F32,
                                      .predivide = 1.0,
                                      .postdivide = mean ? comm->world_size : 1.0,
                                      .gather_bits = bits,
                                      .reduce_bits = bits};
}

static void
close_unit(fixture *f)
{
    ct_fsdp_drop_grads(&f->unit);
    ct_fsdp_release(&f->unit);
    ct_fsdp_fini(&f->unit);
    ct_mapping_close(&f->full);
    ct_mapping_close(&f->grads);
    ct_fsdp_ledger_close(&f->ledger, &ct_device_streamed);
}

/* Reduces `whole`, of all ranks' elements, to this rank's part. */
static ct_status
reduce(fixture *f, ct_comm *comm, float *whole, ct_fsdp_presence *presence, float *part)
{
    const ct_span in = {whole, SHARE * (size_t)comm->world_size, CT_F32};
    const ct_span out = {part, SHARE, CT_F32};
    CHECK(ct_fsdp_take_grad(&f->unit, 0, 0, &in, false, false, NULL) == CT_OK);
    return ct_fsdp_reduce(&f->unit, comm, 0, presence, &out, false, NULL);
}

static void
gathers_within_half_a_step(ct_comm *comm, void *arg)
{
    fixture f;
    const int bits = *(const int *)arg;
    const size_t n = SHARE * (size_t)comm->world_size;
    float shard[SHARE];
    open_unit(&f, comm, bits, true);
    for (size_t i = 0; i < SHARE; i++) {
        shard[i] = value_of(i, comm->rank);
    }
    const ct_span from = {shard, SHARE, CT_F32};
    CHECK(ct_fsdp_gather(&f.unit, comm, &from, NULL) == CT_OK);
    const float *full = f.full.data;
    for (size_t i = 0; i < n; i++) {
        const double exact = value_of(i % SHARE, (int)(i / SHARE));
        CHECK(fabs((double)full[i] - exact) <= half_step(bits) * (1.0 + 1e-6));
    }
    close_unit(&f);
}

static void
sums_and_remembers(ct_comm *comm, void *arg)
{
    fixture f;
    const int bits = *(const int *)arg;
    const size_t n = SHARE * (size_t)comm->world_size;
    float whole[MOST], part[SHARE];
    double total[SHARE] = {0.0};
    const int rounds = 8;
    for (size_t i = 0; i < n; i++) {
        whole[i] = value_of(i % SHARE, comm->rank);
    }
    open_unit(&f, comm, bits, true);
    f.unit.residual = f.residual;
    for (int round = 0; round < rounds; round++) {
        CHECK(reduce(&f, comm, whole, NULL, part) == CT_OK);
        for (size_t i = 0; i < SHARE; i++) {
            total[i] += (double)part[i];
        }
    }
    for (size_t i = 0; i < SHARE; i++) {
        double exact = 0.0;
        for (int rank = 0; rank < comm->world_size; rank++) {
            exact += (double)value_of(i, rank) * rounds / comm->world_size;
        }
        /* What is outstanding is of the last round alone, whose largest value is 1 and
         * half a step of the round before. */
        CHECK(fabs(total[i] - exact) <=
              half_step(bits) * (1.0 + 2.0 * half_step(bits)));
    }
    close_unit(&f);
}

static void
forgets_without_a_residual(ct_comm *comm, void *arg)
{
    fixture f;
    const int bits = *(const int *)arg;
    const size_t n = SHARE * (size_t)comm->world_size;
    float whole[MOST], first[SHARE], second[SHARE];
    for (size_t i = 0; i < n; i++) {
        whole[i] = value_of(i % SHARE, comm->rank);
    }
    open_unit(&f, comm, bits, false);
    CHECK(reduce(&f, comm, whole, NULL, first) == CT_OK);
    CHECK(reduce(&f, comm, whole, NULL, second) == CT_OK);
    CHECK(memcmp(first, second, sizeof first) == 0);
    close_unit(&f);
}

/* Of three parameters the first is there on rank 0 alone, the second nowhere, although
 * its gradients' place is not empty, and the third on all. What is missing sends
 * nothing of its residual and keeps it. */
static void
missing_parameters_keep_their_residual(ct_comm *comm, void *arg)
{
    fixture f;
    const int bits = *(const int *)arg;
    const size_t n = SHARE * (size_t)comm->world_size, third = n / 3;
    ct_fsdp_param params[] = {
        {0,         third,         comm->rank == 0},
        {third,     third,         false          },
        {2 * third, n - 2 * third, true           },
    };
    ct_fsdp_presence presence = {params, 3};
    float whole[MOST] = {0}, part[SHARE];
    open_unit(&f, comm, bits, false);
    f.unit.residual = f.residual;
    for (size_t i = 0; i < n; i++) {
        const bool there = i < third ? params[0].there : i >= 2 * third;
        whole[i] = there ? value_of(i, 0) : 0.0F;
        f.residual[i] = 0.25F;
    }
    CHECK(reduce(&f, comm, whole, &presence, part) == CT_OK);
    CHECK(params[0].there && !params[1].there && params[2].there);
    size_t kept = 0, changed = 0;
    for (size_t i = 0; i < 2 * third; i++) {
        kept += f.residual[i] == 0.25F;
        changed += f.residual[i] != 0.25F;
    }
    CHECK(comm->rank == 0 ? kept < third + third / 2 : changed == 0);
    for (size_t i = 0; i < SHARE; i++) {
        const size_t at = (size_t)comm->rank * SHARE + i;
        const double ranks = at < third ? 1.0 : at < 2 * third ? 0.0 : comm->world_size;
        const double exact = ranks * ((double)value_of(at, 0) + 0.25);
        CHECK(fabs((double)part[i] - exact) <=
              ranks * 1.25 * half_step(bits) * (1.0 + 1e-6));
    }
    close_unit(&f);
}

static void
fails_without_memory(ct_comm *comm, void *arg)
{
    fixture f;
    const int bits = *(const int *)arg;
    float values[SHARE] = {0}, result[SHARE];
    const ct_span in = {values, SHARE, CT_F32}, out = {result, SHARE, CT_F32};
    open_unit(&f, comm, bits, true);
    ct_alloc_fail_after(1);
    CHECK(ct_fsdp_gather(&f.unit, comm, &in, NULL) == CT_ENOMEM && !f.unit.gathered);
    ct_alloc_fail_after(0);
    for (size_t nth = 1; nth <= 2; nth++) {
        CHECK(ct_fsdp_take_grad(&f.unit, 0, 0, &in, false, false, NULL) == CT_OK);
        ct_alloc_fail_after(nth);
        CHECK(ct_fsdp_reduce(&f.unit, comm, 0, NULL, &out, false, NULL) == CT_ENOMEM);
        ct_alloc_fail_after(0);
    }
    close_unit(&f);
}

int
main(void)
{
    for (int bits = 4; bits <= 8; bits += 4) {
        for (int world_size = 1; world_size <= 4; world_size++) {
            run_ranks(world_size, 30.0, gathers_within_half_a_step, &bits);
            run_ranks(world_size, 30.0, sums_and_remembers, &bits);
            run_ranks(world_size, 30.0, forgets_without_a_residual, &bits);
            run_ranks(world_size, 30.0, missing_parameters_keep_their_residual, &bits);
        }
        run_ranks(1, 30.0, fails_without_memory, &bits);
    }
    return 0;
}
