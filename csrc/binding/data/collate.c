/* Collation: tensors of one dimension into the rows of one of two. */
#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"
#include "core/base/dtype.h"
#include "core/data/pad.h"

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

/* 1 and the view of plain memory in the host; 0 where op is something else; -1. */
static int
plain_view(ctpy_state *state, PyObject *op, int ndim, ctpy_view *view)
{
    const ctpy_place place = {.what = "a value", .group = -1};
    if (ctpy_view_of(state, op, &place, view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    return view->shape != NULL && view->strides == NULL && view->ndim == ndim;
}

/* 1 when all rows are written, 0 where a value is no plain memory of out's dtype. */
static int
pad_rows(ctpy_state *state, const ctpy_view *out, PyObject *const *values, size_t n,
         const ct_pad_rule *rule)
{
    unsigned char *row = out->span.data;
    for (size_t i = 0; i < n; i++, row += rule->width * rule->item_bytes) {
        ctpy_view view;
        const int plain = plain_view(state, values[i], 1, &view);
        if (plain <= 0 || view.span.dtype != out->span.dtype) {
            return plain < 0 ? -1 : 0;
        }
        if (view.span.n > rule->width) {
            PyErr_Format(PyExc_ValueError, "value %zu has %zu items, a row has %zu", i,
                         view.span.n, rule->width);
            return -1;
        }
        ct_pad_row(rule, row, view.span.data, view.span.n);
    }
    return 1;
}

const char ctpy_pad_rows_doc[] =
    "pad_rows($module, out, values, left, rotate, first, /)\n--\n\n"
    "Copy each of values, of shape (n,), into a row of out, of shape (rows, width).\n\n"
    "left: at its end. rotate: without its last item and with first before it, a "
    "tensor\n"
    "of one item or None, which is the last item itself. The rest of out stays.\n\n"
    "Return False, for another way to be taken, where a tensor is not plain memory in\n"
    "the host, without gaps and all of one dtype; rows may then be written already.\n"
    "Raise ValueError for more values than rows and for one longer than a row.";

static int
parse_rule(ctpy_state *state, PyObject *out, PyObject *first, ctpy_view *view,
           ct_pad_rule *rule)
{
    ctpy_view one;
    int plain = plain_view(state, out, 2, view);
    if (plain <= 0) {
        return plain;
    }
    rule->width = (size_t)view->shape[1];
    rule->item_bytes = ct_dtype_size(view->span.dtype);
    if (first != Py_None) {
        plain = plain_view(state, first, 1, &one);
        if (plain <= 0 || one.span.n != 1 || one.span.dtype != view->span.dtype) {
            return plain < 0 ? -1 : 0;
        }
        rule->first = one.span.data;
    }
    return 1;
}

PyObject *
ctpy_pad_rows(PyObject *module, PyObject *args)
{
    ctpy_state *state = PyModule_GetState(module);
    PyObject *out, *values, *first;
    int left, rotate;
    if (!PyArg_ParseTuple(args, "OOppO:pad_rows", &out, &values, &left, &rotate,
                          &first)) {
        return NULL;
    }
    ct_pad_rule rule = {.left = left, .rotate = rotate};
    ctpy_view view;
    int done = parse_rule(state, out, first, &view, &rule);
    PyObject *rows = done == 1 ? PySequence_Tuple(values) : NULL;
    if (done == 1 && rows == NULL) {
        return NULL;
    }
    if (done == 1 && PyTuple_GET_SIZE(rows) > view.shape[0]) {
        PyErr_Format(PyExc_ValueError, "there are %zd values for %zd rows",
                     PyTuple_GET_SIZE(rows), (Py_ssize_t)view.shape[0]);
        done = -1;
    }
    if (done == 1) {
        done = pad_rows(state, &view, PySequence_Fast_ITEMS(rows),
                        (size_t)PyTuple_GET_SIZE(rows), &rule);
    }
    Py_XDECREF(rows);
    return done < 0 ? NULL : PyBool_FromLong(done);
}
