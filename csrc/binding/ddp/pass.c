/* A backward pass: gradients as they come, and its end. */
#include "binding/ddp/reducer.h"

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

int
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

int
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
int
grad_reducer_meet(GradReducer *self)
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
hand_over_absent(GradReducer *self)
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

int
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
finish(GradReducer *self)
{
    if (!self->usage_known) {
        for (Py_ssize_t i = 0; i < count(self); i++) {
            self->used[i] = !self->absent[i];
        }
    }
    if (grad_reducer_meet(self) < 0 || hand_over_absent(self) < 0 ||
        grad_reducer_keep_own(self) < 0) {
        return -1;
    }
    if (self->core.learning) {
        learn(self);
    }
    return grad_reducer_release_given(self);
}

int
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
    if (result < 0 || grad_reducer_meet(self) < 0 || hand_over_absent(self) < 0 ||
        grad_reducer_keep_own(self) < 0 || grad_reducer_release_given(self) < 0) {
        grad_reducer_abandon(self);
        return NULL;
    }
    Py_RETURN_NONE;
}
