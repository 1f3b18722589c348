/* Shards are gathered and gradients reduced as codes, on 1 to 4 ranks. */
#include "core/base/alloc.h"
#include "core/fsdp/unit.h"
#include "ct_ranks.h"
#include "ct_streamed.h"

#include <math.h>
#include <string.h>

enum {
    SHARE = 300, /* a whole block of codes and a part of one */
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

static void
gathers_within_half_a_step(ct_comm *comm, void *arg)
{
    const ct_fsdp_coder coder = {&ct_device_streamed, &ct_the_stream, comm,
                                 *(const int *)arg};
    const size_t n = SHARE * (size_t)comm->world_size;
    float shard[SHARE], full[MOST];
    for (size_t i = 0; i < SHARE; i++) {
        shard[i] = value_of(i, comm->rank);
    }
    const ct_span from = {shard, SHARE, CT_F32}, to = {full, n, CT_F32};
    CHECK(ct_fsdp_gather_quantized(&coder, &to, &from, NULL) == CT_OK);
    for (size_t i = 0; i < n; i++) {
        const double exact = value_of(i % SHARE, (int)(i / SHARE));
        CHECK(fabs((double)full[i] - exact) <= half_step(coder.bits) * (1.0 + 1e-6));
    }
}

static void
sums_and_remembers(ct_comm *comm, void *arg)
{
    const ct_fsdp_coder coder = {&ct_device_streamed, &ct_the_stream, comm,
                                 *(const int *)arg};
    const size_t n = SHARE * (size_t)comm->world_size;
    float whole[MOST], residual[MOST] = {0}, part[SHARE];
    double total[SHARE] = {0.0};
    const int rounds = 8;
    for (size_t i = 0; i < n; i++) {
        whole[i] = value_of(i % SHARE, comm->rank);
    }
    const ct_span in = {whole, n, CT_F32}, out = {part, SHARE, CT_F32};
    const float mean = 1.0F / (float)comm->world_size;
    for (int round = 0; round < rounds; round++) {
        CHECK(ct_fsdp_reduce_quantized(&coder, &out, &in, residual, NULL, mean, NULL) ==
              CT_OK);
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
              half_step(coder.bits) * (1.0 + 2.0 * half_step(coder.bits)));
    }
}

static void
forgets_without_a_residual(ct_comm *comm, void *arg)
{
    const ct_fsdp_coder coder = {&ct_device_streamed, &ct_the_stream, comm,
                                 *(const int *)arg};
    const size_t n = SHARE * (size_t)comm->world_size;
    float whole[MOST], first[SHARE], second[SHARE];
    for (size_t i = 0; i < n; i++) {
        whole[i] = value_of(i % SHARE, comm->rank);
    }
    const ct_span in = {whole, n, CT_F32}, a = {first, SHARE, CT_F32};
    const ct_span b = {second, SHARE, CT_F32};
    CHECK(ct_fsdp_reduce_quantized(&coder, &a, &in, NULL, NULL, 1.0F, NULL) == CT_OK);
    CHECK(ct_fsdp_reduce_quantized(&coder, &b, &in, NULL, NULL, 1.0F, NULL) == CT_OK);
    CHECK(memcmp(first, second, sizeof first) == 0);
}

/* Of three parameters the first is there on rank 0 alone, the second nowhere, although
 * its gradients' place is not empty, and the third on all. What is missing sends
 * nothing of its residual and keeps it. */
static void
missing_parameters_keep_their_residual(ct_comm *comm, void *arg)
{
    const ct_fsdp_coder coder = {&ct_device_streamed, &ct_the_stream, comm,
                                 *(const int *)arg};
    const size_t n = SHARE * (size_t)comm->world_size, third = n / 3;
    ct_fsdp_param params[] = {
        {0,         third,         comm->rank == 0},
        {third,     third,         false          },
        {2 * third, n - 2 * third, true           },
    };
    ct_fsdp_presence presence = {params, 3};
    float whole[MOST] = {0}, residual[MOST], part[SHARE];
    for (size_t i = 0; i < n; i++) {
        const bool there = i < third ? params[0].there : i >= 2 * third;
        whole[i] = there ? value_of(i, 0) : 0.0F;
        residual[i] = 0.25F;
    }
    const ct_span in = {whole, n, CT_F32}, out = {part, SHARE, CT_F32};
    CHECK(ct_fsdp_reduce_quantized(&coder, &out, &in, residual, &presence, 1.0F,
                                   NULL) == CT_OK);
    CHECK(params[0].there && !params[1].there && params[2].there);
    size_t kept = 0, changed = 0;
    for (size_t i = 0; i < 2 * third; i++) {
        kept += residual[i] == 0.25F;
        changed += residual[i] != 0.25F;
    }
    CHECK(comm->rank == 0 ? kept < third + third / 2 : changed == 0);
    for (size_t i = 0; i < SHARE; i++) {
        const size_t at = (size_t)comm->rank * SHARE + i;
        const double ranks = at < third ? 1.0 : at < 2 * third ? 0.0 : comm->world_size;
        const double exact = ranks * ((double)value_of(at, 0) + 0.25);
        CHECK(fabs((double)part[i] - exact) <=
              ranks * 1.25 * half_step(coder.bits) * (1.0 + 1e-6));
    }
}

static void
fails_without_memory(ct_comm *comm, void *arg)
{
    const ct_fsdp_coder coder = {&ct_device_streamed, &ct_the_stream, comm,
                                 *(const int *)arg};
    float values[SHARE] = {0}, result[SHARE];
    const ct_span in = {values, SHARE, CT_F32}, out = {result, SHARE, CT_F32};
    ct_alloc_fail_after(1);
    CHECK(ct_fsdp_gather_quantized(&coder, &out, &in, NULL) == CT_ENOMEM);
    for (size_t nth = 1; nth <= 2; nth++) {
        ct_alloc_fail_after(nth);
        CHECK(ct_fsdp_reduce_quantized(&coder, &out, &in, NULL, NULL, 1.0F, NULL) ==
              CT_ENOMEM);
    }
    ct_alloc_fail_after(0);
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
        CHECK(ct_fsdp_bits_known(bits));
    }
    CHECK(!ct_fsdp_bits_known(5));
    return 0;
}
