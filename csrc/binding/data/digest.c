/* A checksum of a batch, by which a resumed run sees that its data is what it was.
 *
 * It is taken when the batch comes, since a model or a hook may write into the batch
 * later, so it looks at few bytes of few parts, in place. */
#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"
#include "core/base/crc32.h"
#include "core/base/dtype.h"

#include <stdint.h>

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

enum {
    MOST_PARTS = 8,
    MOST_BYTES = 1 << 14,
    MOST_DEPTH = 16
};

typedef struct digest {
    ctpy_state *state;
    PyObject *describe; /* borrowed: says what a part of another kind is */
    uint32_t crc;
    int n_parts;
} digest;

/* The length, then the first bytes: parts cannot run into each other. */
static void
add_bytes(digest *d, const void *data, size_t n)
{
    const uint64_t length = n;
    d->crc = ct_crc32(d->crc, &length, sizeof length);
    d->crc = ct_crc32(d->crc, data, n < MOST_BYTES ? n : MOST_BYTES);
    d->n_parts++;
}

/* 1 when op is a tensor or an array that lies in the host's memory in C order and has
 * been added, 0 when it is something else, -1 with an exception. */
static int
add_memory(digest *d, PyObject *op)
{
    const ctpy_place place = {.what = "a part", .group = -1};
    ctpy_view view;
    if (ctpy_view_of(d->state, op, &place, &view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    if (view.strides != NULL) {
        return 0;
    }
    add_bytes(d, view.span.data, view.span.n * ct_dtype_size(view.span.dtype));
    return 1;
}

/* 1 when op is a number or a string and has been added, 0, or -1. */
static int
add_value(digest *d, PyObject *op)
{
    if (PyFloat_Check(op)) {
        const double value = PyFloat_AS_DOUBLE(op);
        add_bytes(d, &value, sizeof value);
        return 1;
    }
    if (PyLong_Check(op)) {
        const Py_hash_t value = PyLong_Type.tp_hash(op); /* the same in any process */
        add_bytes(d, &value, sizeof value);
        return 1;
    }
    if (PyUnicode_Check(op)) {
        add_bytes(d, PyUnicode_DATA(op),
                  (size_t)PyUnicode_GET_LENGTH(op) * (size_t)PyUnicode_KIND(op));
        return 1;
    }
    return 0;
}

static int add_part(digest *d, PyObject *op, int depth);

/* list: a list or a tuple, which describe() may change meanwhile. */
static int
add_items(digest *d, PyObject *list, int depth)
{
    int result = 0;
    for (Py_ssize_t i = 0;
         result == 0 && d->n_parts < MOST_PARTS && i < PySequence_Fast_GET_SIZE(list);
         i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(list, i));
        result = add_part(d, item, depth);
        Py_DECREF(item);
    }
    return result;
}

/* What describe() says of op: bytes, a list of its parts, or None. */
static int
add_described(digest *d, PyObject *op, int depth)
{
    PyObject *said = PyObject_CallOneArg(d->describe, op);
    int result = said == NULL ? -1 : 0;
    if (result == 0 && PyBytes_Check(said)) {
        add_bytes(d, PyBytes_AS_STRING(said), (size_t)PyBytes_GET_SIZE(said));
    }
    else if (result == 0 && PyList_Check(said)) {
        result = add_items(d, said, depth);
    }
    Py_XDECREF(said);
    return result;
}

static int
add_part(digest *d, PyObject *op, int depth)
{
    if (depth > MOST_DEPTH || op == Py_None) {
        return 0;
    }
    if (PyList_Check(op) || PyTuple_Check(op)) {
        return add_items(d, op, depth + 1);
    }
    if (PyDict_Check(op)) {
        PyObject *values = PyDict_Values(op);
        const int result = values == NULL ? -1 : add_items(d, values, depth + 1);
        Py_XDECREF(values);
        return result;
    }
    int added = add_value(d, op);
    if (added == 0) {
        added = add_memory(d, op);
    }
    return added == 0 ? add_described(d, op, depth + 1) : added < 0 ? -1 : 0;
}

const char ctpy_batch_digest_doc[] =
    "batch_digest($module, batch, describe, /)\n--\n\n"
    "Return a checksum of the first 8 parts of a batch, of each at most 16 KiB.\n\n"
    "batch: dicts, lists and tuples of tensors, arrays, numbers and strings. "
    "describe:\n"
    "is called with a part of another kind, and with a tensor that is not in the\n"
    "host's memory in C order; returns bytes in its place, a list of its own parts,\n"
    "or None.";

PyObject *
ctpy_batch_digest(PyObject *module, PyObject *args)
{
    digest d = {.state = PyModule_GetState(module)};
    PyObject *batch;
    if (!PyArg_ParseTuple(args, "OO:batch_digest", &batch, &d.describe) ||
        add_part(&d, batch, 0) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(d.crc);
}
