/* Trainer: the group of its ranks. */
#include "binding/engine/ranks.h"

#include "binding/comm/communicator.h"

/* A group that a forked child finds is its parent's: it trains alone. */
static int
is_open(PyObject *group)
{
    const ct_comm *comm = group == NULL ? NULL : ((Communicator *)group)->comm;
    return comm != NULL && ct_comm_is_here(comm);
}

ct_comm *
ctpy_trainer_comm_borrow(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    if (!is_open(self->group)) {
        PyObject *group = PyObject_CallMethodNoArgs(op, names->str__join_ranks);
        if (group == NULL || ctpy_comm_borrow(names, group) == NULL) {
            Py_XDECREF(group);
            return NULL;
        }
        Py_XSETREF(self->group, group);
    }
    return ctpy_comm_borrow(names, self->group);
}

int
ctpy_trainer_world_size(PyObject *op)
{
    const ct_comm *comm = ctpy_trainer_comm_borrow(op);
    return comm == NULL ? -1 : comm->world_size;
}

static int
reduce(PyObject *op, const ct_span *span, ct_reduce_op how)
{
    const ct_request request = {.what = CT_ALL_REDUCE, .op = how, .in = *span};
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->group);
    int result = ctpy_comm_run(ctpy_state_borrow(op), group, &request);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how)
{
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->group);
    int result =
        ctpy_comm_reduce_numbers(ctpy_state_borrow(op), group, NULL, values, n, how);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n)
{
    return reduce(op, &(ct_span){values, n, CT_I64}, CT_REDUCE_SUM);
}

int
ctpy_trainer_min(PyObject *op, int64_t *values, size_t n)
{
    return reduce(op, &(ct_span){values, n, CT_I64}, CT_REDUCE_MIN);
}

/* Is the exchange of gradients the model's own? A wrapper that averages while backward
 * runs has no_sync(). */
static int
averages_itself(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model = PyObject_GetAttr(op, names->str_model_wrapped), *method = NULL;
    int has = model == NULL ? -1 : ctpy_lookup(model, names->str_no_sync, &method);
    Py_XDECREF(method);
    Py_XDECREF(model);
    return has;
}

int
ctpy_trainer_average_grads(PyObject *op, ctpy_update *u)
{
    ctpy_grads grads;
    const int ranks = ctpy_trainer_world_size(op);
    int done = ranks > 1 ? averages_itself(op) : ranks < 0 ? -1 : 1;
    if (done != 0) {
        return done < 0 ? -1 : 0;
    }
    if (ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, u->on_host, &grads) < 0) {
        return -1;
    }
    for (size_t i = 0; done == 0 && i < grads.list.n; i++) {
        done = reduce(op, &grads.list.spans[i], CT_REDUCE_MEAN);
    }
    ctpy_grads_close(&grads);
    return done;
}

bool
ctpy_trainer_is_alone(const PyObject *op)
{
    PyObject *group = ((const Trainer *)op)->group;
    return !is_open(group) || ((Communicator *)group)->comm->world_size == 1;
}

void
ctpy_ranks_leave(PyObject *op)
{
    if (ctpy_trainer_is_alone(op)) {
        return;
    }
    PyObject *answer =
        PyObject_CallMethodNoArgs(op, ctpy_state_borrow(op)->str__leave_ranks);
    if (answer == NULL) {
        PyErr_WriteUnraisable(op);
    }
    Py_XDECREF(answer);
}

PyObject *
ctpy_trainer_get_communicator(PyObject *op, void *Py_UNUSED(closure))
{
    return ctpy_trainer_comm_borrow(op) == NULL ? NULL
                                                : Py_NewRef(((Trainer *)op)->group);
}
