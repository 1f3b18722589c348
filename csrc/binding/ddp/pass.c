/* A backward pass: gradients as they come, and its end. */
#include "binding/comm/sync.h"
#include "binding/ddp/reducer.h"
#include "binding/runtime/buffer.h"
#include "binding/runtime/nested.h"

#include "core/base/alloc.h"

#include <limits.h>
#include <math.h>
#include <string.h>

static Py_ssize_t
count(const GradReducer *self)
{
    return PyTuple_GET_SIZE(self->params);
}

void
grad_reducer_abandon(GradReducer *self)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    ct_comm *comm = ((Communicator *)self->communicator)->comm;
    if (comm != NULL && self->core.active) {
        Py_BEGIN_ALLOW_THREADS
        ct_reducer_abort(&self->core, comm);
        Py_END_ALLOW_THREADS
    }
    self->core.active = self->queued = false;
    PyErr_Restore(type, value, trace);
}

/* ---- the beginning -----------------------------------------------------------------
 */

static PyObject *
param_of(const GradReducer *self, Py_ssize_t param)
{
    return PyTuple_GET_ITEM(self->params, param);
}

const char *
grad_reducer_name(const GradReducer *self, Py_ssize_t param)
{
    return PyUnicode_AsUTF8(PyTuple_GET_ITEM(self->names, param));
}

static int
read_view(GradReducer *self, PyObject *tensor, Py_ssize_t param, const char *what,
          ctpy_view *view)
{
    char text[200];
    const char *name = grad_reducer_name(self, param);
    if (name == NULL) {
        return -1;
    }
    (void)PyOS_snprintf(text, sizeof text, "%s of parameter '%.150s'", what, name);
    const ctpy_place place = {.what = text, .group = -1};
    return ctpy_view_of(ctpy_state_borrow((PyObject *)self), tensor, &place, view);
}

static int
check_like(const GradReducer *self, Py_ssize_t param, const ctpy_view *own,
           const ctpy_view *grad)
{
    if (own->span.n == grad->span.n && own->span.dtype == grad->span.dtype) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "the gradient of parameter '%.150s' has %zu elements of %s; expected "
                 "%zu of %s, as when it was wrapped",
                 grad_reducer_name(self, param), grad->span.n,
                 ct_dtype_name(grad->span.dtype), own->span.n,
                 ct_dtype_name(own->span.dtype));
    return -1;
}

/* The parameter's own view of a bucket, or None. */
static PyObject *
view_of(const GradReducer *self, Py_ssize_t param)
{
    return PyList_GET_ITEM(self->views, param);
}

static int
keep(GradReducer *self, Py_ssize_t param, PyObject *tensor)
{
    return PyList_SetItem(self->given, param, Py_NewRef(tensor));
}

/* Announces memory, without the GIL. */
static int
announce(GradReducer *self, Py_ssize_t param, const ct_span *span)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    Communicator *group = (Communicator *)self->communicator;
    group->busy++;
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = ct_reducer_announce(&self->core, comm, (size_t)param, span, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    group->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Announces grad; the parameter's gradient becomes its view of the bucket. */
static int
give(GradReducer *self, Py_ssize_t param, PyObject *grad, const ct_span *span)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *view = view_of(self, param);
    const bool becomes_view = self->grads_are_views && !Py_IsNone(view);
    if (keep(self, param, becomes_view ? view : grad) < 0 ||
        announce(self, param, span) < 0) {
        return -1;
    }
    return becomes_view && grad != view
               ? PyObject_SetAttr(param_of(self, param), state->str_grad, view)
               : 0;
}

/* A tensor like the parameter, in memory of its own. */
static PyObject *
new_like(const GradReducer *self, Py_ssize_t param)
{
    PyObject *made =
        PyObject_CallFunction(self->allocate, "((O))", param_of(self, param));
    PyObject *flat, *views, *view = NULL;
    if (made != NULL && PyArg_ParseTuple(made, "OO", &flat, &views)) {
        view = PySequence_GetItem(views, 0);
    }
    Py_XDECREF(made);
    return view;
}

/* A copy of a gradient whose elements lie in another order than the parameter's. */
static PyObject *
in_order(const GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *view = view_of(self, param);
    PyObject *into = Py_IsNone(view) ? new_like(self, param) : Py_NewRef(view);
    PyObject *answer =
        into == NULL ? NULL : PyObject_CallMethodOneArg(into, state->str_copy_, grad);
    if (answer == NULL) {
        Py_CLEAR(into);
    }
    Py_XDECREF(answer);
    return into;
}

static int
give_reordered(GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *copy = in_order(self, param, grad);
    ctpy_view view;
    int result = -1;
    if (copy != NULL && read_view(self, copy, param, "the gradient", &view) == 0 &&
        PyObject_SetAttr(param_of(self, param), state->str_grad, copy) == 0) {
        result = give(self, param, copy, &view.span);
    }
    Py_XDECREF(copy);
    return result;
}

static int
grad_reducer_give(GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    ctpy_view view, own;
    if (read_view(self, grad, param, "the gradient", &view) < 0 ||
        read_view(self, param_of(self, param), param, "the values", &own) < 0 ||
        check_like(self, param, &own, &view) < 0) {
        return -1;
    }
    own.span = view.span; /* the order alone matters */
    return ctpy_view_matches(&own, &view) ? give(self, param, grad, &view.span)
                                          : give_reordered(self, param, grad);
}

/* The gradient that a parameter without one may get: its view, or one of its own. */
static PyObject *
blank(const GradReducer *self, Py_ssize_t param)
{
    PyObject *view = view_of(self, param);
    return self->grads_are_views && !Py_IsNone(view) ? Py_NewRef(view)
                                                     : new_like(self, param);
}

static int
grad_reducer_give_zeros(GradReducer *self, Py_ssize_t param)
{
    PyObject *zeros = blank(self, param);
    ctpy_view view;
    ct_error err;
    int result = -1;
    if (zeros != NULL && read_view(self, zeros, param, "the zeros", &view) == 0) {
        const ct_device *device = self->core.device;
        result = device->zero(self->core.stream, &view.span, 1, &err) == CT_OK
                     ? 0
                     : ctpy_raise_int(&err);
    }
    if (result == 0) {
        result = keep(self, param, zeros);
    }
    if (result == 0) {
        result = announce(self, param, &view.span);
    }
    Py_XDECREF(zeros);
    return result;
}

static int
grad_reducer_give_absent(GradReducer *self, Py_ssize_t param)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *grad = PyObject_GetAttr(param_of(self, param), state->str_grad);
    if (grad == NULL) {
        return -1;
    }
    const bool none = Py_IsNone(grad);
    const int result = none ? grad_reducer_give_zeros(self, param)
                            : grad_reducer_give(self, param, grad);
    Py_DECREF(grad);
    self->absent[param] = none;
    return result;
}

/* What never gets a gradient is there from the start. */
static int
give_known_absent(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->core.params[i].expected == 0 &&
            grad_reducer_give_absent(self, i) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
begin(GradReducer *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "gradients of two backward passes at once: a DataParallel "
                        "module is for one thread at a time");
        return -1;
    }
    if (self->core.active) {
        return 0;
    }
    ct_reducer_begin(&self->core);
    self->dropped = 0;
    (void)memset(self->absent, 0, (size_t)count(self) * sizeof *self->absent);
    return self->static_graph && !self->core.learning ? give_known_absent(self) : 0;
}

/* Has autograd tell us when the pass ends. */
static int
queue_end(GradReducer *self)
{
    if (self->queued) {
        return 0;
    }
    PyObject *hook = PyList_GET_ITEM(self->hooks, 0);
    PyObject *answer = PyObject_CallOneArg(self->queue_callback, hook);
    Py_XDECREF(answer);
    self->queued = answer != NULL;
    return answer == NULL ? -1 : 0;
}

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

static int
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

static int
grad_reducer_on_output(GradReducer *self)
{
    if (grad_reducer_unaverage(self) < 0) {
        return -1;
    }
    return self->syncs && (begin(self) < 0 || queue_end(self) < 0) ? -1 : 0;
}

static int
raise_twice(const GradReducer *self, Py_ssize_t param)
{
    PyErr_Format(PyExc_RuntimeError,
                 self->static_graph
                     ? "parameter '%.150s' got more gradients in this backward pass "
                       "than in the first, and static_graph=True says that all passes "
                       "are alike"
                     : "parameter '%.150s' got a second gradient in one backward pass, "
                       "after its first was taken for the average. Where that happens "
                       "in every pass, as with reentrant checkpoints, use "
                       "static_graph=True",
                 grad_reducer_name(self, param));
    return -1;
}

static int
take(GradReducer *self, Py_ssize_t param)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *grad =
        PyObject_GetAttr(PyTuple_GET_ITEM(self->params, param), state->str_grad);
    if (grad == NULL) {
        return -1;
    }
    const int result = Py_IsNone(grad) ? 0 : grad_reducer_give(self, param, grad);
    Py_DECREF(grad);
    return result;
}

static int
rank_of(const GradReducer *self)
{
    return ((Communicator *)self->communicator)->comm->rank;
}

static bool
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

static int
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

static int
grad_reducer_on_gradient(GradReducer *self, Py_ssize_t param)
{
    if (!self->syncs) {
        return 0;
    }
    int result = begin(self) < 0 || queue_end(self) < 0 ? -1 : 0;
    if (result == 0) {
        result = ct_reducer_is_complete(&self->core, (size_t)param)
                     ? raise_twice(self, param)
                     : take(self, param);
    }
    if (result == 0) {
        result = grad_reducer_drop_sent(self);
    }
    if (result < 0) {
        grad_reducer_abandon(self);
    }
    return result;
}

/* ---- the end -----------------------------------------------------------------------
 */

/* "a, b and 3 more" of the parameters that have not come. */
static PyObject *
list_missing(const GradReducer *self)
{
    enum {
        SHOWN = 8
    };
    PyObject *text = PyUnicode_FromString("");
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; text != NULL && i < count(self); i++) {
        if (self->core.params[i].seen > 0 || ++n > SHOWN) {
            continue;
        }
        PyObject *name = PyTuple_GET_ITEM(self->names, i);
        Py_SETREF(text,
                  PyUnicode_FromFormat("%U%s'%U'", text, n > 1 ? ", " : "", name));
    }
    if (text != NULL && n > SHOWN) {
        Py_SETREF(text, PyUnicode_FromFormat("%U and %zd more", text, n - SHOWN));
    }
    return text;
}

static int
raise_missing(const GradReducer *self)
{
    PyObject *text = list_missing(self);
    if (text != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "the backward pass has ended and these parameters got no gradient: %U. "
            "Every parameter must take part in the loss, on every rank. Use "
            "find_unused_parameters=True where some do not; freeze, before wrapping, "
            "those that never do; run all but the last of several backward passes "
            "under no_sync()",
            text);
        Py_DECREF(text);
    }
    return -1;
}

static int
give_missing(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->core.params[i].seen > 0) {
            continue;
        }
        if (!self->find_unused && !self->core.learning) {
            return raise_missing(self);
        }
        break;
    }
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->core.params[i].seen == 0 && grad_reducer_give_absent(self, i) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Waits for the averages and, while graphs may change, asks who has used what. */
static int
grad_reducer_finish_buckets(GradReducer *self)
{
    ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    const bool asks = (self->find_unused || self->static_graph) && !self->usage_known;
    const ct_request usage = {
        .what = CT_ALL_REDUCE,
        .op = CT_REDUCE_MAX,
        .in = {self->used, (size_t)count(self), CT_I64}
    };
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    ((Communicator *)self->communicator)->busy++;
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = ct_reducer_finish(&self->core, comm, &err);
    if (status == CT_OK && asks) {
        status = ct_comm_run(comm, &usage, &err);
    }
    Py_END_ALLOW_THREADS
    self->busy = false;
    ((Communicator *)self->communicator)->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* A parameter that some rank has used gets its average, though this rank has not. */
static int
add_absent_averages(GradReducer *self)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->absent[i] && self->used[i] && !grad_reducer_is_anothers(self, i) &&
            PyObject_SetAttr(PyTuple_GET_ITEM(self->params, i), state->str_grad,
                             PyList_GET_ITEM(self->given, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
learn(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        ct_reducer_param *p = &self->core.params[i];
        p->expected = self->absent[i] ? 0 : p->seen;
    }
    self->core.learning = false;
    self->usage_known = true;
}

static int
grad_reducer_release_given(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (PyList_SetItem(self->given, i, Py_NewRef(Py_None)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
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

static int
finish(GradReducer *self)
{
    if (!self->usage_known) {
        for (Py_ssize_t i = 0; i < count(self); i++) {
            self->used[i] = !self->absent[i];
        }
    }
    if (grad_reducer_finish_buckets(self) < 0 || add_absent_averages(self) < 0 ||
        grad_reducer_keep_own(self) < 0) {
        return -1;
    }
    if (self->core.learning) {
        learn(self);
    }
    return grad_reducer_release_given(self);
}

static int
grad_reducer_on_end(GradReducer *self)
{
    self->queued = false;
    if (!self->core.active) {
        return 0;
    }
    if (give_missing(self) < 0 || finish(self) < 0) {
        grad_reducer_abandon(self);
        return -1;
    }
    return 0;
}

const char GradReducer_reduce_doc[] =
    "reduce($self, /)\n--\n\n"
    "Replace every gradient by its average over the ranks, and a missing one by that "
    "of\n"
    "zeros: for after the backward pass, where nothing is hooked.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

PyObject *
GradReducer_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    GradReducer *self = (GradReducer *)op;
    int result = begin(self);
    for (Py_ssize_t i = count(self); result == 0 && i-- > 0;) {
        result = grad_reducer_give_absent(self, i);
    }
    for (Py_ssize_t i = 0; result == 0 && i < count(self); i++) {
        self->used[i] = true;
    }
    if (result < 0 || grad_reducer_finish_buckets(self) < 0 ||
        add_absent_averages(self) < 0 || grad_reducer_keep_own(self) < 0 ||
        grad_reducer_release_given(self) < 0) {
        grad_reducer_abandon(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Around a forward pass: what the backward pass that follows will do. */

/* A pass that an exception ended never told its end. */
static int
settle(GradReducer *self)
{
    const size_t started = self->core.started, all = self->core.plan.n_buckets;
    if (!self->core.active) {
        return 0;
    }
    grad_reducer_abandon(self);
    if (started == 0) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "the last backward pass did not end: %zu of %zu buckets of gradients "
                 "were exchanged, and the other ranks wait for the rest. Ranks cannot "
                 "go on after a failure in a backward pass that is exchanged",
                 started, all);
    return -1;
}

const char GradReducer_before_forward_doc[] =
    "before_forward($self, with_grad, syncs, buffers, /)\n--\n\n"
    "Say that a forward pass begins.\n\n"
    "with_grad: a backward pass may follow; syncs: it is to be exchanged. buffers:\n"
    "tensors that become those of rank 0, a sequence.\n\n"
    "Raises RuntimeError where the pass before broke off in the middle.";

enum {
    HAS_DATA = 1,
    SYNCS = 2,
    HAS_BUFFERS = 4
};

/* What all ranks are about to do. */
typedef struct rank_counts {
    int active; /* ranks that have data */
    int last;   /* the last of them, whose buffers count, as in torch */
    int flags;  /* of any of them */
} rank_counts;

static int
gather_flags(GradReducer *self, int64_t mine, int64_t *all)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    if (comm == NULL) {
        return -1;
    }
    const ct_request request = {
        .what = CT_ALL_GATHER,
        .in = {&mine, 1,                        CT_I64},
        .out = {all,   (size_t)comm->world_size, CT_I64}
    };
    return ctpy_comm_run(state, self->communicator, &request);
}

static int
gather_counts(GradReducer *self, int mine, rank_counts *found)
{
    const ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    if (comm == NULL) {
        return -1;
    }
    const int ranks = comm->world_size;
    int64_t *all = ct_calloc((size_t)ranks, sizeof *all);
    *found = (rank_counts){0};
    if (all == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int result = gather_flags(self, mine, all);
    for (int r = 0; r < ranks; r++) {
        if (all[r] & HAS_DATA) {
            found->active++;
            found->last = r;
            found->flags |= (int)all[r];
        }
    }
    ct_free(all);
    self->root = found->active > 0 ? found->last : self->root;
    self->core.factor = self->keeps_divisor || found->active == 0
                            ? 1.0
                            : (double)ranks / (double)found->active;
    if (result == 0 && self->throws_early && found->active > 0 &&
        found->active < ranks) {
        PyErr_Format(PyExc_RuntimeError,
                     "%d of %d ranks have no data left, and "
                     "throw_on_early_termination is set",
                     ranks - found->active, ranks);
        return -1;
    }
    return result;
}

static int
grad_reducer_tell(GradReducer *self, bool syncs, bool has_buffers)
{
    rank_counts found;
    return self->joining ? gather_counts(self,
                                         HAS_DATA | (syncs ? SYNCS : 0) |
                                             (has_buffers ? HAS_BUFFERS : 0),
                                         &found)
                         : 0;
}

PyObject *
GradReducer_before_forward(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    PyObject *buffers;
    int with_grad, syncs;
    if (!PyArg_ParseTuple(args, "ppO:before_forward", &with_grad, &syncs, &buffers) ||
        settle(self) < 0) {
        return NULL;
    }
    const Py_ssize_t n = PyObject_Size(buffers);
    if (n < 0 || (with_grad && grad_reducer_tell(self, syncs, n > 0) < 0)) {
        return NULL;
    }
    if (with_grad) {
        self->syncs = syncs;
    }
    return ctpy_broadcast_sequence(ctpy_state_borrow(op), self->communicator, buffers,
                                   self->root) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

/* ---- outputs -----------------------------------------------------------------------
 */

static int
hook_tensor(GradReducer *self, PyObject *tensor)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    PyObject *made_by;
    int found = ctpy_lookup(tensor, state->str_grad_fn, &made_by);
    if (found < 1) {
        return found;
    }
    const bool computed = !Py_IsNone(made_by);
    Py_DECREF(made_by);
    if (!computed) {
        return 0;
    }
    PyObject *hook = PyList_GET_ITEM(self->hooks, 1);
    PyObject *handle =
        PyObject_CallMethodOneArg(tensor, state->str_register_hook, hook);
    Py_XDECREF(handle);
    return handle == NULL ? -1 : 0;
}

static int
hook_outputs(GradReducer *self, PyObject *op)
{
    const int kind = ctpy_kind_of(op);
    if (kind < 0 || kind == CTPY_NONE) {
        return kind < 0 ? -1 : 0;
    }
    if (kind == CTPY_LEAF) {
        return hook_tensor(self, op);
    }
    PyObject *children = ctpy_children(op, (ctpy_kind)kind, NULL);
    int result =
        children == NULL || Py_EnterRecursiveCall(" in a model's output") ? -1 : 0;
    if (result == 0) {
        for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(children); i++) {
            result = hook_outputs(self, PyTuple_GET_ITEM(children, i));
        }
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(children);
    return result;
}

const char GradReducer_after_forward_doc[] =
    "after_forward($self, output, /)\n--\n\n"
    "Have the tensors in a model's output tell when their backward pass begins.";

PyObject *
GradReducer_after_forward(PyObject *op, PyObject *output)
{
    GradReducer *self = (GradReducer *)op;
    const bool counts = self->syncs || self->owners != NULL;
    return counts && hook_outputs(self, output) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Ranks whose data ends before that of others, and that then take part without any. */

const char GradReducer_join_doc[] =
    "join($self, keeps_divisor, throws_early, /)\n--\n\n"
    "Have ranks tell each other before each pass whether they have data.\n\n"
    "keeps_divisor: sums are divided by the number of all ranks, not of those with\n"
    "data. throws_early: all raise RuntimeError as soon as one has none.";

PyObject *
GradReducer_join(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    int keeps, throws;
    if (!PyArg_ParseTuple(args, "pp:join", &keeps, &throws)) {
        return NULL;
    }
    if (self->owners != NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "join() is not for gradients that go to their owners alone: "
                        "each rank has to update its parameters to the end");
        return NULL;
    }
    self->keeps_divisor = keeps;
    self->throws_early = throws;
    self->joining = true;
    Py_RETURN_NONE;
}

/* A backward pass of zeros. */
static int
shadow_pass(GradReducer *self)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(self->params);
    int result = 0;
    ct_reducer_begin(&self->core);
    for (Py_ssize_t i = n; result == 0 && i-- > 0;) {
        result = grad_reducer_give_zeros(self, i);
    }
    for (Py_ssize_t i = 0; !self->usage_known && i < n; i++) {
        self->used[i] = false;
    }
    if (result < 0 || grad_reducer_finish_buckets(self) < 0 ||
        grad_reducer_release_given(self) < 0) {
        grad_reducer_abandon(self);
        return -1;
    }
    self->usage_known = self->usage_known || self->static_graph;
    return 0;
}

static int
shadow_all(GradReducer *self, PyObject *buffers)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    rank_counts found;
    for (;;) {
        if (gather_counts(self, 0, &found) < 0) {
            return -1;
        }
        if (found.active == 0) {
            return 0;
        }
        if ((found.flags & HAS_BUFFERS) != 0 &&
            ctpy_broadcast_sequence(state, self->communicator, buffers, self->root) <
                0) {
            return -1;
        }
        if ((found.flags & SYNCS) != 0 && shadow_pass(self) < 0) {
            return -1;
        }
    }
}

const char GradReducer_shadow_doc[] =
    "shadow($self, buffers, tensors, /)\n--\n\n"
    "Take part in the others' passes with zeros until no rank has data; then take "
    "over\n"
    "tensors from one that was the last to have some.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

PyObject *
GradReducer_shadow(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    PyObject *buffers, *tensors;
    if (!PyArg_ParseTuple(args, "OO:shadow", &buffers, &tensors)) {
        return NULL;
    }
    int result = shadow_all(self, buffers);
    if (result == 0) {
        result = ctpy_broadcast_sequence(ctpy_state_borrow(op), self->communicator,
                                         tensors, self->root);
    }
    self->joining = self->throws_early = false;
    self->core.factor = 1.0;
    self->root = 0;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* Gradients of which each has one rank that needs its average, and no other. */

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

/* ctrainer._C.GradHook: what autograd calls during a backward pass. */

PyDoc_STRVAR(GradHook_doc, "What autograd calls for a GradReducer, which makes them.");

PyObject *
grad_hook_add(GradReducer *self, Py_ssize_t index)
{
    PyTypeObject *type = ctpy_state_borrow((PyObject *)self)->GradHook;
    GradHook *made = (GradHook *)type->tp_alloc(type, 0);
    if (made == NULL) {
        return NULL;
    }
    made->index = index;
    const int failed = PyList_Append(self->hooks, (PyObject *)made);
    made->reducer = failed ? NULL : self;
    Py_DECREF(made);
    return failed ? NULL : (PyObject *)made;
}

static int
tell(GradReducer *reducer, Py_ssize_t index)
{
    switch (index) {
    case GRAD_HOOK_OUTPUT:
        return grad_reducer_on_output(reducer);
    case GRAD_HOOK_END:
        return grad_reducer_on_end(reducer);
    default:
        return grad_reducer_on_gradient(reducer, index);
    }
}

/* None leaves the gradient as it is. */
static PyObject *
GradHook_call(PyObject *op, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    GradReducer *reducer = ((GradHook *)op)->reducer;
    const Py_ssize_t index = ((GradHook *)op)->index;
    if (reducer == NULL) {
        Py_RETURN_NONE;
    }
    Py_INCREF(reducer);
    const int result = tell(reducer, index);
    Py_DECREF(reducer);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* Gradients of Python as the core's spans. */

static PyType_Slot GradHook_slots[] = {
    {Py_tp_doc,      (void *)GradHook_doc},
    {Py_tp_call,     GradHook_call       },
    {Py_tp_traverse, ctpy_leaf_traverse  },
    {Py_tp_dealloc,  ctpy_leaf_dealloc   },
    {0,              NULL                },
};

PyType_Spec GradHook_spec = {
    .name = "ctrainer._C.GradHook",
    .basicsize = sizeof(GradHook),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = GradHook_slots,
};
