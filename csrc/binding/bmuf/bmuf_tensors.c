/* Tensors of Python as what blocks work on. */
#include "binding/bmuf/bmuf.h"

#include "binding/runtime/buffer.h"
#include "core/base/alloc.h"

void
bmuf_tensors_free(bmuf_tensors *t)
{
    ct_free(t->tensors);
    Py_XDECREF(t->copies);
    Py_XDECREF(t->sources);
    *t = (bmuf_tensors){0};
}

static int
read_span(ctpy_state *state, PyObject *op, const char *what, Py_ssize_t index,
          ct_span *span)
{
    char text[64];
    (void)PyOS_snprintf(text, sizeof text, "%s %zd", what, index);
    const ctpy_place place = {.what = text, .group = -1};
    ctpy_view view;
    if (ctpy_view_of(state, op, &place, &view) < 0) {
        return -1;
    }
    if (view.readonly) {
        PyErr_Format(PyExc_ValueError, "%s is read-only", text);
        return -1;
    }
    *span = view.span;
    return 0;
}

static int
read_tensor(ctpy_state *state, const bmuf_tensors *t, Py_ssize_t i)
{
    ct_bmuf_tensor *tensor = &t->tensors[i];
    PyObject *source = PySequence_Fast_GET_ITEM(t->sources, i);
    PyObject *copy =
        t->copies == NULL ? Py_None : PySequence_Fast_GET_ITEM(t->copies, i);
    *tensor = (ct_bmuf_tensor){.span = {.dtype = CT_F32}};
    if (read_span(state, source, "parameter", i, &tensor->span) < 0) {
        return -1;
    }
    if (copy == Py_None) {
        return 0;
    }
    if (read_span(state, copy, "copy of parameter", i, &tensor->copy) < 0) {
        return -1;
    }
    if (tensor->copy.n != tensor->span.n) {
        PyErr_Format(PyExc_ValueError, "parameter %zd has %zu elements, its copy %zu",
                     i, tensor->span.n, tensor->copy.n);
        return -1;
    }
    return 0;
}

static int
read_all(ctpy_state *state, bmuf_tensors *t)
{
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(t->sources);
    if (t->copies != NULL && PySequence_Fast_GET_SIZE(t->copies) != n) {
        PyErr_Format(PyExc_ValueError,
                     "%zd parameters and %zd copies; expected as many", n,
                     PySequence_Fast_GET_SIZE(t->copies));
        return -1;
    }
    t->tensors = ct_calloc((size_t)n + 1, sizeof *t->tensors);
    if (t->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_tensor(state, t, i) < 0) {
            return -1;
        }
    }
    t->list = (ct_bmuf_list){t->tensors, (size_t)n};
    return 0;
}

/* Tuples, so that nobody can take what is worked on out of them. */
int
bmuf_tensors_read(ctpy_state *state, PyObject *sources, PyObject *copies,
                  bmuf_tensors *t)
{
    *t = (bmuf_tensors){.sources = PySequence_Tuple(sources)};
    if (t->sources != NULL && copies != NULL) {
        t->copies = PySequence_Tuple(copies);
    }
    if (t->sources == NULL || (copies != NULL && t->copies == NULL) ||
        read_all(state, t) < 0) {
        bmuf_tensors_free(t);
        return -1;
    }
    return 0;
}
