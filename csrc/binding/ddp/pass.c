/* The backward pass of a GradReducer, and the calls before and after a forward pass.
 *
 * Every rank announces a gradient for every parameter in every exchanged pass, zeros if
 * autograd computes none, because the ranks have to call the same collectives. The
 * bucket memory that is exchanged stays alive in `exchanged` until the pass has ended.
 */
#include "binding/comm/communicator.h"
#include "binding/ddp/reducer.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"

#include <math.h>
#include <string.h>

/* ---- parameters, by index -------------------------------------------------------- */

static Py_ssize_t
count(const GradReducer *self)
{
    return PyTuple_GET_SIZE(self->params);
}

static PyObject *
param_of(const GradReducer *self, Py_ssize_t param)
{
    return PyTuple_GET_ITEM(self->params, param);
}

/* The parameter's view of its bucket, or None. */
static PyObject *
view_of(const GradReducer *self, Py_ssize_t param)
{
    return PyList_GET_ITEM(self->views, param);
}

/* Read anew each time: users may replace a parameter's gradient at any moment. */
static PyObject *
get_grad(const GradReducer *self, Py_ssize_t param)
{
    return PyObject_GetAttr(param_of(self, param),
                            ctpy_state_borrow((PyObject *)self)->str_grad);
}

static int
set_grad(const GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    return PyObject_SetAttr(param_of(self, param),
                            ctpy_state_borrow((PyObject *)self)->str_grad, grad);
}

static int
keep(GradReducer *self, Py_ssize_t param, PyObject *tensor)
{
    return PyList_SetItem(self->exchanged, param, Py_NewRef(tensor));
}

/* Such a gradient is dropped on this rank once sent. */
static bool
is_of_another_rank(const GradReducer *self, Py_ssize_t param)
{
    const ct_comm *comm = ((Communicator *)self->communicator)->comm;
    return self->owners != NULL && self->owners[param] != CT_EVERY_RANK &&
           self->owners[param] != comm->rank;
}

/* Ends a pass that failed: waits for the collectives under way. The exception stays
 * set. */
void
grad_reducer_abandon(GradReducer *self)
{
    PyObject *type, *value, *trace;
    /* A Python backend runs code while waiting, and callers abandon with an exception
     * set. */
    PyErr_Fetch(&type, &value, &trace);
    ct_comm *comm = ((Communicator *)self->communicator)->comm;
    if (comm != NULL && self->core.active) {
        Py_BEGIN_ALLOW_THREADS
        ct_reducer_abort(&self->core, grad_reducer_group(self, comm));
        Py_END_ALLOW_THREADS
    }
    self->core.active = self->queued = false;
    PyErr_Restore(type, value, trace);
}

/* ---- announcing a gradient ------------------------------------------------------- */

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
    return grad_reducer_view(self, tensor, text, view);
}

/* Has the core work on the stream that torch works on now. Earlier work of this pass on
 * another stream has to end first; `there` is in the device's memory. */
static int
follow_torch(GradReducer *self, const ct_span *there)
{
    const ctpy_target *target = &self->target;
    void *stream;
    char byte;
    ct_error err;
    if (ctpy_current_stream(ctpy_state_borrow((PyObject *)self), target->memory,
                            target->ordinal, &stream) < 0) {
        return -1;
    }
    if (stream != self->core.stream && self->core.active && there->n > 0 &&
        target->device->transfer(self->core.stream, &byte, there->data, 1, &err) !=
            CT_OK) {
        return ctpy_raise_int(&err);
    }
    self->core.stream = self->staged.stream = stream;
    return 0;
}

/* The core copies so many elements of that dtype into the bucket. */
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

static int
announce(GradReducer *self, Py_ssize_t param, const ct_span *span)
{
    ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    int ordinal = self->target.ordinal;
    ct_error err, unused;
    if (comm == NULL || follow_torch(self, span) < 0) {
        return -1;
    }
    /* The GIL is released below: a second thread's backward pass must not enter the
     * core. */
    self->busy = true;
    PyThreadState *thread = ctpy_comm_enter(self->communicator);
    ct_status status = ct_device_switch(self->target.device, &ordinal, &err);
    if (status == CT_OK) {
        status = ct_reducer_announce(&self->core, grad_reducer_group(self, comm),
                                     (size_t)param, span, &err);
        (void)ct_device_switch(self->target.device, &ordinal, &unused);
    }
    ctpy_comm_leave(self->communicator, thread);
    self->busy = false;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Announces grad; the parameter's gradient becomes its view of the bucket. Autograd
 * then adds into the bucket, without a copy. */
static int
announce_in_order(GradReducer *self, Py_ssize_t param, PyObject *grad,
                  const ct_span *span)
{
    PyObject *view = view_of(self, param);
    const bool becomes_view = self->grads_are_views && !Py_IsNone(view);
    /* Kept before the exchange begins: the caller's reference may be the last. */
    if (keep(self, param, becomes_view ? view : grad) < 0 ||
        announce(self, param, span) < 0) {
        return -1;
    }
    return becomes_view && grad != view ? set_grad(self, param, view) : 0;
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

/* A copy of a gradient in the parameter's order of elements. */
static PyObject *
copy_in_order(const GradReducer *self, Py_ssize_t param, PyObject *grad)
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

/* For gradients with other strides: the same place in a bucket is the same element on
 * all ranks. */
static int
announce_copy(GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    PyObject *copy = copy_in_order(self, param, grad);
    ctpy_view view;
    int result = -1;
    if (copy != NULL && read_view(self, copy, param, "the gradient", &view) == 0 &&
        set_grad(self, param, copy) == 0) {
        result = announce_in_order(self, param, copy, &view.span);
    }
    Py_XDECREF(copy);
    return result;
}

static int
announce_grad(GradReducer *self, Py_ssize_t param, PyObject *grad)
{
    ctpy_view view, own;
    if (read_view(self, grad, param, "the gradient", &view) < 0 ||
        read_view(self, param_of(self, param), param, "the values", &own) < 0 ||
        check_like(self, param, &own, &view) < 0) {
        return -1;
    }
    own.span = view.span; /* compares the order of the elements alone */
    return ctpy_view_matches(&own, &view)
               ? announce_in_order(self, param, grad, &view.span)
               : announce_copy(self, param, grad);
}

/* Scales the tensor's elements, or with factor 0 writes zeros, with the GIL. */
static int
set_elements(GradReducer *self, const ct_span *span, double factor)
{
    const ct_device *device = self->target.device;
    int ordinal = self->target.ordinal;
    ct_error err, unused;
    if (follow_torch(self, span) < 0) {
        return -1;
    }
    ct_status status = ct_device_switch(device, &ordinal, &err);
    if (status == CT_OK) {
        void *stream = self->core.stream;
        status = factor == 0.0
                     ? device->zero(stream, span, 1, &err)
                     : device->scale(stream, factor, (double)INFINITY, span, 1, &err);
        (void)ct_device_switch(device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
announce_zeros(GradReducer *self, Py_ssize_t param)
{
    PyObject *view_in_bucket = view_of(self, param);
    /* The view of the bucket if there is one: zeros are written in place, not
     * copied. */
    PyObject *zeros = self->grads_are_views && !Py_IsNone(view_in_bucket)
                          ? Py_NewRef(view_in_bucket)
                          : new_like(self, param);
    ctpy_view view;
    int result = -1;
    if (zeros != NULL && read_view(self, zeros, param, "the zeros", &view) == 0) {
        result = set_elements(self, &view.span, 0.0);
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

/* Announces the gradient of a parameter that autograd did not reach: an earlier one, or
 * zeros. */
static int
announce_absent(GradReducer *self, Py_ssize_t param)
{
    PyObject *grad = get_grad(self, param);
    if (grad == NULL) {
        return -1;
    }
    const bool none = Py_IsNone(grad);
    const int result =
        none ? announce_zeros(self, param) : announce_grad(self, param, grad);
    Py_DECREF(grad);
    self->absent[param] = none;
    return result;
}

/* ---- gradients with owners ------------------------------------------------------- */

/* An average of an earlier pass becomes the sum over the ranks, so that this pass's
 * average is of the accumulated gradients. */
static int
scale_average(GradReducer *self, PyObject *grad)
{
    const ct_comm *comm = ((Communicator *)self->communicator)->comm;
    ctpy_view view;
    return grad_reducer_view(self, grad, "a gradient", &view) < 0
               ? -1
               : set_elements(self, &view.span, comm->world_size);
}

static int
scale_averages(GradReducer *self)
{
    for (Py_ssize_t i = 0; self->owners != NULL && i < count(self); i++) {
        if (!self->averaged[i]) {
            continue;
        }
        /* Before the call: a failure must not scale the same gradient twice. */
        self->averaged[i] = false;
        PyObject *grad = get_grad(self, i);
        const int result = grad == NULL      ? -1
                           : Py_IsNone(grad) ? 0
                                             : scale_average(self, grad);
        Py_XDECREF(grad);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

static int
drop(GradReducer *self, Py_ssize_t param)
{
    if (!is_of_another_rank(self, param)) {
        return 0;
    }
    return keep(self, param, Py_None) < 0 ? -1 : set_grad(self, param, Py_None);
}

/* Drops the gradients that were sent to their owners. */
static int
drop_sent(GradReducer *self)
{
    const ct_bucket_plan *plan = &self->core.plan;
    /* Turns end in order, so one count shows where the dropped ones stop. */
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

/* All other gradients have been sent; the average stays with the owner. */
static int
keep_own(GradReducer *self)
{
    for (Py_ssize_t i = 0; self->owners != NULL && i < count(self); i++) {
        if (drop(self, i) < 0) {
            return -1;
        }
        self->averaged[i] =
            self->owners[i] == ((Communicator *)self->communicator)->comm->rank;
    }
    return 0;
}

/* ---- a backward pass ------------------------------------------------------------- */

/* Announces the parameters that never get a gradient. */
static int
announce_known_absent(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->core.params[i].expected == 0 && announce_absent(self, i) < 0) {
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
    /* Autograd may call hooks of one pass in any order: the first call begins the
     * pass. */
    if (self->core.active) {
        return 0;
    }
    ct_reducer_begin(&self->core);
    self->dropped = 0;
    (void)memset(self->absent, 0, (size_t)count(self) * sizeof *self->absent);
    return self->static_graph && !self->core.learning ? announce_known_absent(self) : 0;
}

/* Has autograd call the end hook when its pass ends. */
static int
queue_end(GradReducer *self)
{
    /* Once a pass is enough: the hooks of all parameters come here. */
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
on_output(GradReducer *self)
{
    if (scale_averages(self) < 0) {
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
    PyObject *grad = get_grad(self, param);
    const int result = grad == NULL      ? -1
                       : Py_IsNone(grad) ? 0
                                         : announce_grad(self, param, grad);
    Py_XDECREF(grad);
    return result;
}

static int
on_gradient(GradReducer *self, Py_ssize_t param)
{
    /* Under no_sync() autograd accumulates gradients. */
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
        result = drop_sent(self);
    }
    if (result < 0) {
        /* An exception in a hook ends the backward pass, and the end hook never
         * comes. */
        grad_reducer_abandon(self);
    }
    return result;
}

/* "a, b and 3 more" of the parameters without a gradient in this pass. */
static PyObject *
list_missing(const GradReducer *self)
{
    enum {
        SHOWN = 8
    };
    PyObject *text = PyUnicode_FromString("");
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; text != NULL && i < count(self); i++) {
        /* Large models could lack thousands: the message has a bounded length. */
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

/* A parameter outside of the loss would otherwise stop all ranks. */
static int
announce_missing(GradReducer *self)
{
    const bool may_miss = self->find_unused || self->core.learning;
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (self->core.params[i].seen == 0 &&
            (may_miss ? announce_absent(self, i) : raise_missing(self)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Waits for the averages and, while graphs may change, gathers the usage of parameters
 * on all ranks. */
static int
finish_buckets(GradReducer *self)
{
    ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    const bool asks = (self->find_unused || self->static_graph) && !self->usage_known;
    const ct_span usage = {self->used, (size_t)count(self), CT_I64};
    int ordinal = self->target.ordinal;
    ct_error err, unused;
    if (comm == NULL) {
        return -1;
    }
    self->busy = true;
    PyThreadState *thread = ctpy_comm_enter(self->communicator);
    ct_status status = ct_device_switch(self->target.device, &ordinal, &err);
    if (status == CT_OK) {
        status = ct_reducer_finish(&self->core, grad_reducer_group(self, comm), &err);
        (void)ct_device_switch(self->target.device, &ordinal, &unused);
    }
    /* After the buckets on every rank: `asks` depends on options alone, alike on
     * all. */
    if (status == CT_OK && asks) {
        status = ct_comm_all_reduce(comm, &usage, CT_REDUCE_MAX, &err);
    }
    ctpy_comm_leave(self->communicator, thread);
    self->busy = false;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
release_exchanged(GradReducer *self)
{
    for (Py_ssize_t i = 0; i < count(self); i++) {
        if (keep(self, i, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A parameter that some rank has used gets its average on all ranks. */
static int
take_averages(GradReducer *self)
{
    if (finish_buckets(self) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count(self); i++) {
        /* The gradient stays None only if no rank has used the parameter, as in
         * torch. */
        if (self->absent[i] && self->used[i] && !is_of_another_rank(self, i) &&
            set_grad(self, i, PyList_GET_ITEM(self->exchanged, i)) < 0) {
            return -1;
        }
    }
    return keep_own(self) < 0 ? -1 : release_exchanged(self);
}

/* Counts on the first pass for all that follow: static_graph. */
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
on_end(GradReducer *self)
{
    self->queued = false;
    /* An exception, or close(), has ended the pass already. */
    if (!self->core.active) {
        return 0;
    }
    if (announce_missing(self) < 0) {
        grad_reducer_abandon(self);
        return -1;
    }
    for (Py_ssize_t i = 0; !self->usage_known && i < count(self); i++) {
        self->used[i] = !self->absent[i];
    }
    if (take_averages(self) < 0) {
        grad_reducer_abandon(self);
        return -1;
    }
    if (self->core.learning) {
        learn(self);
    }
    return 0;
}

static const char GradReducer_reduce_doc[] =
    "reduce($self, /)\n--\n\n"
    "Replace every gradient by its average over the ranks, and a missing one by that "
    "of\n"
    "zeros: for after the backward pass, where nothing is hooked.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

static PyObject *
GradReducer_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    GradReducer *self = (GradReducer *)op;
    int result = begin(self);
    /* From the last parameter on: the order in which buckets are filled. */
    for (Py_ssize_t i = count(self); result == 0 && i-- > 0;) {
        result = announce_absent(self, i);
    }
    for (Py_ssize_t i = 0; result == 0 && i < count(self); i++) {
        self->used[i] = true;
    }
    if (result < 0 || take_averages(self) < 0) {
        grad_reducer_abandon(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- hooks of autograd ----------------------------------------------------------- */

PyDoc_STRVAR(GradHook_doc, "What autograd calls for a GradReducer, which makes them.");

static PyObject *
add_hook(GradReducer *self, Py_ssize_t index)
{
    PyTypeObject *type = ctpy_state_borrow((PyObject *)self)->GradHook;
    GradHook *made = (GradHook *)type->tp_alloc(type, 0);
    if (made == NULL) {
        return NULL;
    }
    made->index = index;
    const int failed = PyList_Append(self->hooks, (PyObject *)made);
    /* Borrowed, so that no reference cycle passes through autograd, which the garbage
     * collector does not see. */
    made->reducer = failed ? NULL : self;
    Py_DECREF(made);
    return failed ? NULL : (PyObject *)made;
}

/* The first two hooks are for the end and the beginning of a pass. */
int
grad_reducer_add_hooks(GradReducer *self)
{
    const ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    if (add_hook(self, GRAD_HOOK_END) == NULL ||
        add_hook(self, GRAD_HOOK_OUTPUT) == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->params); i++) {
        PyObject *hook = add_hook(self, i);
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

/* None leaves the gradient as it is. */
static PyObject *
GradHook_call(PyObject *op, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    GradReducer *reducer = ((GradHook *)op)->reducer;
    const Py_ssize_t index = ((GradHook *)op)->index;
    if (reducer == NULL) {
        Py_RETURN_NONE;
    }
    /* The call may drop the last other reference to the reducer. */
    Py_INCREF(reducer);
    const int result = index == GRAD_HOOK_OUTPUT ? on_output(reducer)
                       : index == GRAD_HOOK_END  ? on_end(reducer)
                                                 : on_gradient(reducer, index);
    Py_DECREF(reducer);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

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

/* ---- before and after a forward pass --------------------------------------------- */

enum {
    HAS_DATA = 1,
    SYNCS = 2,
    HAS_BUFFERS = 4
};

/* The passes that the ranks are about to run. */
typedef struct rank_counts {
    int active; /* ranks that have data */
    int last;   /* the last rank with data, the sender of buffers, as in torch */
    int flags;  /* of any rank with data */
} rank_counts;

/* Ends a pass that an exception broke off, so that the end hook never ran. */
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
                 "continue after a failure in a backward pass that is exchanged",
                 started, all);
    return -1;
}

static int
count_flags(GradReducer *self, int ranks, const int64_t *all, rank_counts *found)
{
    *found = (rank_counts){0};
    for (int r = 0; r < ranks; r++) {
        if (all[r] & HAS_DATA) {
            found->active++;
            found->last = r;
            found->flags |= (int)all[r];
        }
    }
    self->root = found->active > 0 ? found->last : self->root;
    /* The core divides by all ranks; this factor makes the divisor the ranks with
     * data. */
    self->core.factor = self->keeps_divisor || found->active == 0
                            ? 1.0
                            : (double)ranks / (double)found->active;
    if (self->throws_early && found->active > 0 && found->active < ranks) {
        PyErr_Format(PyExc_RuntimeError,
                     "%d of %d ranks have no data left, and "
                     "throw_on_early_termination is set",
                     ranks - found->active, ranks);
        return -1;
    }
    return 0;
}

static int
gather_counts(GradReducer *self, int64_t mine, rank_counts *found)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    if (comm == NULL) {
        return -1;
    }
    const int ranks = comm->world_size;
    int64_t *all = ct_calloc((size_t)ranks, sizeof *all);
    if (all == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const ct_request request = {
        .what = CT_ALL_GATHER,
        .in = {&mine, 1,             CT_I64},
        .out = {all,   (size_t)ranks, CT_I64}
    };
    const int result = ctpy_comm_run(state, self->communicator, &request) < 0
                           ? -1
                           : count_flags(self, ranks, all, found);
    ct_free(all);
    return result;
}

static const char GradReducer_before_forward_doc[] =
    "before_forward($self, with_grad, syncs, buffers, /)\n--\n\n"
    "Say that a forward pass begins.\n\n"
    "with_grad: a backward pass may follow; syncs: it is to be exchanged. buffers:\n"
    "tensors that become those of rank 0, a sequence.\n\n"
    "Raises RuntimeError where the pass before broke off in the middle.";

static PyObject *
GradReducer_before_forward(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    PyObject *buffers;
    rank_counts found;
    int with_grad, syncs;
    if (!PyArg_ParseTuple(args, "ppO:before_forward", &with_grad, &syncs, &buffers) ||
        settle(self) < 0) {
        return NULL;
    }
    const Py_ssize_t n = PyObject_Size(buffers);
    const int flags = HAS_DATA | (syncs ? SYNCS : 0) | (n > 0 ? HAS_BUFFERS : 0);
    if (n < 0 ||
        (with_grad && self->joining && gather_counts(self, flags, &found) < 0)) {
        return NULL;
    }
    /* Only then: an evaluation under no_grad() leaves the mode of the training passes
     * alone. */
    if (with_grad) {
        self->syncs = syncs;
    }
    return ctpy_broadcast_sequence(ctpy_state_borrow(op), self->communicator, buffers,
                                   self->root) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

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
    /* A leaf has no backward pass of its own to begin. */
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

static const char GradReducer_after_forward_doc[] =
    "after_forward($self, output, /)\n--\n\n"
    "Have the tensors in a model's output report the beginning of their backward pass.";

static PyObject *
GradReducer_after_forward(PyObject *op, PyObject *output)
{
    GradReducer *self = (GradReducer *)op;
    /* Owned gradients are scaled at the beginning of every pass, exchanged or not. */
    const bool counts = self->syncs || self->owners != NULL;
    return counts && hook_outputs(self, output) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- ranks whose data ends earlier, and that take part with zeros ---------------- */

static const char GradReducer_join_doc[] =
    "join($self, keeps_divisor, throws_early, /)\n--\n\n"
    "Have ranks exchange before each pass whether they have data.\n\n"
    "keeps_divisor: sums are divided by the number of all ranks, not of those with\n"
    "data. throws_early: all raise RuntimeError as soon as one has none.";

static PyObject *
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
    const Py_ssize_t n = count(self);
    int result = 0;
    ct_reducer_begin(&self->core);
    /* The same collectives in the same order as on ranks with data. */
    for (Py_ssize_t i = n; result == 0 && i-- > 0;) {
        result = announce_zeros(self, i);
    }
    for (Py_ssize_t i = 0; !self->usage_known && i < n; i++) {
        self->used[i] = false;
    }
    if (result < 0 || finish_buckets(self) < 0 || release_exchanged(self) < 0) {
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
        /* What ranks with data do before each forward pass. */
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

static const char GradReducer_shadow_doc[] =
    "shadow($self, buffers, tensors, /)\n--\n\n"
    "Take part in the others' passes with zeros until no rank has data; then take "
    "over\n"
    "tensors from one that was the last to have some.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

static PyObject *
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
    /* The next epoch begins without joining, with rank 0 as the sender again. */
    self->joining = self->throws_early = false;
    self->core.factor = 1.0;
    self->root = 0;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef GradReducer_ddp_pass_methods[] = {
    {"after_forward",  GradReducer_after_forward,  METH_O,       GradReducer_after_forward_doc},
    {"before_forward", GradReducer_before_forward, METH_VARARGS,
     GradReducer_before_forward_doc                                                           },
    {"join",           GradReducer_join,           METH_VARARGS, GradReducer_join_doc         },
    {"shadow",         GradReducer_shadow,         METH_VARARGS, GradReducer_shadow_doc       },
    {"reduce",         GradReducer_reduce,         METH_NOARGS,  GradReducer_reduce_doc       },
    {NULL,             NULL,                       0,            NULL                         },
};
