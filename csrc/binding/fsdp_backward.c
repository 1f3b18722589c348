/* A unit's backward: what torch's hooks on outputs, parameters and inputs call. */
#include "binding/fsdp.h"

#include "binding/buffer.h"
#include "binding/ctpy_optim.h"

enum {
    IN_BACKWARD = 1 << FSDP_BACKWARD_PRE | 1 << FSDP_BACKWARD_POST
};

/* ---- the beginning -----------------------------------------------------------------
 */

/* Asks torch to call finish when the backward has ended, once. What the forward keeps
 * is all there now. */
static int
queue_finish(FSDPUnit *root)
{
    if (root->queued) {
        return 0;
    }
    PyObject *done =
        ctpy_call_hook((PyObject *)root, fsdp_state_borrow(root)->str__queue, NULL, 0);
    Py_XDECREF(done);
    root->queued = done != NULL;
    if (root->queued) {
        fsdp_order_begin(&root->backwards);
        fsdp_return_memory(root);
    }
    return done == NULL ? -1 : 0;
}

const char FSDPUnit_enter_backward_doc[] =
    "enter_backward($self, grad, /)\n--\n\n"
    "The hook of outputs: gather the parameters for the backward.";

PyObject *
FSDPUnit_enter_backward(PyObject *op, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)op;
    fsdp_order *order = &fsdp_root_borrow(self)->backwards;
    if (queue_finish(fsdp_root_borrow(self)) < 0 ||
        (!self->entered && fsdp_order_reach(self, order) < 0) ||
        fsdp_gather(self) < 0 ||
        (!self->entered && self->backward_pre && fsdp_prefetch(self, order) < 0)) {
        return NULL;
    }
    if (!self->entered) {
        if (fsdp_expect(self, 1 << FSDP_IDLE | 1 << FSDP_BACKWARD_PRE) < 0) {
            return NULL;
        }
        self->entered = true;
    }
    if (self->state == FSDP_IDLE) {
        self->state = FSDP_BACKWARD_PRE;
    }
    return fsdp_expect(self, IN_BACKWARD) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the gradients -----------------------------------------------------------------
 */

/* Without a reduction to come ranks need not reach this in the same order, nor all of
 * them: nothing collective may begin then. */
static int
prefetch_after(FSDPUnit *self)
{
    return self->require_sync && self->backward_post
               ? fsdp_prefetch(self, &fsdp_root_borrow(self)->backwards)
               : 0;
}

/* Nobody needs the parameters any more when every gradient of a parameter and of an
 * input has come: a frozen weight, or one used detached, is read up to then. */
static int
release_if_done(FSDPUnit *self)
{
    const bool done = self->complete || self->n_leaves == 0;
    if (!done || self->inputs_seen != self->inputs_hooked || !self->core.gathered ||
        !(self->require_sync || self->reshard_after_forward)) {
        return 0;
    }
    fsdp_release(self);
    return prefetch_after(self);
}

const char FSDPUnit_input_done_doc[] =
    "input_done($self, grad, /)\n--\n\n"
    "The hook of inputs: release the parameters when nobody needs them.";

PyObject *
FSDPUnit_input_done(PyObject *op, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)op;
    self->inputs_seen++;
    return release_if_done(self) < 0 ? NULL : Py_NewRef(Py_None);
}

static int
complete(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = 0;
    self->complete = true;
    int result = release_if_done(self);
    if (result == 0 && self->require_sync) {
        result = fsdp_reduce(self);
    }
    fsdp_return_growth(fsdp_root_borrow(self));
    return result;
}

static int
refuse_second_order(const ctpy_state *state, PyObject *grad)
{
    PyObject *wanted = PyObject_GetAttr(grad, state->str_requires_grad);
    const int refused = wanted == NULL || wanted == Py_True;
    if (wanted == Py_True) {
        PyErr_SetString(PyExc_RuntimeError,
                        "FSDP only works with gradients that don't require gradients");
    }
    Py_XDECREF(wanted);
    return refused ? -1 : 0;
}

/* Into the flat gradient; autograd's own tensor can go then. */
static int
store(FSDPUnit *self, fsdp_leaf *leaf, PyObject *grad)
{
    ctpy_state *state = fsdp_state_borrow(self);
    ct_span span;
    ct_status status;
    ct_error err;
    if (refuse_second_order(state, grad) < 0 ||
        fsdp_span_from(self, grad, "a gradient", 0, &span) < 0 ||
        fsdp_use_stream(self) < 0) {
        return -1;
    }
    if (span.n != leaf->n) {
        PyErr_Format(PyExc_ValueError,
                     "a gradient has %zu elements, and its parameter %zu", span.n,
                     leaf->n);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_fsdp_take_grad(&self->core, leaf->group, leaf->at, &span, leaf->filled,
                               !self->require_sync, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* A gradient that was refused must not be added to by the next backward. */
static int
drop(PyObject *param, PyObject *name, int result)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const int dropped = PyObject_SetAttr(param, name, Py_None);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    return result < 0 ? result : dropped;
}

static int
take(FSDPUnit *self, fsdp_leaf *leaf, PyObject *param)
{
    PyObject *name = fsdp_state_borrow(self)->str_grad;
    PyObject *grad = PyObject_GetAttr(param, name);
    int result = grad == NULL ? -1 : 0;
    if (result == 0 && !Py_IsNone(grad)) {
        result = store(self, leaf, grad);
        leaf->filled = leaf->filled || result == 0;
        result = drop(param, name, result);
    }
    Py_XDECREF(grad);
    return result;
}

const char FSDPUnit_take_grad_doc[] =
    "take_grad($self, index, param, /)\n--\n\n"
    "The hook of a parameter whose gradient has been accumulated: take it over.\n\n"
    "index: what add_parameter() gave. The last one of a unit releases the parameters\n"
    "and reduces the gradients. Raises RuntimeError for gradients that require\n"
    "gradients, ValueError outside of the unit's backward.";

PyObject *
FSDPUnit_take_grad(PyObject *op, PyObject *const *args, Py_ssize_t n)
{
    FSDPUnit *self = (FSDPUnit *)op;
    const Py_ssize_t index = n == 2 ? PyLong_AsSsize_t(args[0]) : -1;
    if (index < 0 || (size_t)index >= self->n_leaves) {
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_ValueError,
                                               "take_grad() takes the index of a "
                                               "parameter in [0, %zu) and it",
                                               self->n_leaves);
    }
    if (fsdp_expect(self, IN_BACKWARD) < 0) {
        return NULL;
    }
    fsdp_leaf *leaf = &self->leaves[index];
    self->state = FSDP_BACKWARD_POST;
    self->complete = false;
    if (take(self, leaf, args[1]) < 0) {
        return NULL;
    }
    self->n_seen += !leaf->seen;
    leaf->seen = true;
    return self->n_seen == self->n_leaves && complete(self) < 0 ? NULL
                                                                : Py_NewRef(Py_None);
}

/* ---- the end -----------------------------------------------------------------------
 */

static int
finish_unit(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = self->inputs_seen = 0;
    self->counts_are_old = true;
    self->entered = self->complete = false;
    self->state = FSDP_IDLE;
    if (self->require_sync || self->reshard_after_forward) {
        fsdp_release(self);
    }
    return self->require_sync && fsdp_has_grads(self) ? fsdp_reduce(self) : 0;
}

const char FSDPUnit_finish_doc[] =
    "finish($self, /)\n--\n\n"
    "End the backward of a root: reduce the gradients of units that have not got all\n"
    "of them, missing ones as zeros, and make every unit idle. Collective.";

PyObject *
FSDPUnit_finish(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *root = (FSDPUnit *)op;
    PyObject *units = Py_XNewRef(root->units);
    int result = 0;
    const Py_ssize_t n = units == NULL ? 0 : PyList_GET_SIZE(units);
    fsdp_drop_prefetches(root); /* shards may change from here on */
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = finish_unit((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
    if (result < 0) {
        fsdp_abandon(root);
        return NULL;
    }
    root->queued = false;
    if (root->return_memory) {
        fsdp_discard_spares(root);
    }
    Py_RETURN_NONE;
}
