/* Collectives by NCCL on one stream.
 *
 * NCCL only enqueues; a collective of ours returns when its result is there. It waits
 * by asking, stream and communicator in turn, because a rank that died shows as an
 * error of the communicator while the stream stays busy for ever. After an error the
 * communicator is aborted and every later call fails at once. */
#include "comm_nccl.h"

#include "core/ct_alloc.h"
#include "nccl.h"
#include "status.h"

#include <sched.h>
#include <string.h>

typedef struct nccl_comm {
    ct_comm base; /* first: a ct_comm * of ours is a nccl_comm * */
    const ct_nccl *nccl;
    ct_nccl_handle handle; /* NULL after an error */
    cudaStream_t stream;
    float *token; /* one element of the device's memory, for barrier */
} nccl_comm;

static ct_status
dtype_of(const ct_span *span, const char *what, int *dtype, ct_error *err)
{
    switch (span->dtype) {
    case CT_I8:
        *dtype = 0;
        return CT_OK;
    case CT_U8:
    case CT_BOOL:
        *dtype = 1;
        return CT_OK;
    case CT_I32:
        *dtype = 2;
        return CT_OK;
    case CT_I64:
        *dtype = 4;
        return CT_OK;
    case CT_F16:
        *dtype = 6;
        return CT_OK;
    case CT_F32:
        *dtype = 7;
        return CT_OK;
    case CT_F64:
        *dtype = 8;
        return CT_OK;
    case CT_BF16:
        *dtype = 9;
        return CT_OK;
    default:
        return ct_fail(err, CT_EINVAL, "%s: NCCL has no %s", what,
                       ct_dtype_name(span->dtype));
    }
}

static int
op_of(ct_reduce_op op)
{
    switch (op) {
    case CT_REDUCE_MAX:
        return 2;
    case CT_REDUCE_MIN:
        return 3;
    case CT_REDUCE_MEAN:
        return 4;
    case CT_REDUCE_SUM:
        break;
    }
    return 0;
}

/* Aborting frees the handle and whatever waits on the other ranks. */
static ct_status
give_up(nccl_comm *comm, ct_status status)
{
    (void)comm->nccl->abort(comm->handle);
    comm->handle = NULL;
    return status;
}

static ct_status
wait_for(nccl_comm *comm, const char *what, ct_error *err)
{
    for (;;) {
        const cudaError_t busy = cudaStreamQuery(comm->stream);
        if (busy == cudaSuccess) {
            return CT_OK;
        }
        ct_status status = busy == cudaErrorNotReady
                               ? CT_OK
                               : ct_cuda_check(busy, "wait for the stream", err);
        ct_nccl_result result = 0;
        if (status == CT_OK) {
            status = ct_nccl_check(comm->nccl->async_error(comm->handle, &result), what,
                                   err);
        }
        if (status == CT_OK && result != CT_NCCL_IN_PROGRESS) {
            status = ct_nccl_check(result, what, err);
        }
        if (status != CT_OK) {
            return give_up(comm, status);
        }
        (void)sched_yield();
    }
}

/* Every collective begins and ends alike. */
static ct_status
begin(const nccl_comm *comm, const ct_request *request, int *dtype, ct_error *err)
{
    const char *what = ct_collective_name(request->what);
    if (comm->handle == NULL) {
        return ct_fail(err, CT_ECOMM, "cannot %s: the group broke at an earlier error",
                       what);
    }
    ct_status status = ct_request_check(request, comm->base.world_size, err);
    return status == CT_OK ? dtype_of(&request->in, what, dtype, err) : status;
}

static ct_status
end(nccl_comm *comm, ct_nccl_result result, const char *what, ct_error *err)
{
    ct_status status = ct_nccl_check(result, what, err);
    return status == CT_OK ? wait_for(comm, what, err) : give_up(comm, status);
}

static ct_status
nccl_all_reduce(ct_comm *op, const ct_span *span, ct_reduce_op reduce, ct_error *err)
{
    nccl_comm *comm = (nccl_comm *)op;
    int dtype = 0;
    const ct_request request = {.what = CT_ALL_REDUCE, .in = *span, .op = reduce};
    ct_status status = begin(comm, &request, &dtype, err);
    if (status != CT_OK || span->n == 0) {
        return status;
    }
    return end(comm,
               comm->nccl->all_reduce(span->data, span->data, span->n, dtype,
                                      op_of(reduce), comm->handle, comm->stream),
               "all_reduce", err);
}

static ct_status
nccl_all_gather(ct_comm *op, const ct_span *out, const ct_span *in, ct_error *err)
{
    nccl_comm *comm = (nccl_comm *)op;
    int dtype = 0;
    const ct_request request = {.what = CT_ALL_GATHER, .in = *in, .out = *out};
    ct_status status = begin(comm, &request, &dtype, err);
    if (status != CT_OK || in->n == 0) {
        return status;
    }
    return end(comm,
               comm->nccl->all_gather(in->data, out->data, in->n, dtype, comm->handle,
                                      comm->stream),
               "all_gather", err);
}

static ct_status
nccl_reduce_scatter(ct_comm *op, const ct_span *out, const ct_span *in,
                    ct_reduce_op reduce, ct_error *err)
{
    nccl_comm *comm = (nccl_comm *)op;
    int dtype = 0;
    const ct_request request = {
        .what = CT_REDUCE_SCATTER, .in = *in, .out = *out, .op = reduce};
    ct_status status = begin(comm, &request, &dtype, err);
    if (status != CT_OK || out->n == 0) {
        return status;
    }
    return end(comm,
               comm->nccl->reduce_scatter(in->data, out->data, out->n, dtype,
                                          op_of(reduce), comm->handle, comm->stream),
               "reduce_scatter", err);
}

/* A send to every rank and a receive from it, as one group that cannot block. */
static ct_status
nccl_all_to_all(ct_comm *op, const ct_span *out, const ct_span *in, ct_error *err)
{
    nccl_comm *comm = (nccl_comm *)op;
    const ct_nccl *nccl = comm->nccl;
    int dtype = 0;
    const ct_request request = {.what = CT_ALL_TO_ALL, .in = *in, .out = *out};
    ct_status status = begin(comm, &request, &dtype, err);
    if (status != CT_OK || in->n == 0) {
        return status;
    }
    const size_t n = in->n / (size_t)op->world_size;
    const size_t bytes = n * ct_dtype_size(in->dtype);
    ct_nccl_result result = nccl->group_start();
    for (int peer = 0; result == 0 && peer < op->world_size; peer++) {
        result = nccl->send((const char *)in->data + (size_t)peer * bytes, n, dtype,
                            peer, comm->handle, comm->stream);
        if (result == 0) {
            result = nccl->receive((char *)out->data + (size_t)peer * bytes, n, dtype,
                                   peer, comm->handle, comm->stream);
        }
    }
    const ct_nccl_result ended = nccl->group_end();
    return end(comm, result != 0 ? result : ended, "all_to_all", err);
}

static ct_status
nccl_broadcast(ct_comm *op, const ct_span *span, int root, ct_error *err)
{
    nccl_comm *comm = (nccl_comm *)op;
    int dtype = 0;
    const ct_request request = {.what = CT_BROADCAST, .in = *span, .root = root};
    ct_status status = begin(comm, &request, &dtype, err);
    if (status != CT_OK || span->n == 0) {
        return status;
    }
    return end(comm,
               comm->nccl->broadcast(span->data, span->data, span->n, dtype, root,
                                     comm->handle, comm->stream),
               "broadcast", err);
}

/* NCCL has no barrier: a sum of one element ends when every rank has come. */
static ct_status
nccl_barrier(ct_comm *op, ct_error *err)
{
    const nccl_comm *comm = (const nccl_comm *)op;
    const ct_span token = {comm->token, 1, CT_F32};
    return nccl_all_reduce(op, &token, CT_REDUCE_SUM, err);
}

static void
nccl_free(ct_comm *op)
{
    nccl_comm *comm = (nccl_comm *)op;
    if (comm->handle != NULL) {
        (void)comm->nccl->destroy(comm->handle);
    }
    (void)cudaFree(comm->token);
    ct_free(comm);
}

static const ct_comm_ops nccl_ops = {
    .name = "nccl",
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .all_to_all = nccl_all_to_all,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .free = nccl_free,
};

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

/* Fills in what a group needs of the device and of NCCL. */
static ct_status
connect_ranks(nccl_comm *comm, const char id[CT_COMM_ID_BYTES], ct_error *err)
{
    ct_nccl_group_id same;
    memcpy(same.bytes, id, sizeof same.bytes);
    ct_status status = ct_cuda_check(
        cudaMalloc((void **)&comm->token, sizeof *comm->token), "get memory", err);
    if (status == CT_OK) {
        status = ct_cuda_check(
            cudaMemsetAsync(comm->token, 0, sizeof *comm->token, comm->stream),
            "clear memory", err);
    }
    return status == CT_OK ? ct_nccl_check(comm->nccl->init_rank(&comm->handle,
                                                                 comm->base.world_size,
                                                                 same, comm->base.rank),
                                           "join the group", err)
                           : status;
}

ct_status
ct_nccl_join(const char id[CT_COMM_ID_BYTES], int rank, int world_size, void *stream,
             ct_comm **comm, ct_error *err)
{
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        return ct_fail(err, CT_EINVAL,
                       "rank must be in [0, world_size), got %d of a world_size of %d",
                       rank, world_size);
    }
    const ct_nccl *nccl = NULL;
    ct_status status = ct_nccl_borrow(&nccl, err);
    if (status != CT_OK) {
        return status;
    }
    nccl_comm *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a communicator");
    }
    made->base = (ct_comm){.ops = &nccl_ops, .rank = rank, .world_size = world_size};
    made->nccl = nccl;
    made->stream = stream;
    status = connect_ranks(made, id, err);
    if (status != CT_OK) {
        nccl_free(&made->base);
        return status;
    }
    *comm = &made->base;
    return CT_OK;
}
