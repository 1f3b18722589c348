/* ctrainer._C.GroupMemory: core/base/pages.h as an exporter of the buffer protocol. */
#include "binding/comm/communicator.h"

#include "core/base/pages.h"

typedef struct GroupMemory {
    PyObject_HEAD
    ct_pages *pages;
    unsigned char *theirs; /* another rank's part, to be read; NULL: our own */
    Py_ssize_t n_bytes;    /* as asked for; the pages may be longer */
} GroupMemory;

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

/* Takes one hold of the pages over. */
static PyObject *
memory_steal(PyTypeObject *type, ct_pages *pages, unsigned char *theirs,
             Py_ssize_t n_bytes)
{
    GroupMemory *self = (GroupMemory *)type->tp_alloc(type, 0);
    if (self == NULL) {
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

const char Communicator_memory_doc[] =
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

PyObject *
Communicator_memory(PyObject *op, PyObject *number)
{
    ctpy_state *state = ctpy_state_borrow(op);
    ct_comm *comm = ctpy_comm_borrow(state, op);
    const Py_ssize_t n_bytes = comm == NULL ? -1 : PyLong_AsSsize_t(number);
    ct_pages *pages = NULL;
    ct_status status;
    ct_error err;
    if (n_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (n_bytes < 0) {
        return PyErr_Format(PyExc_ValueError, "nbytes must be above 0, got %zd",
                            n_bytes);
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_memory(comm, (size_t)n_bytes, &pages, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    return status == CT_OK ? memory_steal(state->GroupMemory, pages, NULL, n_bytes)
                           : ctpy_raise(&err);
}

static int
GroupMemory_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    const GroupMemory *self = (GroupMemory *)op;
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
    ct_pages_hold(self->pages);
    PyObject *memory = memory_steal(Py_TYPE(op), self->pages, theirs, self->n_bytes);
    PyObject *view = memory == NULL ? NULL : PyMemoryView_FromObject(memory);
    Py_XDECREF(memory);
    return view;
}

PyDoc_STRVAR(
    discard_doc,
    "discard($self, offset=0, nbytes=None)\n--\n\n"
    "Give memory back to the system; it reads as zeroes from then on.\n\n"
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

PyDoc_STRVAR(
    GroupMemory_doc,
    "Memory of a rank for collectives, a writable buffer: Communicator.memory.\n"
    "\n"
    "Begins at a page. Dropping the last tensor or array over it frees it.");

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
