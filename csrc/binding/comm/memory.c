/* ctrainer._C.GroupMemory, a rank's memory for collectives (core/base/pages.h), and
 * MappedMemory, memory at a fixed address (core/base/mapping.h), for torch.frombuffer()
 * on the host and torch.from_dlpack() on a device.
 *
 * The core counts the holders of pages, Python counts references: every Python object
 * owns one hold, and every buffer view owns a reference to the object, so memory in use
 * is never unmapped. */
#include "binding/comm/memory.h"

#include "binding/comm/communicator.h"
#include "binding/runtime/buffer.h"
#include "binding/runtime/dlpack_abi.h"

#include "core/base/pages.h"

typedef struct GroupMemory {
    PyObject_HEAD
    ct_pages *pages;
    unsigned char *theirs; /* another rank's part, read-only; NULL: our own */
    Py_ssize_t n_bytes;    /* as asked for; the pages may be longer */
} GroupMemory;

/* The rank's own memory is emptied too: other ranks may hold the addresses for long. */
static void
release(ct_pages *pages, unsigned char *theirs)
{
    if (theirs == NULL) {
        ct_pages_free(pages);
    }
    else {
        ct_pages_drop(pages);
    }
}

PyDoc_STRVAR(
    GroupMemory_doc,
    "Memory of a rank for collectives, a writable buffer: Communicator.memory.\n"
    "\n"
    "Begins at a page. Dropping the last tensor or array over it frees it.");

/* Owns one hold of the pages from now on. */
static PyObject *
memory_steal(PyTypeObject *type, ct_pages *pages, unsigned char *theirs,
             Py_ssize_t n_bytes)
{
    GroupMemory *self = (GroupMemory *)type->tp_alloc(type, 0);
    if (self == NULL) {
        /* The hold was taken over, on failure as well. */
        release(pages, theirs);
        return NULL;
    }
    self->pages = pages;
    self->theirs = theirs;
    self->n_bytes = n_bytes;
    return (PyObject *)self;
}

static void
GroupMemory_dealloc(PyObject *op)
{
    const GroupMemory *self = (GroupMemory *)op;
    release(self->pages, self->theirs);
    ctpy_leaf_dealloc(op);
}

static const char Communicator_memory_doc[] =
    "memory($self, nbytes, /)\n--\n\n"
    "Make zeroed memory from which other ranks read without a copy; a GroupMemory.\n"
    "\n"
    "A collective: every rank calls it with the same nbytes > 0, and each gets memory\n"
    "of its own. What lies in it whole (make tensors of it with torch.frombuffer, "
    "arrays\n"
    "with numpy.frombuffer) is not staged in collectives of shared memory. Backends\n"
    "without shared memory give plain memory. It outlives the group.\n\n"
    "Raises ValueError for nbytes that differ or are not positive, MemoryError, "
    "OSError,\n"
    "RuntimeError when other ranks fail or stay away.";

static PyObject *
Communicator_memory(PyObject *op, PyObject *number)
{
    ctpy_state *state = ctpy_state_borrow(op);
    ct_comm *comm = ctpy_comm_borrow(state, op);
    const Py_ssize_t n_bytes = comm == NULL ? -1 : PyLong_AsSsize_t(number);
    ct_pages *pages = NULL;
    ct_error err;
    /* A closed group, or no integer. */
    if (n_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (n_bytes < 0) {
        return PyErr_Format(PyExc_ValueError, "nbytes must be above 0, got %zd",
                            n_bytes);
    }
    /* 0 bytes are left to the core, for the same error on all ranks. */
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status = ct_comm_memory(comm, (size_t)n_bytes, &pages, &err);
    ctpy_comm_leave(op, thread);
    return status == CT_OK ? memory_steal(state->GroupMemory, pages, NULL, n_bytes)
                           : ctpy_raise(&err);
}

static int
GroupMemory_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    const GroupMemory *self = (GroupMemory *)op;
    /* Another rank's part is read-only: every part has a single writer. */
    const bool is_own = self->theirs == NULL;
    void *data = is_own ? self->pages->data : self->theirs;
    return PyBuffer_FillInfo(view, op, data, self->n_bytes, !is_own, flags);
}

PyDoc_STRVAR(
    of_rank_doc,
    "of_rank($self, rank, /)\n--\n\n"
    "Read another rank's memory where it lies; a memoryview of nbytes bytes.\n\n"
    "An all_gather of nothing: after a barrier() of the group it shows what that rank\n"
    "wrote before its own, and another barrier() has to come before that rank writes\n"
    "again. It is read-only. What the rank discards or drops reads as zeroes.\n\n"
    "Raises ValueError for no rank of the group, and where ranks do not share memory.");

static PyObject *
GroupMemory_of_rank(PyObject *op, PyObject *number)
{
    const GroupMemory *self = (GroupMemory *)op;
    const long rank = PyLong_AsLong(number);
    if (rank == -1 && PyErr_Occurred()) {
        return NULL;
    }
    unsigned char *theirs = ct_pages_of_rank(self->pages, rank);
    if (theirs == NULL) {
        return self->pages->is_shared
                   ? PyErr_Format(PyExc_ValueError, "the group has no rank %ld", rank)
                   : PyErr_Format(PyExc_ValueError,
                                  "rank %ld's memory cannot be read where it lies: the "
                                  "ranks of this group do not share memory; use "
                                  "all_gather",
                                  rank);
    }
    /* The view outlives this object, perhaps. */
    ct_pages_hold(self->pages);
    PyObject *memory = memory_steal(Py_TYPE(op), self->pages, theirs, self->n_bytes);
    PyObject *view = memory == NULL ? NULL : PyMemoryView_FromObject(memory);
    /* The view keeps the memory alive. */
    Py_XDECREF(memory);
    return view;
}

PyDoc_STRVAR(
    discard_doc,
    "discard($self, offset=0, nbytes=None)\n--\n\n"
    "Return memory to the system; it reads as zeroes from then on.\n\n"
    "Addresses and tensors stay, and may be written again. offset and nbytes "
    "are in\nbytes, multiples of mmap.PAGESIZE; nbytes=None: up to the end. No "
    "rank may be\nreading it. Raises ValueError, OSError.");

static PyObject *
GroupMemory_discard(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"offset", "nbytes", NULL};
    const GroupMemory *self = (GroupMemory *)op;
    PyObject *wanted = Py_None;
    Py_ssize_t offset = 0;
    ct_error err;
    if (self->theirs != NULL) {
        PyErr_SetString(PyExc_ValueError, "a rank can discard its own memory alone");
        return NULL;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|nO:discard", names, &offset,
                                     &wanted)) {
        return NULL;
    }
    /* Up to the end of the pages, beyond nbytes: whole pages alone can be discarded. */
    const Py_ssize_t rest = (Py_ssize_t)self->pages->bytes - offset;
    const Py_ssize_t n_bytes = wanted == Py_None ? rest : PyLong_AsSsize_t(wanted);
    if (n_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (offset < 0 || n_bytes < 0) {
        return PyErr_Format(PyExc_ValueError,
                            "offset and nbytes must lie in the memory's %zd bytes, got "
                            "%zd and %zd",
                            self->n_bytes, offset, n_bytes);
    }
    return ct_pages_discard(self->pages, (size_t)offset, (size_t)n_bytes, &err) == CT_OK
               ? Py_NewRef(Py_None)
               : ctpy_raise(&err);
}

static PyObject *
GroupMemory_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(((GroupMemory *)op)->n_bytes);
}

static PyObject *
GroupMemory_is_shared(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((GroupMemory *)op)->pages->is_shared);
}

PyDoc_STRVAR(
    MappedMemory_doc,
    "MappedMemory(nbytes, *, watched=False, plugin=None, pinned_for=None)\n--\n\n"
    "nbytes of zeros at an address that never changes, as a writable buffer.\n\n"
    "Its memory is taken page by page at the first touch and returned to the system\n"
    "with the object. watched: what is used while its pages are returned ends the\n"
    "process at that place, rather than reading zeros. plugin: a device's, as\n"
    "ctrainer._cuda.plugin; then it is addresses of the current GPU, for\n"
    "torch.from_dlpack(), where a unit puts memory and takes it away. pinned_for: the\n"
    "plugin of a device that copies to and from the host's memory while nobody waits;\n"
    "without memory to pin it is ordinary. Raises MemoryError, ValueError for no such\n"
    "plugin, RuntimeError for what the driver says.");

static PyObject *
MappedMemory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "watched", "plugin", "pinned_for", NULL};
    Py_ssize_t nbytes;
    PyObject *plugin = Py_None, *pinned_for = Py_None;
    int watched = 0;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|$pOO:MappedMemory", names,
                                     &nbytes, &watched, &plugin, &pinned_for)) {
        return NULL;
    }
    const ct_device *device = ctpy_device_borrow(plugin);
    const ct_device *pins = ctpy_device_borrow(pinned_for);
    if (device == NULL || pins == NULL) {
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
    /* All zeros is a mapping that may be closed, so a failure below needs no care. */
    self->device = device;
    if (ct_mapping_open_on(device->mapping, &self->pages, (size_t)nbytes, watched != 0,
                           &err) != CT_OK) {
        Py_DECREF(self);
        return ctpy_raise(&err);
    }
    if (device->mapping == NULL && nbytes != 0 && pins != &ct_device_cpu &&
        pins->pin(self->pages.data, (size_t)nbytes, &err) == CT_OK) {
        self->pinned = pins;
    }
    return (PyObject *)self;
}

static void
MappedMemory_dealloc(PyObject *op)
{
    MappedMemory *self = (MappedMemory *)op;
    Py_BEGIN_ALLOW_THREADS /* waits for the device */
    if (self->pinned != NULL) {
        self->pinned->unpin(self->pages.data);
    }
    ct_mapping_close(&self->pages);
    Py_END_ALLOW_THREADS
    ctpy_leaf_dealloc(op);
}

static int
MappedMemory_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    const ct_mapping *pages = &((MappedMemory *)op)->pages;
    /* A device's addresses in a buffer would crash the first reader on the host. */
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

static PyObject *
MappedMemory_pinned(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((MappedMemory *)op)->pinned != NULL);
}

static const char MappedMemory_dlpack_doc[] =
    "__dlpack__($self, *, stream=None, max_version=None, dl_device=None,\n"
    "           copy=None)\n--\n\n"
    "A capsule of one row of uint8 over the memory, which it keeps.\n\n"
    "stream, max_version: nothing has to be waited for, and the capsule is one that\n"
    "consumers of every version take. Raises BufferError for a copy or another device.";

/* A DLPack tensor of bytes that keeps a MappedMemory alive. DLPack before version 1 is
 * read by every consumer.
 *
 * Source: the Python array API standard, __dlpack__; DLPack, dlpack.h. */
typedef struct exported {
    ctpy_dl_managed managed; /* first: the consumer has this address */
    PyObject *memory;
    int64_t n;
} exported;

/* Consumers delete tensors from any thread, with the GIL or without. */
static void
delete_exported(ctpy_dl_managed *managed)
{
    exported *self = (exported *)managed;
    const PyGILState_STATE held = PyGILState_Ensure();
    Py_DECREF(self->memory);
    PyMem_Free(self);
    PyGILState_Release(held);
}

/* For a capsule without a consumer: consumers rename capsules. */
static void
drop_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CTPY_DLPACK_TENSOR)) {
        ctpy_dl_managed *managed = PyCapsule_GetPointer(capsule, CTPY_DLPACK_TENSOR);
        managed->deleter(managed);
    }
}

static PyObject *export(MappedMemory *self)
{
    exported *made = PyMem_Malloc(sizeof *made);
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    *made = (exported){
        .managed = {.tensor = {.data = self->pages.data,
                               .device_type = self->device->dlpack,
                               .device_id = self->pages.ordinal,
                               .ndim = 1,
                               .type_code = CTPY_DL_UINT,
                               .type_bits = 8,
                               .type_lanes = 1},
                    .deleter = delete_exported},
        .memory = Py_NewRef(self),
        .n = (int64_t)self->pages.bytes,
    };
    made->managed.tensor.shape = &made->n;
    PyObject *capsule = PyCapsule_New(made, CTPY_DLPACK_TENSOR, drop_capsule);
    if (capsule == NULL) {
        delete_exported(&made->managed);
    }
    return capsule;
}

static PyObject *
MappedMemory_dlpack(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    MappedMemory *self = (MappedMemory *)op;
    PyObject *stream, *version, *device = Py_None, *copy = Py_None;
    int type = self->device->dlpack, id = self->pages.ordinal;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream,
                                     &version, &device, &copy)) {
        return NULL;
    }
    if (!Py_IsNone(device) && !PyArg_ParseTuple(device, "ii", &type, &id)) {
        return NULL;
    }
    /* The standard asks for BufferError where an export in place is impossible. */
    if (copy == Py_True || type != self->device->dlpack || id != self->pages.ordinal) {
        PyErr_SetString(PyExc_BufferError,
                        "this memory is exported in place; copy the tensor");
        return NULL;
    }
    return export(self);
}

static const char MappedMemory_dlpack_device_doc[] =
    "__dlpack_device__($self, /)\n--\n\n"
    "(device type, device number), by DLPack's enumeration.";

static PyObject *
MappedMemory_dlpack_device(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const MappedMemory *self = (const MappedMemory *)op;
    return Py_BuildValue("ii", self->device->dlpack, self->pages.ordinal);
}

static PyMethodDef GroupMemory_methods[] = {
    {"discard", (PyCFunction)(void (*)(void))GroupMemory_discard,
     METH_VARARGS | METH_KEYWORDS,                                        discard_doc},
    {"of_rank", GroupMemory_of_rank,                              METH_O, of_rank_doc},
    {NULL,      NULL,                                             0,      NULL       },
};

static PyGetSetDef GroupMemory_getset[] = {
    {"is_shared", GroupMemory_is_shared, NULL,
     "Whether other processes read it where it lies.",                NULL},
    {"nbytes",    GroupMemory_nbytes,    NULL, "What was asked for.", NULL},
    {NULL,        NULL,                  NULL, NULL,                  NULL},
};

static PyType_Slot GroupMemory_slots[] = {
    {Py_tp_doc,       (void *)GroupMemory_doc},
    {Py_tp_traverse,  ctpy_leaf_traverse     },
    {Py_tp_dealloc,   GroupMemory_dealloc    },
    {Py_tp_methods,   GroupMemory_methods    },
    {Py_tp_getset,    GroupMemory_getset     },
    {Py_bf_getbuffer, GroupMemory_getbuffer  },
    {0,               NULL                   },
};

PyType_Spec GroupMemory_spec = {
    .name = "ctrainer._C.GroupMemory",
    .basicsize = sizeof(GroupMemory),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = GroupMemory_slots,
};

static PyMethodDef MappedMemory_methods[] = {
    {"__dlpack__",        (PyCFunction)(void (*)(void))MappedMemory_dlpack,
     METH_VARARGS | METH_KEYWORDS,                                                       MappedMemory_dlpack_doc},
    {"__dlpack_device__", MappedMemory_dlpack_device,                       METH_NOARGS,
     MappedMemory_dlpack_device_doc                                                                             },
    {NULL,                NULL,                                             0,           NULL                   },
};

static PyGetSetDef MappedMemory_getset[] = {
    {"on_host", MappedMemory_on_host, NULL,
     "Whether it is the host's memory, and a buffer.",                            NULL},
    {"nbytes",  MappedMemory_nbytes,  NULL, "How many bytes may be used.",        NULL},
    {"pinned",  MappedMemory_pinned,  NULL, "Whether it is pinned for a device.", NULL},
    {NULL,      NULL,                 NULL, NULL,                                 NULL},
};

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

PyMethodDef Communicator_comm_memory_methods[] = {
    {"memory", Communicator_memory, METH_O, Communicator_memory_doc},
    {NULL,     NULL,                0,      NULL                   },
};
