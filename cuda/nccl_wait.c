/* How a host waits for NCCL, which only enqueues. It asks, event and communicator in
 * turn, because a rank that died shows as an error of the communicator while the stream
 * stays busy for ever, and one that does not come shows as nothing at all, until the
 * time is up. */
#include "nccl_member.h"

#include "core/base/wait.h"
#include "status.h"

#include <sched.h>

ct_status
ct_nccl_check_on(const ct_nccl_member *comm, ct_nccl_result result, const char *what,
                 ct_error *err)
{
    if (result == 0 || result == CT_NCCL_IN_PROGRESS) {
        return CT_OK;
    }
    return ct_fail(err, CT_ECOMM, "%s on rank %d of %d: NCCL says %s", what,
                   comm->base.rank, comm->base.world_size,
                   comm->nccl->error_string(result));
}

/* Aborting frees the handle and whatever waits on the other ranks. */
ct_status
ct_nccl_give_up(ct_nccl_member *comm, ct_status status)
{
    if (comm->handle != NULL) {
        (void)comm->nccl->abort(comm->handle);
    }
    comm->handle = NULL;
    return status;
}

ct_status
ct_nccl_fail_broken(const ct_nccl_member *comm, const char *what, ct_error *err)
{
    return ct_fail(err, CT_ECOMM,
                   "%s on rank %d of %d: the group broke at an earlier error", what,
                   comm->base.rank, comm->base.world_size);
}

/* Whether NCCL has taken the last call in and, of one with an event, the stream has
 * come there. */
static ct_status
look(const ct_nccl_member *comm, const cudaEvent_t *done, const char *what, bool *ended,
     ct_error *err)
{
    ct_nccl_result result = 0;
    ct_status status = ct_nccl_check_on(
        comm, comm->nccl->async_error(comm->handle, &result), what, err);
    if (status == CT_OK) {
        status = ct_nccl_check_on(comm, result, what, err);
    }
    *ended = result != CT_NCCL_IN_PROGRESS;
    if (status != CT_OK || !*ended || done == NULL) {
        return status;
    }
    const cudaError_t busy = cudaEventQuery(*done);
    *ended = busy == cudaSuccess;
    return busy == cudaErrorNotReady ? CT_OK : ct_cuda_check(busy, what, err);
}

ct_status
ct_nccl_settle(ct_nccl_member *comm, const cudaEvent_t *done, const char *what,
               ct_error *err)
{
    const ct_deadline deadline = ct_deadline_after(comm->timeout_seconds);
    bool ended = false;
    ct_status status =
        comm->handle == NULL ? ct_nccl_fail_broken(comm, what, err) : CT_OK;
    while (status == CT_OK && !ended) {
        status = look(comm, done, what, &ended, err);
        if (status == CT_OK && !ended && ct_deadline_left(deadline) <= 0.0) {
            status = ct_fail(err, CT_ECOMM,
                             "%s on rank %d of %d: another rank did not come, or was "
                             "not done, within %g seconds",
                             what, comm->base.rank, comm->base.world_size,
                             comm->timeout_seconds);
        }
        (void)sched_yield();
    }
    return status == CT_OK ? CT_OK : ct_nccl_give_up(comm, status);
}

ct_status
ct_nccl_mark(const ct_nccl_member *comm, cudaEvent_t *done, ct_error *err)
{
    return ct_cuda_mark(comm->stream, done, err);
}

/* An event may be destroyed while a stream waits for it. */
ct_status
ct_nccl_follow(ct_comm *op, void *stream, ct_error *err)
{
    const ct_nccl_member *comm = (const ct_nccl_member *)op;
    cudaEvent_t here;
    if (comm->stream == stream) {
        return CT_OK;
    }
    ct_status status = ct_comm_check_here(op, "a collective", err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_cuda_mark(stream, &here, err);
    if (status == CT_OK) {
        status = ct_cuda_check(cudaStreamWaitEvent(comm->stream, here, 0),
                               "let a stream wait for another", err);
        (void)cudaEventDestroy(here);
    }
    return status;
}

ct_status
ct_nccl_settle_stream(ct_nccl_member *comm, const char *what, ct_error *err)
{
    cudaEvent_t done;
    ct_status status = ct_nccl_mark(comm, &done, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_nccl_settle(comm, &done, what, err);
    (void)cudaEventDestroy(done);
    return status;
}
