/* Trainer: norms of gradients of which each rank has a shard. */
#include "binding/comm/communicator.h"
#include "binding/trainer/update.h"

#include "math/norm.h"

int
ctpy_update_open_shards(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->shards = PyObject_GetAttr(op, names->str__shard_group);
    if (u->shards == NULL || u->shards == Py_None) {
        const bool failed = u->shards == NULL;
        Py_CLEAR(u->shards);
        return failed ? -1 : 0;
    }
    u->config.comm = ctpy_comm_borrow(names, u->shards);
    u->config.global_norm = true;
    return u->config.comm == NULL ? -1 : 0;
}

int
ctpy_update_share_sums(PyObject *op, const ctpy_update *u, double p, double *sums,
                       size_t n)
{
    const ct_reduce_op how =
        ct_norm_kind_of(p) == CT_NORM_MAX ? CT_REDUCE_MAX : CT_REDUCE_SUM;
    return u->shards == NULL ? 0
                             : ctpy_comm_reduce_numbers(ctpy_state_borrow(op),
                                                        u->shards, NULL, sums, n, how);
}
