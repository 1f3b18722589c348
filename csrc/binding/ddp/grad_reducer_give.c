/* Gradients of Python as the core's spans. */
#include "binding/ddp/reducer.h"

#include "binding/runtime/buffer.h"

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

static PyObject *
param_of(const GradReducer *self, Py_ssize_t param)
{
    return PyTuple_GET_ITEM(self->params, param);
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

int
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

int
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

int
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
