/* A reduction to one rank, requested as the reducer and the binding request theirs. */
#ifndef CT_REDUCE_TO_H
#define CT_REDUCE_TO_H

#include "core/comm/comm.h"

#include <string.h>

static inline ct_status
reduce_to(ct_comm *comm, const ct_span *span, ct_reduce_op op, int root, ct_error *err)
{
    ct_request request;
    memset(&request, 0, sizeof request);
    request.what = CT_REDUCE;
    request.op = op;
    request.root = root;
    request.in = *span;
    return ct_comm_run(comm, &request, err);
}

#endif
