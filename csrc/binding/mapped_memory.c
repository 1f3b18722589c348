/* ctrainer._C.MappedMemory: pages at a fixed address, for torch.frombuffer(). */
#include "binding/mapped_memory.h"

static PyObject *
MappedMemory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "watched", NULL};
    Py_ssize_t nbytes;
    int watched = 0;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|$p:MappedMemory", names, &nbytes,
                                     &watched)) {
        return NULL;
    }
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must be at least 0, got %zd", nbytes);
        return NULL;
    }
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL && ct_mapping_open(&((MappedMemory *)op)->pages, (size_t)nbytes,
                                      watched != 0, &err) != CT_OK) {
        Py_CLEAR(op);
        (void)ctpy_raise(&err);
    }
    return op;
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
    return PyBuffer_FillInfo(view, op, pages->data, (Py_ssize_t)pages->bytes, 0, flags);
}

static PyObject *
MappedMemory_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((MappedMemory *)op)->pages.bytes);
}

static PyGetSetDef MappedMemory_getset[] = {
    {"nbytes", MappedMemory_nbytes, NULL, "How many bytes may be used.", NULL},
    {NULL,     NULL,                NULL, NULL,                          NULL},
};

PyDoc_STRVAR(
    MappedMemory_doc,
    "MappedMemory(nbytes, *, watched=False)\n--\n\n"
    "nbytes of zeros at an address that never changes, as a writable buffer.\n\n"
    "Its memory is taken page by page at the first touch and given back to the system\n"
    "with the object. watched: what is used while its pages are given back ends the\n"
    "process at that place, rather than reading zeros. Raises MemoryError.");

static PyType_Slot MappedMemory_slots[] = {
    {Py_tp_doc,       (void *)MappedMemory_doc},
    {Py_tp_new,       MappedMemory_new        },
    {Py_tp_traverse,  ctpy_leaf_traverse      },
    {Py_tp_dealloc,   MappedMemory_dealloc    },
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
