/* The group of one rank: what a collective leaves to do when nobody else is there. */
#include "core/base/alloc.h"
#include "core/base/pages.h"
#include "core/comm/comm.h"

#include <string.h>

static ct_status
self_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    (void)comm; /* sum, mean, max and min of one value are that value */
    (void)span;
    (void)op;
    (void)err;
    return CT_OK;
}

static ct_status
self_move(const ct_span *out, const ct_span *in, ct_error *err)
{
    if (out->n != in->n || out->dtype != in->dtype) {
        return ct_fail(err, CT_EINVAL,
                       "in a group of one rank out must be like in, %zu of %s, got %zu "
                       "of %s",
                       in->n, ct_dtype_name(in->dtype), out->n,
                       ct_dtype_name(out->dtype));
    }
    if (in->n != 0 && out->data != in->data) {
        memmove(out->data, in->data, in->n * ct_dtype_size(in->dtype));
    }
    return CT_OK;
}

static ct_status
self_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    (void)comm;
    return self_move(out, in, err);
}

static ct_status
self_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                    ct_reduce_op op, ct_error *err)
{
    (void)comm;
    (void)op;
    return self_move(out, in, err);
}

static ct_status
self_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    (void)comm;
    return self_move(out, in, err);
}

static ct_status
check_root(int root, ct_error *err)
{
    if (root != 0) {
        return ct_fail(err, CT_EINVAL, "root must be 0 in a group of one rank, got %d",
                       root);
    }
    return CT_OK;
}

static ct_status
self_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    (void)comm;
    (void)span;
    return check_root(root, err);
}

static ct_status
self_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root,
            ct_error *err)
{
    (void)comm;
    (void)span;
    (void)op;
    return check_root(root, err);
}

static ct_status
self_barrier(ct_comm *comm, ct_error *err)
{
    (void)comm;
    (void)err;
    return CT_OK;
}

static void
self_free(ct_comm *comm)
{
    ct_free(comm);
}

static const ct_comm_ops self_ops = {
    .name = "self",
    .all_reduce = self_all_reduce,
    .all_gather = self_all_gather,
    .reduce_scatter = self_reduce_scatter,
    .all_to_all = self_all_to_all,
    .broadcast = self_broadcast,
    .reduce = self_reduce,
    .barrier = self_barrier,
    .free = self_free,
};

ct_comm *
ct_comm_self_new(void)
{
    ct_comm *comm = ct_alloc(sizeof *comm);
    if (comm != NULL) {
        *comm = ct_comm_made(&self_ops, 0, 1);
    }
    return comm;
}

/* Here and not beside the other collectives: CUDA's plugin links those, and has no
 * memory that ranks share. */
ct_status
ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return comm->ops->memory != NULL ? comm->ops->memory(comm, bytes, memory, err)
                                     : ct_pages_new(memory, bytes, err);
}
