/* ctrainer._C.ObjectWatch: whether objects have changed since they were last looked at.
 *
 * A generator of random numbers hands out its state as a new tuple or array of 624
 * words, which takes longer than a training step of a small model. Where the state lies
 * within the object, comparing the object's memory tells whether the copy made before
 * still holds. */
#include "binding/runtime/ctpy.h"

#include <stdbool.h>
#include <string.h>

typedef struct ObjectWatch {
    PyObject_HEAD
    PyObject *objects;    /* a tuple, or NULL before __init__ */
    unsigned char *bytes; /* their bodies one after the other, as they last were */
    size_t size;          /* of bytes */
} ObjectWatch;

/* What follows the reference count and the type: all that belongs to the object. */
static size_t
body_size(PyObject *object)
{
    return (size_t)Py_TYPE(object)->tp_basicsize - sizeof(PyObject);
}

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

PyDoc_STRVAR(ObjectWatch_doc,
             "ObjectWatch(objects)\n--\n\n"
             "Looks for changes in the memory of objects, which it keeps alive.\n"
             "\n"
             "objects: an iterable of any that have their state in themselves, as\n"
             "random.Random and NumPy's MT19937 have.");

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
