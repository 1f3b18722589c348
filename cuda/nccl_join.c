/* Joining a group over NCCL, splitting it and leaving it. The communicator is one that
 * never blocks the host, so that all of this ends in time, too. */
#include "comm_nccl.h"

#include "core/base/alloc.h"
#include "nccl_member.h"
#include "status.h"

#include <limits.h>
#include <string.h>

void
ct_nccl_free(ct_comm *op)
{
    ct_nccl_member *comm = (ct_nccl_member *)op;
    if (ct_comm_is_here(op)) { /* a forked child has neither NCCL's threads nor CUDA */
        if (comm->handle != NULL) {
            (void)comm->nccl->destroy(comm->handle);
        }
        ct_nccl_staging_release(&comm->staging);
        (void)cudaFree(comm->token);
    }
    ct_free(comm);
}

/* A member without a handle yet; NULL, with *status and *err, on failure. */
static ct_nccl_member *
member_new(const ct_nccl *nccl, int rank, int world_size, void *stream,
           double timeout_seconds, ct_status *status, ct_error *err)
{
    ct_nccl_member *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        *status = ct_fail(err, CT_ENOMEM, "no memory for a communicator");
        return NULL;
    }
    made->base = ct_comm_made(&ct_nccl_ops, rank, world_size);
    made->nccl = nccl;
    made->stream = stream;
    made->timeout_seconds = timeout_seconds;
    *status = ct_cuda_check(cudaMalloc((void **)&made->token, sizeof *made->token),
                            "get memory", err);
    if (*status == CT_OK) {
        *status = ct_cuda_check(
            cudaMemsetAsync(made->token, 0, sizeof *made->token, made->stream),
            "clear memory", err);
    }
    if (*status != CT_OK) {
        ct_nccl_free(&made->base);
        return NULL;
    }
    return made;
}

/* Ends with *comm, or with `made` freed. */
static ct_status
finish_join(ct_nccl_member *made, ct_status status, ct_comm **comm)
{
    if (status != CT_OK) {
        ct_nccl_free(&made->base);
        return status;
    }
    *comm = &made->base;
    return CT_OK;
}

/* All ranks of the group split it, those that will be in none, too. */
ct_status
ct_nccl_split(ct_comm *op, const ct_members *members, ct_comm **made, ct_error *err)
{
    static const char what[] = "split";
    ct_nccl_member *comm = (ct_nccl_member *)op;
    const bool joins = members->n > 1;
    const int color = joins ? members->ranks[0] : CT_NCCL_NO_COLOR;
    ct_nccl_handle handle = NULL;
    ct_status status = CT_OK;
    status = ct_comm_check_here(op, what, err);
    if (status != CT_OK) {
        return status;
    }
    ct_nccl_member *part =
        member_new(comm->nccl, members->index, joins ? members->n : 1, comm->stream,
                   comm->timeout_seconds, &status, err);
    if (part == NULL) {
        return status;
    }
    status = comm->handle == NULL
                 ? ct_nccl_fail_broken(comm, what, err)
                 : ct_nccl_check_on(comm,
                                    comm->nccl->split(comm->handle, color,
                                                      members->index, &handle, NULL),
                                    what, err);
    if (status == CT_OK) {
        status = ct_nccl_settle(comm, NULL, what, err);
    }
    part->handle = handle;
    if (status == CT_OK && joins) {
        status = ct_nccl_settle(part, NULL, what, err);
    }
    if (status == CT_OK && !joins) {
        ct_nccl_free(&part->base);
        return CT_OK;
    }
    return finish_join(part, status, made);
}

ct_status
ct_nccl_id(char id[CT_COMM_ID_BYTES], ct_error *err)
{
    const ct_nccl *nccl = NULL;
    ct_nccl_group_id made;
    ct_status status = ct_nccl_borrow(&nccl, err);
    if (status == CT_OK) {
        status = ct_nccl_check(nccl->get_id(&made), "make a group's id", err);
    }
    if (status == CT_OK) {
        memcpy(id, made.bytes, sizeof made.bytes);
    }
    return status;
}

static ct_status
check_arguments(int rank, int world_size, double timeout_seconds, ct_error *err)
{
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        return ct_fail(err, CT_EINVAL,
                       "rank must be in [0, world_size), got %d of a world_size of %d",
                       rank, world_size);
    }
    if (!(timeout_seconds > 0.0 && timeout_seconds < 1e9)) {
        return ct_fail(err, CT_EINVAL,
                       "timeout_seconds must be above 0 and below 1e9, got %g",
                       timeout_seconds);
    }
    return CT_OK;
}

ct_status
ct_nccl_join(const char id[CT_COMM_ID_BYTES], int rank, int world_size, void *stream,
             double timeout_seconds, ct_comm **comm, ct_error *err)
{
    static const char what[] = "join the group";
    const ct_nccl *nccl = NULL;
    ct_nccl_group_id same;
    ct_nccl_config config = {.size = sizeof config,
                             .magic = CT_NCCL_MAGIC,
                             .version = CT_NCCL_CONFIG_VERSION,
                             .cga_cluster_size = INT_MIN,
                             .min_ctas = INT_MIN,
                             .max_ctas = INT_MIN,
                             .split_share = INT_MIN};
    memcpy(same.bytes, id, sizeof same.bytes);
    ct_status status = check_arguments(rank, world_size, timeout_seconds, err);
    if (status == CT_OK) {
        status = ct_nccl_borrow(&nccl, err);
    }
    if (status != CT_OK) {
        return status;
    }
    ct_nccl_member *made =
        member_new(nccl, rank, world_size, stream, timeout_seconds, &status, err);
    if (made == NULL) {
        return status;
    }
    status = ct_nccl_check_on(
        made, nccl->init_rank(&made->handle, world_size, same, rank, &config), what,
        err);
    if (status == CT_OK) {
        status = ct_nccl_settle(made, NULL, what, err);
    }
    return finish_join(made, status, comm);
}
