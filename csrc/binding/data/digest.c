/* A checksum of a batch, by which a resumed run recognizes its data; and ObjectWatch.
 *
 * The checksum is taken of every batch on arrival, since a model or a hook may write
 * into the batch later: so it covers few bytes of few parts, read in place. */
#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"

#include "core/base/crc.h"
#include "core/base/span.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    MOST_PARTS = 8,
    MOST_BYTES = 1 << 14,
    MOST_DEPTH = 16
};

typedef struct digest {
    ctpy_state *state;
    PyObject *describe; /* borrowed: bytes or parts for a part of another kind */
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

/* 1 when op, a tensor or an array in the host's memory in C order, has been added, 0
 * for anything else, -1 with an exception. */
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

/* The parts of op, a new list or tuple; NULL for a leaf, which has been added, or with
 * an exception. describe(op) returns bytes, a list of parts, or None. */
static PyObject *
parts_of(digest *d, PyObject *op)
{
    if (PyList_Check(op) || PyTuple_Check(op)) {
        return Py_NewRef(op);
    }
    if (PyDict_Check(op)) {
        return PyDict_Values(op);
    }
    const int added = add_value(d, op);
    if (added != 0 || add_memory(d, op) != 0) {
        return NULL;
    }
    PyObject *described = PyObject_CallOneArg(d->describe, op);
    if (described != NULL && PyBytes_Check(described)) {
        add_bytes(d, PyBytes_AS_STRING(described), (size_t)PyBytes_GET_SIZE(described));
    }
    if (described != NULL && !PyList_Check(described)) {
        Py_CLEAR(described);
    }
    return described;
}

static int
add_part(digest *d, PyObject *op, int depth)
{
    if (depth > MOST_DEPTH || op == Py_None) {
        return 0;
    }
    PyObject *parts = parts_of(d, op);
    if (parts == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int result = 0;
    for (Py_ssize_t i = 0; /* describe() may change a list meanwhile */
         result == 0 && d->n_parts < MOST_PARTS && i < PySequence_Fast_GET_SIZE(parts);
         i++) {
        PyObject *part = Py_NewRef(PySequence_Fast_GET_ITEM(parts, i));
        result = add_part(d, part, depth + 1);
        Py_DECREF(part);
    }
    Py_DECREF(parts);
    return result;
}

static const char ctpy_batch_digest_doc[] =
    "batch_digest($module, batch, describe, /)\n--\n\n"
    "Return a checksum of the first 8 parts of a batch, of each at most 16 KiB.\n\n"
    "batch: dicts, lists and tuples of tensors, arrays, numbers and strings. "
    "describe:\n"
    "is called with a part of another kind, and with a tensor that is not in the\n"
    "host's memory in C order; returns bytes in its place, a list of its own parts,\n"
    "or None.";

static PyObject *
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

/* ctrainer._C.ObjectWatch: have objects changed since the last call?
 *
 * A generator of random numbers returns its state as a new tuple or array of 624 words,
 * in more time than a training step of a small model. For a state within the object, a
 * comparison of the object's memory tells whether an earlier copy still holds. */

typedef struct ObjectWatch {
    PyObject_HEAD
    PyObject *objects; /* a tuple, or NULL before __init__ */
    unsigned char
        *bytes;  /* the objects' bodies at the last call, one after the other */
    size_t size; /* of bytes */
} ObjectWatch;

/* The bytes after the reference count and the type. */
static size_t
body_size(PyObject *object)
{
    return (size_t)Py_TYPE(object)->tp_basicsize - sizeof(PyObject);
}

PyDoc_STRVAR(ObjectWatch_doc,
             "ObjectWatch(objects)\n--\n\n"
             "Looks for changes in the memory of objects, which it keeps alive.\n"
             "\n"
             "objects: an iterable of any that have their state in themselves, as\n"
             "random.Random and NumPy's MT19937 have.");

static int
ObjectWatch_clear(PyObject *op)
{
    ObjectWatch *self = (ObjectWatch *)op;
    Py_CLEAR(self->objects);
    PyMem_Free(self->bytes);
    self->bytes = NULL;
    self->size = 0;
    return 0;
}

static int
ObjectWatch_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"objects", NULL};
    ObjectWatch *self = (ObjectWatch *)op;
    PyObject *given;
    size_t size = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:ObjectWatch", names, &given)) {
        return -1;
    }
    PyObject *objects = PySequence_Tuple(given);
    if (objects == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(objects); i++) {
        size += body_size(PyTuple_GET_ITEM(objects, i));
    }
    unsigned char *bytes = PyMem_Calloc(size, 1);
    if (bytes == NULL) {
        Py_DECREF(objects);
        PyErr_NoMemory();
        return -1;
    }
    (void)ObjectWatch_clear(op);
    self->objects = objects;
    self->bytes = bytes;
    self->size = size;
    return 0;
}

static int
ObjectWatch_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((ObjectWatch *)op)->objects);
    return 0;
}

static void
ObjectWatch_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)ObjectWatch_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

PyDoc_STRVAR(changed_doc,
             "changed($self, /)\n--\n\n"
             "Tell whether the memory of any object differs from what it was at the\n"
             "last call, or from zeros at the first.\n"
             "\n"
             "What an object keeps elsewhere, such as its attributes, is not seen.");

static PyObject *
ObjectWatch_changed(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ObjectWatch *self = (ObjectWatch *)op;
    bool changed = false;
    unsigned char *seen = self->bytes;
    CTPY_LOCK(op)
    const Py_ssize_t n = self->objects == NULL ? 0 : PyTuple_GET_SIZE(self->objects);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *object = PyTuple_GET_ITEM(self->objects, i);
        const unsigned char *body = (const unsigned char *)object + sizeof(PyObject);
        const size_t size = body_size(object);
        if (memcmp(seen, body, size) != 0) {
            memcpy(seen, body, size);
            changed = true;
        }
        seen += size;
    }
    CTPY_UNLOCK()
    return PyBool_FromLong(changed);
}

static PyMethodDef ObjectWatch_methods[] = {
    {"changed", ObjectWatch_changed, METH_NOARGS, changed_doc},
    {NULL,      NULL,                0,           NULL       },
};

static PyType_Slot ObjectWatch_slots[] = {
    {Py_tp_doc,      (void *)ObjectWatch_doc},
    {Py_tp_init,     ObjectWatch_init       },
    {Py_tp_traverse, ObjectWatch_traverse   },
    {Py_tp_clear,    ObjectWatch_clear      },
    {Py_tp_dealloc,  ObjectWatch_dealloc    },
    {Py_tp_methods,  ObjectWatch_methods    },
    {0,              NULL                   },
};

PyType_Spec ObjectWatch_spec = {
    .name = "ctrainer._C.ObjectWatch",
    .basicsize = sizeof(ObjectWatch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ObjectWatch_slots,
};

PyMethodDef ctpy_data_digest_functions[] = {
    {"batch_digest", ctpy_batch_digest, METH_VARARGS, ctpy_batch_digest_doc},
    {NULL,           NULL,              0,            NULL                 },
};
