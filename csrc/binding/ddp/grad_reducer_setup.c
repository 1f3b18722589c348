/* Buckets for a reducer's parameters, and hooks on them. */
#include "binding/runtime/buffer.h"
#include "binding/ddp/reducer.h"
#include "core/base/alloc.h"

enum {
    LONG_BYTES = 1 << 20 /* of a gradient that is worth a collective of its own */
};

static int
read_params(GradReducer *self, ctpy_state *state, ct_span *spans)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->params); i++) {
        char text[200];
        const char *name = grad_reducer_name(self, i);
        if (name == NULL) {
            return -1;
        }
        (void)PyOS_snprintf(text, sizeof text, "parameter '%.150s'", name);
        const ctpy_place place = {.what = text, .group = -1};
        ctpy_view view;
        if (ctpy_view_of(state, PyTuple_GET_ITEM(self->params, i), &place, &view) < 0) {
            return -1;
        }
        if (!ct_dtype_is_float(view.span.dtype)) {
            PyErr_Format(PyExc_TypeError,
                         "%s has dtype %s; expected a floating point dtype", text,
                         ct_dtype_name(view.span.dtype));
            return -1;
        }
        spans[i] = view.span;
    }
    return 0;
}

/* Where a collective costs little, all but short gradients are exchanged where they
 * lie, and no bucket has to be filled with them. */
static size_t
alone_bytes(const ct_comm *comm)
{
    return comm->ops->batch_bytes != 0 ? comm->ops->batch_bytes : LONG_BYTES;
}

static int
plan(GradReducer *self, ctpy_state *state, ct_bucket_limits limits)
{
    const size_t n = (size_t)PyTuple_GET_SIZE(self->params);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    const ct_owners owners = {self->owners, comm == NULL ? 0 : comm->world_size};
    ct_span *spans = ct_calloc(n + 1, sizeof *spans);
    ct_error err;
    int result = -1;
    self->used = ct_calloc(n + 1, sizeof *self->used);
    self->absent = ct_calloc(n + 1, sizeof *self->absent);
    if (spans == NULL || self->used == NULL || self->absent == NULL) {
        PyErr_NoMemory();
    }
    else if (comm != NULL && read_params(self, state, spans) == 0) {
        limits.alone_bytes = alone_bytes(comm);
        result = ct_reducer_init(&self->core, &ct_device_cpu, NULL, spans, n, &limits,
                                 &owners, &err) == CT_OK
                     ? 0
                     : ctpy_raise_int(&err);
    }
    ct_free(spans);
    return result;
}

/* The parameters of a bucket, in the order of their places. */
static PyObject *
members_of(const GradReducer *self, const ct_bucket *bucket)
{
    PyObject *members = PyList_New((Py_ssize_t)bucket->n_params);
    for (size_t k = 0; members != NULL && k < bucket->n_params; k++) {
        const uint32_t i = self->core.plan.order[bucket->first + k];
        PyList_SET_ITEM(members, (Py_ssize_t)k,
                        Py_NewRef(PyTuple_GET_ITEM(self->params, i)));
    }
    return members;
}

/* Lends the bucket its memory and notes the parameters' views of it. */
static int
place_bucket(GradReducer *self, size_t b, PyObject *flat, PyObject *views)
{
    const ct_bucket *bucket = &self->core.plan.buckets[b];
    const ctpy_place place = {.what = "the memory of a bucket", .group = -1};
    ctpy_view view;
    if (ctpy_view_of(ctpy_state_borrow((PyObject *)self), flat, &place, &view) < 0 ||
        PyList_Append(self->memory, flat) < 0) {
        return -1;
    }
    if (view.span.n != bucket->n || view.span.dtype != bucket->dtype ||
        PyList_GET_SIZE(views) != (Py_ssize_t)bucket->n_params) {
        PyErr_Format(PyExc_ValueError,
                     "allocate() gave %zu elements and %zd views; expected %zu and %zu",
                     view.span.n, PyList_GET_SIZE(views), bucket->n, bucket->n_params);
        return -1;
    }
    ct_reducer_lend(&self->core, b, view.span.data);
    for (size_t k = 0; k < bucket->n_params; k++) {
        const uint32_t i = self->core.plan.order[bucket->first + k];
        PyObject *own = PyList_GET_ITEM(views, (Py_ssize_t)k);
        if (PyList_SetItem(self->views, (Py_ssize_t)i, Py_NewRef(own)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
allocate_buckets(GradReducer *self)
{
    for (size_t b = 0; b < self->core.plan.n_buckets; b++) {
        const ct_bucket *bucket = &self->core.plan.buckets[b];
        if (bucket->alone) {
            continue;
        }
        PyObject *members = members_of(self, bucket), *flat, *views;
        PyObject *made =
            members == NULL ? NULL : PyObject_CallOneArg(self->allocate, members);
        Py_XDECREF(members);
        const bool placed =
            made != NULL &&
            PyArg_ParseTuple(made, "OO!:allocate", &flat, &PyList_Type, &views) &&
            place_bucket(self, b, flat, views) == 0;
        Py_XDECREF(made);
        if (!placed) {
            return -1;
        }
    }
    return 0;
}

/* The first two hooks are of the end of a pass and of its beginning. */
static int
add_hooks(GradReducer *self, ctpy_state *state)
{
    if (grad_hook_add(self, GRAD_HOOK_END) == NULL ||
        grad_hook_add(self, GRAD_HOOK_OUTPUT) == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->params); i++) {
        PyObject *hook = grad_hook_add(self, i);
        PyObject *handle =
            hook == NULL ? NULL
                         : PyObject_CallMethodOneArg(
                               PyTuple_GET_ITEM(self->params, i),
                               state->str_register_post_accumulate_grad_hook, hook);
        const int failed = handle == NULL || PyList_Append(self->handles, handle) < 0;
        Py_XDECREF(handle);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

int
grad_reducer_set_up(GradReducer *self, const ct_bucket_limits *limits)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    self->syncs = true;
    if (plan(self, state, *limits) < 0 || allocate_buckets(self) < 0) {
        return -1;
    }
    self->core.copies_back = !self->grads_are_views;
    self->core.learning = self->static_graph;
    return Py_IsNone(self->queue_callback) ? 0 : add_hooks(self, state);
}
