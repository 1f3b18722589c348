/* ctrainer._C.MappedMemory: memory at a fixed address, for torch.frombuffer() in the
 * host's and torch.from_dlpack() in a device's. */
#include "binding/comm/memory.h"

#include "binding/comm/backends.h"

static PyObject *
MappedMemory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "watched", "plugin", NULL};
    Py_ssize_t nbytes;
    PyObject *plugin = Py_None;
    int watched = 0;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|$pO:MappedMemory", names, &nbytes,
                                     &watched, &plugin)) {
        return NULL;
    }
    const ct_device *device = ctpy_device_borrow(plugin);
    if (device == NULL) {
        return NULL;
    }
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must be at least 0, got %zd", nbytes);
        return NULL;
    }
    MappedMemory *self = (MappedMemory *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->device = device;
    if (ct_mapping_open_on(device->mapping, &self->pages, (size_t)nbytes, watched != 0,
                           &err) != CT_OK) {
        Py_DECREF(self);
        return ctpy_raise(&err);
    }
    return (PyObject *)self;
}

static void
MappedMemory_dealloc(PyObject *op)
{
    ct_mapping_close(&((MappedMemory *)op)->pages);
    ctpy_leaf_dealloc(op);
}

static int
MappedMemory_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    const ct_mapping *pages = &((MappedMemory *)op)->pages;
    if (pages->ops != NULL) {
        PyErr_SetString(PyExc_BufferError,
                        "this memory is a GPU's, which the host cannot read; take it "
                        "with torch.from_dlpack()");
        return -1;
    }
    return PyBuffer_FillInfo(view, op, pages->data, (Py_ssize_t)pages->bytes, 0, flags);
}

static PyObject *
MappedMemory_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((MappedMemory *)op)->pages.bytes);
}

static PyObject *
MappedMemory_on_host(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((MappedMemory *)op)->device->mapping == NULL);
}

static PyMethodDef MappedMemory_methods[] = {
    {"__dlpack__",        (PyCFunction)(void (*)(void))MappedMemory_dlpack,
     METH_VARARGS | METH_KEYWORDS,                                                       MappedMemory_dlpack_doc},
    {"__dlpack_device__", MappedMemory_dlpack_device,                       METH_NOARGS,
     MappedMemory_dlpack_device_doc                                                                             },
    {NULL,                NULL,                                             0,           NULL                   },
};

static PyGetSetDef MappedMemory_getset[] = {
    {"on_host", MappedMemory_on_host, NULL,
     "Whether it is the host's memory, and a buffer.",                     NULL},
    {"nbytes",  MappedMemory_nbytes,  NULL, "How many bytes may be used.", NULL},
    {NULL,      NULL,                 NULL, NULL,                          NULL},
};

PyDoc_STRVAR(
    MappedMemory_doc,
    "MappedMemory(nbytes, *, watched=False, plugin=None)\n--\n\n"
    "nbytes of zeros at an address that never changes, as a writable buffer.\n\n"
    "Its memory is taken page by page at the first touch and given back to the system\n"
    "with the object. watched: what is used while its pages are given back ends the\n"
    "process at that place, rather than reading zeros. plugin: a device's, as\n"
    "ctrainer._cuda.plugin; then it is addresses of the current GPU, for\n"
    "torch.from_dlpack(), where a unit puts memory and takes it away. Raises\n"
    "MemoryError, ValueError for no such plugin, RuntimeError for what the driver "
    "says.");

static PyType_Slot MappedMemory_slots[] = {
    {Py_tp_doc,       (void *)MappedMemory_doc},
    {Py_tp_new,       MappedMemory_new        },
    {Py_tp_traverse,  ctpy_leaf_traverse      },
    {Py_tp_dealloc,   MappedMemory_dealloc    },
    {Py_tp_methods,   MappedMemory_methods    },
    {Py_tp_getset,    MappedMemory_getset     },
    {Py_bf_getbuffer, MappedMemory_getbuffer  },
    {0,               NULL                    },
};

PyType_Spec MappedMemory_spec = {
    .name = "ctrainer._C.MappedMemory",
    .basicsize = sizeof(MappedMemory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = MappedMemory_slots,
};
