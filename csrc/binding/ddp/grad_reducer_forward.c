/* Around a forward pass: what the backward pass that follows will do. */
#include "binding/ddp/reducer.h"

#include "binding/comm/sync.h"
#include "binding/runtime/nested.h"

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
