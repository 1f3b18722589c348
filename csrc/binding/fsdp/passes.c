/* A unit's forward, and which units stand under one root. */
#include "binding/fsdp/unit.h"

/* ---- roots -------------------------------------------------------------------------
 */

FSDPUnit *
fsdp_root_borrow(FSDPUnit *self)
{
    return self->root == NULL ? self : (FSDPUnit *)self->root;
}

static void
take_root(FSDPUnit *self, FSDPUnit *root)
{
    Py_XSETREF(self->root, self == root ? NULL : Py_NewRef((PyObject *)root));
    ct_fsdp_move_account(&self->core, &root->ledger);
}

const char FSDPUnit_set_units_doc[] =
    "set_units($self, units, /)\n--\n\n"
    "Make this unit the root of the given ones, among which it is itself.";

PyObject *
FSDPUnit_set_units(PyObject *op, PyObject *units)
{
    PyTypeObject *type = fsdp_state_borrow((FSDPUnit *)op)->FSDPUnit;
    PyObject *list = PySequence_List(units);
    if (list == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *unit = PyList_GET_ITEM(list, i);
        if (!PyObject_TypeCheck(unit, type)) {
            PyErr_Format(PyExc_TypeError, "expected units, got a %.200s",
                         Py_TYPE(unit)->tp_name);
            Py_DECREF(list);
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        take_root((FSDPUnit *)PyList_GET_ITEM(list, i), (FSDPUnit *)op);
    }
    Py_XSETREF(((FSDPUnit *)op)->units, list);
    Py_RETURN_NONE;
}

const char FSDPUnit_forget_root_doc[] =
    "forget_root($self, /)\n--\n\n"
    "Stand alone again, until set_units() of a root takes the unit.";

PyObject *
FSDPUnit_forget_root(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *self = (FSDPUnit *)op;
    fsdp_drop_prefetches(self);
    fsdp_order_forget(&self->forwards);
    fsdp_order_forget(&self->backwards);
    Py_CLEAR(self->in_use);
    take_root(self, self);
    Py_CLEAR(self->units);
    Py_RETURN_NONE;
}

/* ---- a backward that did not end ---------------------------------------------------
 */

static void
abandon_unit(FSDPUnit *self)
{
    fsdp_release(self);
    fsdp_drop_grads(self);
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = 0;
    self->first_node = FSDP_NO_SEQUENCE;
    self->entered = self->complete = false;
    self->state = FSDP_IDLE;
}

void
fsdp_abandon(FSDPUnit *root)
{
    const Py_ssize_t n = root->units == NULL ? 0 : PyList_GET_SIZE(root->units);
    for (Py_ssize_t i = 0; i < n; i++) {
        abandon_unit((FSDPUnit *)PyList_GET_ITEM(root->units, i));
    }
    Py_CLEAR(root->in_use);
    root->queued = root->several_threads = false;
}

/* Where no task of autograd is known to this thread: a thread that a module has started
 * in order to compute anew belongs to the backward, too. */
static int
is_under_way(const FSDPUnit *root)
{
    PyObject *end = PyObject_CallNoArgs(root->ending);
    const int alive = end == NULL ? -1 : !Py_IsNone(end);
    Py_XDECREF(end);
    return alive;
}

int
fsdp_in_backward(FSDPUnit *root)
{
    long task;
    if (!root->queued) {
        return 0;
    }
    if (fsdp_current_task(root, &task) < 0) {
        return -1;
    }
    const int alive = task < 0 ? is_under_way(root) : 1;
    if (alive == 0) {
        fsdp_abandon(root);
    }
    return alive;
}

const char FSDPUnit_recover_doc[] =
    "recover($self, /)\n--\n\n"
    "Forget a backward that ended with an exception: what was gathered is released, "
    "and\ngradients that had not been reduced are dropped.";

PyObject *
FSDPUnit_recover(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return fsdp_in_backward(fsdp_root_borrow((FSDPUnit *)op)) < 0 ? NULL
                                                                  : Py_NewRef(Py_None);
}

/* ---- the forward -------------------------------------------------------------------
 */

/* What an evaluation or an update has left behind is old: shards may have changed. Only
 * while gradients wait for the others nobody has updated anything. */
static void
release_old(FSDPUnit *root)
{
    const Py_ssize_t n = root->units == NULL ? 0 : PyList_GET_SIZE(root->units);
    for (Py_ssize_t i = 0; i < n; i++) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(root->units, i);
        if (!fsdp_has_grads(unit)) {
            fsdp_release(unit);
        }
    }
}

static int
grad_enabled(FSDPUnit *self)
{
    PyObject *answer = ctpy_call_hook(
        (PyObject *)self, fsdp_state_borrow(self)->str__grad_enabled, NULL, 0);
    const int enabled = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    return enabled;
}

static int
hook_each(FSDPUnit *self, PyObject *tensors, PyObject *hook_steal)
{
    const Py_ssize_t n = hook_steal == NULL ? -1
                                            : fsdp_hook_tensors(fsdp_state_borrow(self),
                                                                tensors, hook_steal);
    Py_XDECREF(hook_steal);
    return n < 0 ? -1 : 0;
}

static int
hook_inputs(FSDPUnit *self, PyObject *args, PyObject *kwargs)
{
    PyObject *name = fsdp_state_borrow(self)->str_input_done;
    if (hook_each(self, args, PyObject_GetAttr((PyObject *)self, name)) < 0) {
        return -1;
    }
    return kwargs == NULL
               ? 0
               : hook_each(self, kwargs, PyObject_GetAttr((PyObject *)self, name));
}

/* After the last inner unit, as it was in the forward before, come the outputs and the
 * loss, on top of what all units keep for the backward. */
static void
note_end(const FSDPUnit *self, FSDPUnit *root)
{
    if (self != root) {
        root->last_inner = self;
        if (self == root->last_before) {
            fsdp_return_memory(root);
        }
    }
}

/* Gathers the parameters, and begins with those of the next unit. Outside of a root's
 * forward or backward nobody would say when that is over. */
static int
take_turn(FSDPUnit *self, FSDPUnit *root, int in_backward)
{
    fsdp_order *order = in_backward ? &root->backwards : &root->forwards;
    if (!in_backward && root->state != FSDP_FORWARD) {
        return fsdp_gather(self);
    }
    const int freed =
        in_backward ? fsdp_release_done(root, fsdp_forward_thread(root)) : 0;
    const bool ahead =
        freed > 0 || (in_backward ? self->backward_pre : self->forward_prefetch);
    if (freed < 0 || fsdp_order_reach(self, order) < 0 || fsdp_gather(self) < 0) {
        return -1;
    }
    return ahead ? fsdp_prefetch(self, order) : 0;
}

/* ---- what is trained ---------------------------------------------------------------
 */

static int
take_frozen(FSDPUnit *self, PyObject *frozen)
{
    if (!PyTuple_Check(frozen) || (size_t)PyTuple_GET_SIZE(frozen) != self->n_leaves) {
        PyErr_Format(PyExc_TypeError, "_settle_trained() returns a tuple of %zu",
                     self->n_leaves);
        return -1;
    }
    self->n_frozen = 0;
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].frozen = PyTuple_GET_ITEM(frozen, (Py_ssize_t)i) == Py_True;
        self->n_frozen += self->leaves[i].frozen;
    }
    return 0;
}

/* Whether a parameter requires a gradient may change between forwards, of what
 * optimizers have of it or of what the forward computes with. Two tensors a parameter,
 * those that are trained first. */
static int
note_frozen(FSDPUnit *self, PyObject *tensors)
{
    PyObject *name = fsdp_state_borrow(self)->str_requires_grad;
    bool known = true;
    for (Py_ssize_t i = 0; known && i < PyTuple_GET_SIZE(tensors); i++) {
        const size_t leaf = (size_t)i / 2;
        const bool trains = leaf < self->n_leaves && !self->leaves[leaf].frozen;
        PyObject *wanted = PyObject_GetAttr(PyTuple_GET_ITEM(tensors, i), name);
        if (wanted == NULL) {
            return -1;
        }
        known = (wanted == Py_True) == trains;
        Py_DECREF(wanted);
    }
    if (known) {
        return 0;
    }
    PyObject *frozen = ctpy_call_hook(
        (PyObject *)self, fsdp_state_borrow(self)->str__settle_trained, NULL, 0);
    const int result = frozen == NULL ? -1 : take_frozen(self, frozen);
    Py_XDECREF(frozen);
    return result;
}

/* In which thread autograd numbers the nodes of the forwards below a root. */
static void
note_thread(FSDPUnit *root)
{
    const uint64_t thread = fsdp_thread();
    const uint64_t before = root->forward_thread;
    root->forward_thread = thread;
    root->several_threads |= before != FSDP_NO_THREAD && before != thread;
}

/* Runs the module with the parameters there. Within a backward, that is when an
 * activation checkpoint computes anew, they are needed right afterwards. */
static PyObject *
run(FSDPUnit *self, FSDPUnit *root, PyObject *fn, PyObject *args, PyObject *kwargs,
    int in_backward)
{
    PyObject *out = NULL;
    uint64_t first_node = FSDP_NO_SEQUENCE;
    const int grads = grad_enabled(self);
    if (grads > 0 && !in_backward) {
        note_thread(root);
    }
    if (grads >= 0 && take_turn(self, root, in_backward) == 0 &&
        (!grads || fsdp_next_node(self, &first_node) == 0) &&
        (!grads || in_backward || hook_inputs(self, args, kwargs) == 0)) {
        out = PyObject_Call(fn, args, kwargs);
    }
    if (!in_backward && (out == NULL || self->reshard_after_forward)) {
        fsdp_release(self);
    }
    if (out != NULL && grads && !in_backward) {
        note_end(self, root);
    }
    if (out != NULL && grads == 0 && !in_backward && self == root &&
        fsdp_check_all_unused(root) < 0) {
        Py_CLEAR(out); /* no backward will find it */
    }
    if (out != NULL && grads &&
        hook_each(self, out, fsdp_output_hook(self, first_node)) < 0) {
        Py_CLEAR(out);
    }
    return out;
}

const char FSDPUnit_forward_doc[] =
    "forward($self, fn, args, kwargs, tensors=(), /)\n--\n\n"
    "Return fn(*args, **kwargs), run with the unit's parameters gathered.\n\n"
    "tensors: for each parameter that add_parameter() has named, and then for frozen\n"
    "ones, what optimizers have of it and itself. Where requires_grad of one of them\n"
    "has changed, _settle_trained() says which of the named ones are frozen now.\n\n"
    "They are released afterwards if reshard_after_forward, and gathered again when\n"
    "the gradient of an output arrives. Collective. An exception leaves the unit as\n"
    "it was before.";

PyObject *
FSDPUnit_forward(PyObject *op, PyObject *args)
{
    FSDPUnit *self = (FSDPUnit *)op;
    PyObject *fn, *inputs, *kwargs, *tensors = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!|O!:forward", &fn, &PyTuple_Type, &inputs,
                          &PyDict_Type, &kwargs, &PyTuple_Type, &tensors)) {
        return NULL;
    }
    PyObject *root = Py_NewRef((PyObject *)fsdp_root_borrow(self));
    const int in_backward = fsdp_in_backward((FSDPUnit *)root);
    PyObject *out = NULL;
    const bool settled =
        in_backward != 0 || tensors == NULL || note_frozen(self, tensors) == 0;
    if (in_backward >= 0 && settled) {
        if (!in_backward && root == op) {
            release_old(self);
            self->last_before = self->last_inner;
            fsdp_order_begin(&self->forwards);
        }
        const int before = in_backward ? self->state : FSDP_IDLE;
        self->state = FSDP_FORWARD;
        self->core.label.call += !in_backward; /* ranks tell a skipped batch by it */
        out = run(self, (FSDPUnit *)root, fn, inputs, kwargs, in_backward);
        self->state = before;
        if (!in_backward && root == op) {
            fsdp_drop_prefetches(self);
        }
    }
    Py_DECREF(root);
    return out;
}
