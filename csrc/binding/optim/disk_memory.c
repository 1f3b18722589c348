/* ctrainer._C.DiskMemory: memory in a file, for torch.frombuffer(). */
#include "binding/optim/disk_memory.h"

#include "core/base/mapping.h"

PyDoc_STRVAR(
    DiskMemory_doc,
    "DiskMemory(nbytes, folder)\n--\n\n"
    "nbytes > 0 of zeros in a file without a name in folder, as a writable\n"
    "buffer.\n\n"
    "The file ends with the object, or with the process. Raises OSError where\n"
    "the folder is missing or has too little room.");

static PyObject *
DiskMemory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "folder", NULL};
    Py_ssize_t nbytes;
    PyObject *folder = NULL;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO&:DiskMemory", names, &nbytes,
                                     PyUnicode_FSConverter, &folder)) {
        return NULL;
    }
    DiskMemory *self = NULL;
    if (nbytes <= 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must be above 0, got %zd", nbytes);
    }
    else {
        self = (DiskMemory *)type->tp_alloc(type, 0);
    }
    if (self != NULL) {
        ct_status status;
        Py_BEGIN_ALLOW_THREADS
        status = ct_disk_memory_open(&self->core, (size_t)nbytes,
                                     PyBytes_AS_STRING(folder), &err);
        Py_END_ALLOW_THREADS
        if (status != CT_OK) {
            Py_CLEAR(self);
            (void)ctpy_raise(&err);
        }
    }
    Py_DECREF(folder);
    return (PyObject *)self;
}

static void
DiskMemory_dealloc(PyObject *op)
{
    ct_disk_memory_close(&((DiskMemory *)op)->core);
    ctpy_leaf_dealloc(op);
}

static int
DiskMemory_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    const ct_disk_memory *core = &((DiskMemory *)op)->core;
    return PyBuffer_FillInfo(view, op, core->data, (Py_ssize_t)core->bytes, 0, flags);
}

PyDoc_STRVAR(
    drop_pages_doc,
    "drop_pages($self, /)\n--\n\n"
    "Return the pages that were touched, which the file has, and what malloc has\n"
    "free, to the system.");

static PyObject *
DiskMemory_drop_pages(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ct_disk_memory_drop_pages(&((DiskMemory *)op)->core);
    ct_malloc_trim();
    Py_RETURN_NONE;
}

static PyObject *
DiskMemory_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((DiskMemory *)op)->core.bytes);
}

static PyObject *
DiskMemory_fileno(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(((DiskMemory *)op)->core.fd);
}

PyDoc_STRVAR(fileno_doc, "fileno($self, /)\n--\n\nThe file's descriptor.");

static PyMethodDef DiskMemory_methods[] = {
    {"drop_pages", DiskMemory_drop_pages, METH_NOARGS, drop_pages_doc},
    {"fileno",     DiskMemory_fileno,     METH_NOARGS, fileno_doc    },
    {NULL,         NULL,                  0,           NULL          },
};

static PyGetSetDef DiskMemory_getset[] = {
    {"nbytes", DiskMemory_nbytes, NULL, "Its length, whole pages.", NULL},
    {NULL,     NULL,              NULL, NULL,                       NULL},
};

static PyType_Slot DiskMemory_slots[] = {
    {Py_tp_doc,       (void *)DiskMemory_doc},
    {Py_tp_new,       DiskMemory_new        },
    {Py_tp_traverse,  ctpy_leaf_traverse    },
    {Py_tp_dealloc,   DiskMemory_dealloc    },
    {Py_tp_methods,   DiskMemory_methods    },
    {Py_tp_getset,    DiskMemory_getset     },
    {Py_bf_getbuffer, DiskMemory_getbuffer  },
    {0,               NULL                  },
};

PyType_Spec DiskMemory_spec = {
    .name = "ctrainer._C.DiskMemory",
    .basicsize = sizeof(DiskMemory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = DiskMemory_slots,
};
