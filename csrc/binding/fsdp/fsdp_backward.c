/* A unit's backward: what torch's hooks on outputs, parameters and inputs call. */
#include "binding/fsdp/unit.h"

#include "binding/runtime/buffer.h"
#include "binding/optim/grads.h"

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
    root->queued = done != NULL;
    Py_XSETREF(root->ending, done);
    if (root->queued) {
        fsdp_order_begin(&root->backwards);
        fsdp_return_memory(root);
    }
    return done == NULL ? -1 : 0;
}

/* ---- when autograd asks for nothing more -------------------------------------------
 *
 * autograd numbers its nodes as they are made, and runs those that are ready by their
 * numbers, the highest first. A node's gradient comes from nodes that were made after
 * it, so of one thread's nodes each runs after all that have higher numbers. A unit's
 * parameters are read by nodes that were made in its forward, whatever these are for:
 * gradients of its own parameters, of units inside, of tensors that came by another
 * way, activations that are computed anew. When a node runs that is older than the
 * forward, all of them have run.
 *
 * Each thread numbers its own nodes. Numbers of two threads say nothing about each
 * other, so a unit is only compared with nodes of the thread that its forward ran in. A
 * unit whose forwards ran in several threads stays to the end of the backward. A
 * reentrant checkpoint on a device makes its nodes in a thread of autograd's, and runs
 * them in a graph task of its own, within the node of the checkpoint. The units of that
 * task are done when a task runs that began earlier.
 *
 * The nodes of leaves run as soon as they can, and tell nothing. */

uint64_t
fsdp_thread(void)
{
    return PyThreadState_GetID(PyThreadState_Get());
}

uint64_t
fsdp_forward_thread(const FSDPUnit *root)
{
    return root->several_threads ? FSDP_NO_THREAD : root->forward_thread;
}

int
fsdp_next_node(FSDPUnit *self, uint64_t *number)
{
    PyObject *answer = ctpy_call_hook(
        (PyObject *)self, fsdp_state_borrow(self)->str__next_sequence_nr, NULL, 0);
    *number = answer == NULL ? 0 : PyLong_AsUnsignedLongLong(answer);
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* The number of the node that is running. */
static int
current_node(FSDPUnit *self, uint64_t *number)
{
    ctpy_state *state = fsdp_state_borrow(self);
    PyObject *node =
        ctpy_call_hook((PyObject *)self, state->str__current_node, NULL, 0);
    PyObject *answer = NULL;
    *number = FSDP_NO_SEQUENCE;
    if (node != NULL && !Py_IsNone(node)) {
        answer = ctpy_call_hook(node, state->str__sequence_nr, NULL, 0);
        *number = answer == NULL ? 0 : PyLong_AsUnsignedLongLong(answer);
    }
    Py_XDECREF(answer);
    Py_XDECREF(node);
    return PyErr_Occurred() ? -1 : 0;
}

int
fsdp_current_task(FSDPUnit *self, long *task)
{
    PyObject *id = ctpy_call_hook((PyObject *)self,
                                  fsdp_state_borrow(self)->str__graph_task, NULL, 0);
    *task = id == NULL ? FSDP_NO_TASK : PyLong_AsLong(id);
    Py_XDECREF(id);
    return PyErr_Occurred() ? -1 : 0;
}

/* Gradients that are still missing come from another forward, which gathers again: the
 * parameters may as well stay. Without a reduction to come they stay anyway where they
 * do after the forward. */
static bool
may_go(const FSDPUnit *self)
{
    return (self->complete || self->n_leaves == self->n_frozen) &&
           (self->require_sync || self->reshard_after_forward);
}

/* Whether the node with that number, which this thread has made, comes after all that
 * read the unit's parameters. 1, 0, or -1 with an exception. */
static int
is_over(FSDPUnit *self, uint64_t number, uint64_t thread)
{
    long task = FSDP_NO_TASK;
    if (self->thread == thread) {
        return number < self->first_node;
    }
    if (self->task == FSDP_NO_TASK) {
        return 0;
    }
    return fsdp_current_task(self, &task) < 0 ? -1 : task < self->task;
}

/* Without a reduction to come ranks need not reach this in the same order, nor all of
 * them: nothing collective may begin then. */
int
fsdp_release_done(FSDPUnit *root, uint64_t thread)
{
    uint64_t number = 0;
    bool known = false; /* to ask takes longer than all else here */
    int freed = 0;
    Py_ssize_t i = root->in_use == NULL ? 0 : PyList_GET_SIZE(root->in_use);
    if (thread == FSDP_NO_THREAD) {
        return 0;
    }
    while (i-- > 0) {
        FSDPUnit *unit = (FSDPUnit *)PyList_GET_ITEM(root->in_use, i);
        if (!may_go(unit)) {
            continue;
        }
        if (!known && current_node(root, &number) < 0) {
            return -1;
        }
        known = true;
        const int over = is_over(unit, number, thread);
        if (over < 0) {
            return -1;
        }
        if (!over) {
            continue;
        }
        freed = freed || (unit->require_sync && unit->backward_post);
        unit->first_node = FSDP_NO_SEQUENCE;
        fsdp_release(unit);
        if (PyList_SetSlice(root->in_use, i, i + 1, NULL) < 0) {
            return -1;
        }
    }
    return freed;
}

const char FSDPUnit_input_done_doc[] =
    "input_done($self, grad, /)\n--\n\n"
    "The hook of inputs: release the parameters that nobody needs any more.";

PyObject *
FSDPUnit_input_done(PyObject *op, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)op, *root = fsdp_root_borrow(self);
    const int freed = fsdp_release_done(root, fsdp_forward_thread(root));
    const bool failed =
        freed < 0 || (freed > 0 && fsdp_prefetch(self, &root->backwards) < 0);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- a unit's turn -----------------------------------------------------------------
 */

/* Until fsdp_release_done() finds that it is over. */
static int
use(FSDPUnit *self, FSDPUnit *root, uint64_t first_node, uint64_t thread)
{
    const bool known = self->first_node != FSDP_NO_SEQUENCE;
    const bool several = known && thread != self->thread;
    long task = FSDP_NO_TASK;
    if ((root->in_use == NULL && (root->in_use = PyList_New(0)) == NULL) ||
        (thread != root->forward_thread && fsdp_current_task(self, &task) < 0) ||
        (!known && PyList_Append(root->in_use, (PyObject *)self) < 0)) {
        return -1;
    }
    self->first_node = first_node < self->first_node ? first_node : self->first_node;
    self->thread = several ? FSDP_NO_THREAD : thread;
    self->task = several ? FSDP_NO_TASK : task;
    return 0;
}

static int
enter(FSDPUnit *self, uint64_t first_node, uint64_t thread)
{
    FSDPUnit *root = fsdp_root_borrow(self);
    fsdp_order *order = &root->backwards;
    const bool is_first = !self->entered;
    if (queue_finish(root) < 0 || (is_first && fsdp_order_reach(self, order) < 0)) {
        return -1;
    }
    const int freed = fsdp_release_done(root, thread);
    const bool ahead = freed > 0 || (is_first && self->backward_pre);
    if (freed < 0 || fsdp_gather(self) < 0 || use(self, root, first_node, thread) < 0 ||
        (ahead && fsdp_prefetch(self, order) < 0) ||
        (is_first && fsdp_expect(self, 1 << FSDP_IDLE | 1 << FSDP_BACKWARD_PRE) < 0)) {
        return -1;
    }
    self->entered = true;
    if (self->state == FSDP_IDLE) {
        self->state = FSDP_BACKWARD_PRE;
    }
    return fsdp_expect(self, IN_BACKWARD);
}

/* Of a unit, the number of its forward's first node, and the thread of it. */
static PyObject *
enter_backward(PyObject *given, PyObject *Py_UNUSED(grad))
{
    FSDPUnit *self = (FSDPUnit *)PyTuple_GET_ITEM(given, 0);
    const uint64_t first_node = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 1));
    const uint64_t thread = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 2));
    return enter(self, first_node, thread) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef enter_backward_def = {"enter_backward", enter_backward, METH_O,
                                         NULL};

PyObject *
fsdp_output_hook(FSDPUnit *self, uint64_t first_node)
{
    PyObject *given = Py_BuildValue("OKK", self, (unsigned long long)first_node,
                                    (unsigned long long)fsdp_thread());
    PyObject *hook = given == NULL ? NULL : PyCFunction_New(&enter_backward_def, given);
    Py_XDECREF(given);
    return hook;
}

/* ---- the gradients -----------------------------------------------------------------
 */

static int
complete(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = 0;
    self->complete = true;
    const int result = self->require_sync ? fsdp_reduce(self) : 0;
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
    if ((self->state == FSDP_IDLE && fsdp_check_unused(self) < 0) ||
        fsdp_expect(self, IN_BACKWARD) < 0) {
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
    const bool all = self->n_seen + self->n_frozen == self->n_leaves;
    return all && complete(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the end -----------------------------------------------------------------------
 */

static int
finish_unit(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].seen = false;
    }
    self->n_seen = 0;
    self->first_node = FSDP_NO_SEQUENCE;
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
    result = fsdp_check_all_unused(root);
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = finish_unit((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
    if (result < 0) {
        fsdp_abandon(root);
        return NULL;
    }
    Py_CLEAR(root->in_use);
    root->queued = root->several_threads = false;
    if (root->return_memory) {
        fsdp_discard_spares(root);
    }
    Py_RETURN_NONE;
}
