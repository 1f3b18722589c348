#include "core/ct_comm.h"

#include <stdio.h>

ct_comm
ct_comm_made(const ct_comm_ops *ops, int rank, int world_size)
{
    return (ct_comm){
        .ops = ops, .rank = rank, .world_size = world_size, .owner = ct_owner_here()};
}

bool
ct_comm_is_here(const ct_comm *comm)
{
    return ct_owner_is_here(comm->owner);
}

ct_status
ct_comm_check_here(const ct_comm *comm, const char *what, ct_error *err)
{
    char doing[64];
    if (ct_comm_is_here(comm)) {
        return CT_OK;
    }
    (void)snprintf(doing, sizeof doing, "%s on rank %d of %d", what, comm->rank,
                   comm->world_size);
    return ct_owner_check(comm->owner, doing, "this group of ranks", err);
}

ct_status
ct_comm_run(ct_comm *comm, const ct_request *r, ct_error *err)
{
    const ct_comm_ops *ops = comm->ops;
    switch (r->what) {
    case CT_ALL_REDUCE:
        return ops->all_reduce(comm, &r->in, r->op, err);
    case CT_ALL_GATHER:
        return ops->all_gather(comm, &r->out, &r->in, err);
    case CT_REDUCE_SCATTER:
        return ops->reduce_scatter(comm, &r->out, &r->in, r->op, err);
    case CT_ALL_TO_ALL:
        return ops->all_to_all(comm, &r->out, &r->in, err);
    case CT_BROADCAST:
        return ops->broadcast(comm, &r->in, r->root, err);
    case CT_REDUCE:
        return ops->reduce(comm, &r->in, r->op, r->root, err);
    case CT_BARRIER:
        break;
    }
    return ops->barrier(comm, err);
}

/* No work stands for one that has ended. */
ct_status
ct_comm_start(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    *work = NULL;
    return comm->ops->start != NULL ? comm->ops->start(comm, request, work, err)
                                    : ct_comm_run(comm, request, err);
}

ct_status
ct_comm_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    return work == NULL ? CT_OK : comm->ops->wait(comm, work, err);
}

ct_status
ct_comm_follow(ct_comm *comm, void *stream, ct_error *err)
{
    return comm->ops->follow == NULL ? CT_OK : comm->ops->follow(comm, stream, err);
}

const char *
ct_collective_name(ct_collective what)
{
    static const char *const names[] = {
        [CT_ALL_REDUCE] = "all_reduce",
        [CT_ALL_GATHER] = "all_gather",
        [CT_REDUCE_SCATTER] = "reduce_scatter",
        [CT_ALL_TO_ALL] = "all_to_all",
        [CT_BROADCAST] = "broadcast",
        [CT_REDUCE] = "reduce",
        [CT_BARRIER] = "barrier",
    };
    return names[what];
}

bool
ct_request_is_like(const ct_request *a, const ct_request *b)
{
    return a->what == b->what && a->out.n == b->out.n && a->in.n == b->in.n &&
           a->out.dtype == b->out.dtype && a->in.dtype == b->in.dtype &&
           a->op == b->op && a->root == b->root;
}

ct_description
ct_request_describe(const ct_request *r)
{
    static const char *const ops[] = {
        [CT_REDUCE_SUM] = "sum",
        [CT_REDUCE_MEAN] = "mean",
        [CT_REDUCE_MAX] = "max",
        [CT_REDUCE_MIN] = "min",
    };
    ct_description d;
    (void)snprintf(d.text, sizeof d.text, "%s of %zu %s to %zu (%s, root %d)",
                   ct_collective_name(r->what), r->in.n, ct_dtype_name(r->in.dtype),
                   r->out.n, ops[r->op], r->root);
    return d;
}

ct_status
ct_request_compare(const ct_request *first, int rank, const ct_request *other,
                   ct_error *err)
{
    return ct_request_is_like(first, other)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "all ranks must call the same: rank 0 called %s, rank %d %s",
                         ct_request_describe(first).text, rank,
                         ct_request_describe(other).text);
}

/* `whole` holds a part for every rank. */
static ct_status
check_parts(const ct_request *r, const ct_span *whole, const ct_span *part,
            size_t world_size, ct_error *err)
{
    if (whole->dtype == part->dtype && whole->n % world_size == 0 &&
        whole->n / world_size == part->n) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "%s over %zu ranks needs %zu times as many elements of one dtype on "
                   "one side, got %zu of %s and %zu of %s",
                   ct_collective_name(r->what), world_size, world_size, whole->n,
                   ct_dtype_name(whole->dtype), part->n, ct_dtype_name(part->dtype));
}

static ct_status
check_exchange(const ct_request *r, size_t world_size, ct_error *err)
{
    if (r->in.dtype == r->out.dtype && r->in.n == r->out.n &&
        r->in.n % world_size == 0) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "all_to_all over %zu ranks needs the same number of elements of one "
                   "dtype on both sides, a multiple of %zu, got %zu of %s and %zu of "
                   "%s",
                   world_size, world_size, r->in.n, ct_dtype_name(r->in.dtype),
                   r->out.n, ct_dtype_name(r->out.dtype));
}

ct_status
ct_request_check(const ct_request *r, int world_size, ct_error *err)
{
    switch (r->what) {
    case CT_ALL_GATHER:
        return check_parts(r, &r->out, &r->in, (size_t)world_size, err);
    case CT_REDUCE_SCATTER:
        return check_parts(r, &r->in, &r->out, (size_t)world_size, err);
    case CT_ALL_TO_ALL:
        return check_exchange(r, (size_t)world_size, err);
    case CT_BROADCAST:
    case CT_REDUCE:
        if (r->root < 0 || r->root >= world_size) {
            return ct_fail(err, CT_EINVAL, "root must be in [0, %d), got %d",
                           world_size, r->root);
        }
        return CT_OK;
    case CT_ALL_REDUCE:
    case CT_BARRIER:
        break;
    }
    return CT_OK;
}
