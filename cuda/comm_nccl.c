/* Collectives by NCCL on one stream. After an error the communicator is aborted, and
 * every later call fails at once. */
#include "comm_nccl.h"

#include "core/base/alloc.h"
#include "nccl_member.h"

struct ct_work {
    cudaEvent_t done;
    const char *what;
};

/* ---- NCCL's numbers ----------------------------------------------------------------
 */

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

/* Of bools, which are NCCL's uint8, a sum says "any" and a mean "all". */
static int
op_of(ct_reduce_op op, ct_dtype dtype)
{
    enum {
        SUM = 0,
        MAX = 2,
        MIN = 3,
        MEAN = 4
    };
    const bool is_bool = dtype == CT_BOOL;
    switch (op) {
    case CT_REDUCE_MAX:
        return MAX;
    case CT_REDUCE_MIN:
        return MIN;
    case CT_REDUCE_MEAN:
        return is_bool ? MIN : MEAN;
    case CT_REDUCE_SUM:
        break;
    }
    return is_bool ? MAX : SUM;
}

/* ---- collectives -------------------------------------------------------------------
 */

/* A send to every rank and a receive from it, as one group that cannot block. */
static ct_nccl_result
exchange(const ct_nccl_member *comm, const ct_request *r, int dtype)
{
    const ct_nccl *nccl = comm->nccl;
    const int ranks = comm->base.world_size;
    const size_t n = r->in.n / (size_t)ranks;
    const size_t bytes = n * ct_dtype_size(r->in.dtype);
    ct_nccl_result result = nccl->group_start();
    for (int peer = 0; result == 0 && peer < ranks; peer++) {
        const size_t at = (size_t)peer * bytes;
        result = nccl->send((const char *)r->in.data + at, n, dtype, peer, comm->handle,
                            comm->stream);
        if (result == 0) {
            result = nccl->receive((char *)r->out.data + at, n, dtype, peer,
                                   comm->handle, comm->stream);
        }
    }
    const ct_nccl_result ended = nccl->group_end();
    return result != 0 ? result : ended;
}

/* NCCL has no barrier: a sum of one element ends when every rank has come. */
static ct_nccl_result
enqueue(const ct_nccl_member *comm, const ct_request *r, int dtype)
{
    const ct_nccl *nccl = comm->nccl;
    const int op = op_of(r->op, r->in.dtype);
    void *in = r->in.data;
    switch (r->what) {
    case CT_ALL_REDUCE:
        return nccl->all_reduce(in, in, r->in.n, dtype, op, comm->handle, comm->stream);
    case CT_ALL_GATHER:
        return nccl->all_gather(in, r->out.data, r->in.n, dtype, comm->handle,
                                comm->stream);
    case CT_REDUCE_SCATTER:
        return nccl->reduce_scatter(in, r->out.data, r->out.n, dtype, op, comm->handle,
                                    comm->stream);
    case CT_ALL_TO_ALL:
        return exchange(comm, r, dtype);
    case CT_BROADCAST:
        return nccl->broadcast(in, in, r->in.n, dtype, r->root, comm->handle,
                               comm->stream);
    case CT_REDUCE:
        return nccl->reduce(in, in, r->in.n, dtype, op, r->root, comm->handle,
                            comm->stream);
    case CT_BARRIER:
        break;
    }
    return nccl->all_reduce(comm->token, comm->token, 1, dtype, op, comm->handle,
                            comm->stream);
}

static bool
moves_nothing(const ct_request *r)
{
    return r->what != CT_BARRIER && r->in.n == 0;
}

/* Puts the collective on the stream, and waits until NCCL has taken it in. */
static ct_status
submit(ct_nccl_member *comm, const ct_request *r, ct_error *err)
{
    const char *what = ct_collective_name(r->what);
    int dtype = 0;
    if (comm->handle == NULL) {
        return ct_nccl_fail_broken(comm, what, err);
    }
    ct_status status = dtype_of(&r->in, what, &dtype, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_nccl_check_on(comm, enqueue(comm, r, dtype), what, err);
    return status == CT_OK ? ct_nccl_settle(comm, NULL, what, err)
                           : ct_nccl_give_up(comm, status);
}

static ct_status
check(const ct_comm *op, const ct_request *request, ct_error *err)
{
    const ct_status here =
        ct_comm_check_here(op, ct_collective_name(request->what), err);
    return here == CT_OK ? ct_request_check(request, op->world_size, err) : here;
}

static ct_status
run(ct_comm *op, const ct_request *request, ct_error *err)
{
    ct_nccl_member *comm = (ct_nccl_member *)op;
    const char *what = ct_collective_name(request->what);
    ct_request staged;
    bool is_staged = false;
    ct_status status = check(op, request, err);
    if (status != CT_OK || moves_nothing(request)) {
        return status;
    }
    status =
        ct_nccl_stage(&comm->staging, request, &staged, comm->stream, &is_staged, err);
    if (status == CT_OK) {
        status = submit(comm, &staged, err);
    }
    if (status == CT_OK && is_staged) {
        status = ct_nccl_unstage(request, &staged, comm->stream, err);
    }
    return status == CT_OK ? ct_nccl_settle_stream(comm, what, err) : status;
}

/* What is copied from host memory has ended when it has been started. */
static ct_status
nccl_start(ct_comm *op, const ct_request *request, ct_work **work, ct_error *err)
{
    ct_nccl_member *comm = (ct_nccl_member *)op;
    ct_status status = check(op, request, err);
    if (status != CT_OK || moves_nothing(request)) {
        return status;
    }
    if (ct_nccl_is_staged(request)) {
        return run(op, request, err);
    }
    ct_work *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to begin a collective");
    }
    made->what = ct_collective_name(request->what);
    status = submit(comm, request, err);
    if (status == CT_OK) {
        status = ct_nccl_mark(comm, &made->done, err);
    }
    if (status != CT_OK) {
        ct_free(made);
        return status;
    }
    *work = made;
    return CT_OK;
}

static ct_status
nccl_wait(ct_comm *op, ct_work *work, ct_error *err)
{
    ct_status status = ct_comm_check_here(op, work->what, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_nccl_settle((ct_nccl_member *)op, &work->done, work->what, err);
    (void)cudaEventDestroy(work->done);
    ct_free(work);
    return status;
}

static ct_status
nccl_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    return run(comm, &(ct_request){.what = CT_ALL_REDUCE, .in = *span, .op = op}, err);
}

static ct_status
nccl_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    return run(comm, &(ct_request){.what = CT_ALL_GATHER, .out = *out, .in = *in}, err);
}

static ct_status
nccl_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                    ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_REDUCE_SCATTER, .out = *out, .in = *in, .op = op};
    return run(comm, &r, err);
}

static ct_status
nccl_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    return run(comm, &(ct_request){.what = CT_ALL_TO_ALL, .out = *out, .in = *in}, err);
}

static ct_status
nccl_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    const ct_request r = {.what = CT_BROADCAST, .in = *span, .root = root};
    return run(comm, &r, err);
}

static ct_status
nccl_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root,
            ct_error *err)
{
    const ct_request r = {.what = CT_REDUCE, .in = *span, .op = op, .root = root};
    return run(comm, &r, err);
}

static ct_status
nccl_barrier(ct_comm *comm, ct_error *err)
{
    return run(comm, &(ct_request){.what = CT_BARRIER}, err);
}

/* ---- the table ---------------------------------------------------------------------
 */

const ct_comm_ops ct_nccl_ops = {
    .name = "nccl",
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .all_to_all = nccl_all_to_all,
    .broadcast = nccl_broadcast,
    .reduce = nccl_reduce,
    .barrier = nccl_barrier,
    .start = nccl_start,
    .wait = nccl_wait,
    .group = ct_nccl_split,
    .free = ct_nccl_free,
    .takes_device_memory = true,
    .follow = ct_nccl_follow,
};
