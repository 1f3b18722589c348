/* A rank of a group over NCCL, for the files that implement it. */
#ifndef CT_CUDA_NCCL_MEMBER_H
#define CT_CUDA_NCCL_MEMBER_H

#include "core/comm/comm.h"
#include "nccl.h"
#include "nccl_staging.h"

typedef struct ct_nccl_member {
    ct_comm base; /* first: a ct_comm * of ours is a ct_nccl_member * */
    const ct_nccl *nccl;
    ct_nccl_handle handle; /* NULL after an error */
    cudaStream_t stream;
    double timeout_seconds;
    ct_nccl_staging staging;
    float *token; /* one element of the device's memory, for barrier */
} ct_nccl_member;

extern const ct_comm_ops ct_nccl_ops;

/* ---- nccl_wait.c: every failure names the collective `what` and the rank -----------
 */

/* CT_ECOMM with NCCL's word for it, unless the call succeeded or is being taken in. */
CT_NODISCARD ct_status ct_nccl_check_on(const ct_nccl_member *comm,
                                        ct_nccl_result result, const char *what,
                                        ct_error *err);

/* Aborts the group, and returns the status. */
ct_status ct_nccl_give_up(ct_nccl_member *comm, ct_status status);

/* Says that the group broke before. */
CT_NODISCARD ct_status ct_nccl_fail_broken(const ct_nccl_member *comm, const char *what,
                                           ct_error *err);

/* An event behind what is on the stream so far; the caller's. */
CT_NODISCARD ct_status ct_nccl_mark(const ct_nccl_member *comm, cudaEvent_t *done,
                                    ct_error *err);

/* ct_comm_follow. */
ct_status ct_nccl_follow(ct_comm *comm, void *stream, ct_error *err);

/* Waits for NCCL to take the last call in and, with `done`, for the stream to reach it;
 * gives the group up on failure. */
CT_NODISCARD ct_status ct_nccl_settle(ct_nccl_member *comm, const cudaEvent_t *done,
                                      const char *what, ct_error *err);

/* Waits for all that is on the stream so far. */
CT_NODISCARD ct_status ct_nccl_settle_stream(ct_nccl_member *comm, const char *what,
                                             ct_error *err);

/* ---- nccl_join.c: entries of the table ---------------------------------------------
 */

ct_status
ct_nccl_split(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err);
void ct_nccl_free(ct_comm *comm);

#endif
