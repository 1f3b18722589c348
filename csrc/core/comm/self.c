/* The group of one rank: a collective is a copy, or nothing. */
#include "core/base/alloc.h"
#include "core/base/pages.h"
#include "core/comm/comm.h"

#include <string.h>

static ct_status
move(const ct_span *out, const ct_span *in, ct_error *err)
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

/* Sum, mean, max and min of one value are that value. */
static ct_status
self_run(ct_comm *comm, const ct_request *r, ct_error *err)
{
    (void)comm;
    switch (r->what) {
    case CT_ALL_GATHER:
    case CT_REDUCE_SCATTER:
    case CT_ALL_TO_ALL:
        return move(&r->out, &r->in, err);
    case CT_BROADCAST:
    case CT_REDUCE:
        return r->root == 0
                   ? CT_OK
                   : ct_fail(err, CT_EINVAL,
                             "root must be 0 in a group of one rank, got %d", r->root);
    case CT_ALL_REDUCE:
    case CT_BARRIER:
        break;
    }
    return CT_OK;
}

static void
self_free(ct_comm *comm)
{
    ct_free(comm);
}

static const ct_comm_ops self_ops = {
    .name = "self",
    .run = self_run,
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

/* Here and not in comm.c: CUDA's plugin links that file, but not core/base/pages.c. */
ct_status
ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return comm->ops->memory != NULL ? comm->ops->memory(comm, bytes, memory, err)
                                     : ct_pages_new(memory, bytes, err);
}
