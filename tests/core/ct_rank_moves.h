/* Moves of data between ranks, held against what they are to be. */
#ifndef CT_RANK_MOVES_H
#define CT_RANK_MOVES_H

#include "core/comm/comm.h"
#include "core/comm/reduce.h"
#include "ct_processes.h"
#include "ct_rank_values.h"
#include "ct_reduce_to.h"

#include <stdint.h>

/* The reduction of all ranks' element i, by the arithmetic that all backends share. */
static inline float
reduced_at(int world_size, size_t i, ct_reduce_op op)
{
    float of_rank[MAX_PROCESSES], result;
    const void *rows[MAX_PROCESSES];
    for (int rank = 0; rank < world_size; rank++) {
        of_rank[rank] = value_at(rank, i);
        rows[rank] = &of_rank[rank];
    }
    ct_reduce(&result, rows, (size_t)world_size, 1, CT_F32, op);
    return result;
}

/* `part` and `whole` are of n floats and n of every rank. */
static inline void
gather_scatter_and_exchange(ct_comm *comm, float *whole, float *part, size_t n)
{
    const size_t ranks = (size_t)comm->world_size, mine = (size_t)comm->rank;
    const ct_span all = {whole, n * ranks, CT_F32}, one = {part, n, CT_F32};
    for (size_t i = 0; i < n; i++) {
        part[i] = value_at(comm->rank, i);
    }
    CHECK(ct_comm_all_gather(comm, &all, &one, NULL) == CT_OK);
    for (size_t i = 0; i < n * ranks; i++) {
        CHECK(whole[i] == value_at((int)(i / n), i % n));
    }
    for (size_t i = 0; i < n * ranks; i++) {
        whole[i] = value_at(comm->rank, i);
    }
    CHECK(ct_comm_reduce_scatter(comm, &one, &all, CT_REDUCE_MEAN, NULL) == CT_OK);
    for (size_t i = 0; i < n; i++) {
        CHECK(part[i] == reduced_at(comm->world_size, mine * n + i, CT_REDUCE_MEAN));
    }
    float *back = values_of(0, n * ranks);
    const ct_span others = {back, n * ranks, CT_F32};
    CHECK(ct_comm_all_to_all(comm, &others, &all, NULL) == CT_OK);
    for (size_t i = 0; i < n * ranks; i++) {
        CHECK(back[i] == value_at((int)(i / n), mine * n + i % n));
    }
    ct_free(back);
    for (int root = 0; root < comm->world_size; root++) {
        for (size_t i = 0; i < n; i++) {
            part[i] = value_at(comm->rank, i);
        }
        CHECK(reduce_to(comm, &one, CT_REDUCE_MEAN, root, NULL) == CT_OK);
        for (size_t i = 0; comm->rank == root && i < n; i++) {
            CHECK(part[i] == reduced_at(comm->world_size, i, CT_REDUCE_MEAN));
        }
    }
}

#endif
