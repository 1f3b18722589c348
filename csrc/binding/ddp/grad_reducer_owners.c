/* Gradients of which each has one rank that needs its average, and no other. */
#include "binding/ddp/reducer.h"

#include "binding/runtime/buffer.h"
#include "core/base/alloc.h"

#include <limits.h>
#include <math.h>

enum {
    UNDER_WAY_BYTES = 8 << 20 /* of gradients that wait to be dropped */
};

static int
read_one(PyObject *given, int *owner)
{
    const long rank = PyLong_AsLong(given);
    if (rank == -1 && PyErr_Occurred()) {
        return -1;
    }
    /* What no int holds is no rank either, which the plan will say. */
    *owner = rank < INT_MIN || rank > INT_MAX ? INT_MAX : (int)rank;
    return 0;
}

static int
read_all(GradReducer *self, PyObject *given)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(self->params);
    if (PyTuple_GET_SIZE(given) != n) {
        PyErr_Format(PyExc_ValueError,
                     "%zd parameters and %zd owners; expected as many", n,
                     PyTuple_GET_SIZE(given));
        return -1;
    }
    self->owners = ct_calloc((size_t)n + 1, sizeof *self->owners);
    self->averaged = ct_calloc((size_t)n + 1, sizeof *self->averaged);
    if (self->owners == NULL || self->averaged == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_one(PyTuple_GET_ITEM(given, i), &self->owners[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
grad_reducer_read_owners(GradReducer *self, PyObject *given)
{
    if (Py_IsNone(given)) {
        return 0;
    }
    if (!self->grads_are_views || self->static_graph) {
        PyErr_SetString(PyExc_ValueError,
                        "owners go with gradient_as_bucket_view=True and "
                        "static_graph=False alone");
        return -1;
    }
    PyObject *all = PySequence_Tuple(given);
    const int result = all == NULL ? -1 : read_all(self, all);
    Py_XDECREF(all);
    self->core.most_under_way = UNDER_WAY_BYTES;
    return result;
}

static int
rank_of(const GradReducer *self)
{
    return ((Communicator *)self->communicator)->comm->rank;
}

bool
grad_reducer_is_anothers(const GradReducer *self, Py_ssize_t param)
{
    return self->owners != NULL && self->owners[param] != CT_EVERY_RANK &&
           self->owners[param] != rank_of(self);
}

static int
drop(GradReducer *self, Py_ssize_t param)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    if (!grad_reducer_is_anothers(self, param)) {
        return 0;
    }
    return PyList_SetItem(self->given, param, Py_NewRef(Py_None)) < 0
               ? -1
               : PyObject_SetAttr(PyTuple_GET_ITEM(self->params, param),
                                  state->str_grad, Py_None);
}

int
grad_reducer_drop_sent(GradReducer *self)
{
    const ct_bucket_plan *plan = &self->core.plan;
    while (self->owners != NULL && self->dropped < self->core.settled) {
        const ct_bucket *bucket = &plan->buckets[self->core.turns[self->dropped++]];
        for (size_t k = 0; k < bucket->n_params; k++) {
            if (drop(self, (Py_ssize_t)plan->order[bucket->first + k]) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

int
grad_reducer_keep_own(GradReducer *self)
{
    for (Py_ssize_t i = 0; self->owners != NULL && i < PyTuple_GET_SIZE(self->params);
         i++) {
        if (drop(self, i) < 0) {
            return -1;
        }
        self->averaged[i] = self->owners[i] == rank_of(self);
    }
    return 0;
}

/* ---- averages that a further pass adds to ------------------------------------------
 */

static int
scale(GradReducer *self, PyObject *grad)
{
    const ctpy_place place = {.what = "a gradient", .group = -1};
    const ct_comm *comm = ((Communicator *)self->communicator)->comm;
    ctpy_view view;
    ct_error err;
    if (ctpy_view_of(ctpy_state_borrow((PyObject *)self), grad, &place, &view) < 0) {
        return -1;
    }
    return self->core.device->scale(self->core.stream, comm->world_size,
                                    (double)INFINITY, &view.span, 1, &err) == CT_OK
               ? 0
               : ctpy_raise_int(&err);
}

int
grad_reducer_unaverage(GradReducer *self)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    for (Py_ssize_t i = 0; self->owners != NULL && i < PyTuple_GET_SIZE(self->params);
         i++) {
        if (!self->averaged[i]) {
            continue;
        }
        self->averaged[i] = false;
        PyObject *grad =
            PyObject_GetAttr(PyTuple_GET_ITEM(self->params, i), state->str_grad);
        const int result = grad == NULL ? -1 : Py_IsNone(grad) ? 0 : scale(self, grad);
        Py_XDECREF(grad);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}
