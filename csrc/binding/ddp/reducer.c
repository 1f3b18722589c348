/* ctrainer._C.GradReducer: gradients averaged over ranks during the backward pass.
 *
 * The type and its setting up: limits and owners to a plan of buckets, memory for the
 * buckets, hooks on the parameters. The passes are in pass.c. */
#include "binding/ddp/reducer.h"

#include "binding/runtime/buffer.h"
#include "binding/runtime/objects.h"

#include "core/base/alloc.h"

#include <limits.h>
#include <string.h>

enum {
    MIB = 1 << 20
};

/* ---- lifetime -------------------------------------------------------------------- */

PyDoc_STRVAR(
    GradReducer_doc,
    "GradReducer(communicator, params, names, allocate, queue_callback=None, *,\n"
    "            bucket_cap_mb=25.0, gradient_as_bucket_view=True,\n"
    "            find_unused_parameters=False, static_graph=False, owners=None)\n--\n\n"
    "Averages the gradients of params over the ranks, while autograd computes them.\n\n"
    "params: tensors of floating point on one device, each with its name, the same "
    "on\n"
    "every rank. allocate(params) returns a flat tensor and a list of views of it, "
    "one\n"
    "like each. queue_callback(fn) has autograd call fn when its pass ends; with None\n"
    "nothing is hooked and reduce() does all. owners: by parameter the rank that gets\n"
    "its average, or -1 for all; on the others its gradient is dropped when it has "
    "been\n"
    "sent, and of each owner and dtype there is one bucket. The rest is as in\n"
    "DataParallel.\n\n"
    "Raises TypeError naming a parameter of another kind, ValueError for an owner "
    "that\n"
    "is no rank.");

CTPY_TRAVERSE(GradReducer, GRAD_REDUCER_OBJECTS)

/* Parameters may still hold hooks, which do nothing from now on. */
static void
silence_hooks(GradReducer *self)
{
    for (Py_ssize_t i = 0; self->hooks != NULL && i < PyList_GET_SIZE(self->hooks);
         i++) {
        ((GradHook *)PyList_GET_ITEM(self->hooks, i))->reducer = NULL;
    }
}

/* Waits first: collectives under way may still write into the tensors. */
static int
GradReducer_clear(PyObject *op)
{
    GradReducer *self = (GradReducer *)op;
    silence_hooks(self);
    /* NULL after an earlier clear, and in a half-made object. */
    if (self->communicator != NULL) {
        grad_reducer_abandon(self);
    }
    GRAD_REDUCER_OBJECTS(CTPY_CLEAR_FIELD)
    return 0;
}

static void
GradReducer_dealloc(PyObject *op)
{
    GradReducer *self = (GradReducer *)op;
    PyObject_GC_UnTrack(op);
    (void)GradReducer_clear(op);
    Py_BEGIN_ALLOW_THREADS /* waits for the device */
    ct_reducer_fini(&self->core);
    ct_staged_fini(&self->staged);
    Py_END_ALLOW_THREADS
    ct_free(self->used);
    ct_free(self->absent);
    ct_free(self->owners);
    ct_free(self->averaged);
    ctpy_leaf_dealloc(op);
}

/* ---- setting up ------------------------------------------------------------------ */

static PyObject *
new_list(Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(Py_None));
    }
    return list;
}

static int
hold(GradReducer *self, PyObject *communicator, PyObject *params, PyObject *names)
{
    self->communicator = Py_NewRef(communicator);
    /* Tuples, so that nobody changes the order by which the plan counts. */
    self->params = PySequence_Tuple(params);
    self->names = PySequence_Tuple(names);
    if (self->params == NULL || self->names == NULL) {
        return -1;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(self->params);
    if (PyTuple_GET_SIZE(self->names) != n) {
        PyErr_Format(PyExc_ValueError, "%zd parameters and %zd names; expected as many",
                     n, PyTuple_GET_SIZE(self->names));
        return -1;
    }
    self->memory = PyList_New(0);
    self->hooks = PyList_New(0);
    self->handles = PyList_New(0);
    self->views = new_list(n);
    self->exchanged = new_list(n);
    return self->memory == NULL || self->hooks == NULL || self->handles == NULL ||
                   self->views == NULL || self->exchanged == NULL
               ? -1
               : 0;
}

static int
parse_limits(double bucket_cap_mb, ct_bucket_limits *limits)
{
    if (!(bucket_cap_mb > 0.0 && bucket_cap_mb <= 1e9)) {
        PyErr_SetString(PyExc_ValueError,
                        "bucket_cap_mb must be above 0 and at most 1e9");
        return -1;
    }
    limits->cap_bytes = (size_t)(bucket_cap_mb * MIB);
    /* torch's size of the first bucket. */
    limits->first_bytes = limits->cap_bytes < MIB ? limits->cap_bytes : MIB;
    return 0;
}

enum {
    UNDER_WAY_BYTES = 8 << 20 /* of gradients that wait to be dropped */
};

static int
read_owner(PyObject *number, int *owner)
{
    const long rank = PyLong_AsLong(number);
    if (rank == -1 && PyErr_Occurred()) {
        return -1;
    }
    /* A value that no int holds is no rank either, and the plan rejects it. */
    *owner = rank < INT_MIN || rank > INT_MAX ? INT_MAX : (int)rank;
    return 0;
}

static int
read_owners_of(GradReducer *self, PyObject *numbers)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(self->params);
    if (PyTuple_GET_SIZE(numbers) != n) {
        PyErr_Format(PyExc_ValueError,
                     "%zd parameters and %zd owners; expected as many", n,
                     PyTuple_GET_SIZE(numbers));
        return -1;
    }
    self->owners = ct_calloc((size_t)n + 1, sizeof *self->owners);
    self->averaged = ct_calloc((size_t)n + 1, sizeof *self->averaged);
    if (self->owners == NULL || self->averaged == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_owner(PyTuple_GET_ITEM(numbers, i), &self->owners[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_owners(GradReducer *self, PyObject *owners)
{
    if (Py_IsNone(owners)) {
        return 0;
    }
    if (!self->grads_are_views || self->static_graph) {
        PyErr_SetString(PyExc_ValueError,
                        "owners go with gradient_as_bucket_view=True and "
                        "static_graph=False alone");
        return -1;
    }
    PyObject *all = PySequence_Tuple(owners);
    const int result = all == NULL ? -1 : read_owners_of(self, all);
    Py_XDECREF(all);
    self->core.most_under_way = UNDER_WAY_BYTES;
    return result;
}

static int
read_params(GradReducer *self, ct_span *spans)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->params); i++) {
        char text[200];
        const char *name = grad_reducer_name(self, i);
        if (name == NULL) {
            return -1;
        }
        (void)PyOS_snprintf(text, sizeof text, "parameter '%.150s'", name);
        /* Names in errors: an index says little in a model of hundreds of tensors. */
        ctpy_view view;
        if (grad_reducer_view(self, PyTuple_GET_ITEM(self->params, i), text, &view) <
            0) {
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

enum {
    LONG_BYTES = 1 << 20 /* of a gradient that gets a collective to itself */
};

/* With a low fixed cost of collectives all but short gradients are exchanged in
 * place, without a copy into a bucket. */
static size_t
alone_bytes(const ct_comm *comm)
{
    return comm->ops->batch_bytes != 0 ? comm->ops->batch_bytes : LONG_BYTES;
}

static int
plan(GradReducer *self, ctpy_state *state, ct_bucket_limits limits)
{
    const size_t n = (size_t)PyTuple_GET_SIZE(self->params);
    ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    const ct_owners owners = {self->owners, comm == NULL ? 0 : comm->world_size};
    ct_span *spans = ct_calloc(n + 1, sizeof *spans);
    ct_error err;
    int result = -1;
    /* Owned by the reducer: dealloc frees them, on failure too. */
    self->used = ct_calloc(n + 1, sizeof *self->used);
    self->absent = ct_calloc(n + 1, sizeof *self->absent);
    if (spans == NULL || self->used == NULL || self->absent == NULL) {
        PyErr_NoMemory();
    }
    else if (comm != NULL && read_params(self, spans) == 0) {
        if (self->target.device == NULL) { /* no parameters */
            self->target = (ctpy_target){&ct_device_cpu, CTPY_DL_CPU, 0, NULL};
        }
        const ctpy_target *target = &self->target;
        limits.alone_bytes = alone_bytes(ctpy_comm_at(comm, target, &self->staged));
        result = ct_reducer_init(&self->core, target->device, target->stream, spans, n,
                                 &limits, &owners, &err) == CT_OK
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

/* Sets the bucket's memory and the parameters' views. */
static int
place_bucket(GradReducer *self, size_t b, PyObject *flat, PyObject *views)
{
    const ct_bucket *bucket = &self->core.plan.buckets[b];
    ctpy_view view;
    if (grad_reducer_view(self, flat, "the memory of a bucket", &view) < 0 ||
        PyList_Append(self->memory, flat) < 0) {
        return -1;
    }
    /* allocate() is Python, and the core will write so many elements. */
    if (view.span.n != bucket->n || view.span.dtype != bucket->dtype ||
        PyList_GET_SIZE(views) != (Py_ssize_t)bucket->n_params) {
        PyErr_Format(
            PyExc_ValueError,
            "allocate() returned %zu elements and %zd views; expected %zu and %zu",
            view.span.n, PyList_GET_SIZE(views), bucket->n, bucket->n_params);
        return -1;
    }
    ct_reducer_set_memory(&self->core, b, view.span.data);
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
        /* The gradient itself is the bucket. */
        if (bucket->alone) {
            continue;
        }
        PyObject *members = members_of(self, bucket), *flat, *views;
        /* In Python, because torch has to own the memory of tensors that become
         * gradients. */
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

static int
set_up(GradReducer *self, const ct_bucket_limits *limits)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    self->syncs = true;
    if (plan(self, state, *limits) < 0 || allocate_buckets(self) < 0) {
        return -1;
    }
    /* Gradients that are no views have to receive the averages. */
    self->core.copies_back = !self->grads_are_views;
    self->core.learning = self->static_graph;
    return Py_IsNone(self->queue_callback) ? 0 : grad_reducer_add_hooks(self);
}

static PyObject *
GradReducer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"communicator",
                            "params",
                            "names",
                            "allocate",
                            "queue_callback",
                            "bucket_cap_mb",
                            "gradient_as_bucket_view",
                            "find_unused_parameters",
                            "static_graph",
                            "owners",
                            NULL};
    PyObject *communicator, *params, *param_names, *allocate, *queue = Py_None;
    PyObject *owners = Py_None;
    double bucket_cap_mb = 25.0;
    int views = true, unused = false, is_static = false;
    ct_bucket_limits limits = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|O$dpppO:GradReducer", names,
                                     &communicator, &params, &param_names, &allocate,
                                     &queue, &bucket_cap_mb, &views, &unused,
                                     &is_static, &owners) ||
        parse_limits(bucket_cap_mb, &limits) < 0) {
        return NULL;
    }
    /* In tp_new, as hooks and plan are made once and __init__ could run twice. */
    GradReducer *self = (GradReducer *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->allocate = Py_NewRef(allocate);
    self->queue_callback = Py_NewRef(queue);
    self->grads_are_views = views;
    self->find_unused = unused;
    self->static_graph = is_static;
    if (ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), communicator) == NULL ||
        hold(self, communicator, params, param_names) < 0 ||
        read_owners(self, owners) < 0 || set_up(self, &limits) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* ---- what Python sees ------------------------------------------------------------ */

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Take the hooks off the parameters; nothing is averaged from "
                        "now on.");

static PyObject *
GradReducer_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    GradReducer *self = (GradReducer *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    silence_hooks(self);
    grad_reducer_abandon(self);
    while (PyList_GET_SIZE(self->handles) > 0) {
        const Py_ssize_t last = PyList_GET_SIZE(self->handles) - 1;
        /* Out of the list before the call: remove() may run code that closes once
         * more. */
        PyObject *handle = Py_NewRef(PyList_GET_ITEM(self->handles, last));
        PyObject *answer = PyList_SetSlice(self->handles, last, last + 1, NULL) < 0
                               ? NULL
                               : PyObject_CallMethodNoArgs(handle, state->str_remove);
        Py_DECREF(handle);
        Py_XDECREF(answer);
        if (answer == NULL) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
GradReducer_buckets(PyObject *op, void *Py_UNUSED(closure))
{
    const GradReducer *self = (GradReducer *)op;
    const ct_bucket_plan *p = &self->core.plan;
    PyObject *all = PyList_New((Py_ssize_t)p->n_buckets);
    /* By turn rather than by place: the order changes after the first pass. */
    for (size_t turn = 0; all != NULL && turn < p->n_buckets; turn++) {
        const ct_bucket *bucket = &p->buckets[self->core.turns[turn]];
        PyObject *one = PyList_New((Py_ssize_t)bucket->n_params);
        for (size_t k = 0; one != NULL && k < bucket->n_params; k++) {
            const uint32_t i = p->order[bucket->first + k];
            PyList_SET_ITEM(one, (Py_ssize_t)k,
                            Py_NewRef(PyTuple_GET_ITEM(self->names, i)));
        }
        if (one == NULL) {
            Py_CLEAR(all);
            break;
        }
        PyList_SET_ITEM(all, (Py_ssize_t)turn, one);
    }
    return all;
}

static const char GradReducer_compress_doc[] =
    "compress($self, how, /)\n--\n\n"
    "Choose how gradients are sent from now on, the same on every rank.\n\n"
    "how: 'no', as they are; 'fp16' or 'bf16', rounded to that dtype.\n\n"
    "Raises ValueError for another one, RuntimeError in a backward pass.";

static PyObject *
GradReducer_compress(PyObject *op, PyObject *how)
{
    GradReducer *self = (GradReducer *)op;
    ct_reducer *core = &self->core;
    const char *name = PyUnicode_AsUTF8(how);
    if (name == NULL) {
        return NULL;
    }
    const bool fp16 = strcmp(name, "fp16") == 0, bf16 = strcmp(name, "bf16") == 0;
    if (!fp16 && !bf16 && strcmp(name, "no") != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "gradients cannot be compressed by '%.100s'; expected no, "
                            "fp16 or bf16",
                            name);
    }
    /* Some buckets of the pass would be rounded on one rank and not on another. */
    if (core->active) {
        PyErr_SetString(PyExc_RuntimeError,
                        "compress() in the middle of a backward pass");
        return NULL;
    }
    core->rounds = fp16 || bf16;
    core->rounded = fp16 ? CT_F16 : CT_BF16;
    Py_RETURN_NONE;
}

static PyGetSetDef GradReducer_getset[] = {
    {"buckets", GradReducer_buckets, NULL,
     "The parameters' names, by bucket, in the order of the exchange.", NULL},
    {NULL,      NULL,                NULL, NULL,                        NULL},
};

static PyMemberDef GradReducer_members[] = {
    {"communicator", T_OBJECT_EX, offsetof(GradReducer, communicator), READONLY,
     "The group over which gradients are averaged."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef GradReducer_methods[] = {
    {"close",    GradReducer_close,    METH_NOARGS, close_doc               },
    {"compress", GradReducer_compress, METH_O,      GradReducer_compress_doc},
    {NULL,       NULL,                 0,           NULL                    },
};

static PyType_Slot GradReducer_slots[] = {
    {Py_tp_doc,      (void *)GradReducer_doc},
    {Py_tp_new,      GradReducer_new        },
    {Py_tp_traverse, GradReducer_traverse   },
    {Py_tp_clear,    GradReducer_clear      },
    {Py_tp_dealloc,  GradReducer_dealloc    },
    {Py_tp_methods,  GradReducer_methods    },
    {Py_tp_getset,   GradReducer_getset     },
    {Py_tp_members,  GradReducer_members    },
    {0,              NULL                   },
};

PyType_Spec GradReducer_spec = {
    .name = "ctrainer._C.GradReducer",
    .basicsize = sizeof(GradReducer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = GradReducer_slots,
};
