/* MappedMemory as a tensor of bytes that frameworks take over without a copy.
 *
 * The capsule is that of DLPack before version 1, which every consumer reads.
 *
 * Source: the Python array API standard, __dlpack__; DLPack, dlpack.h. */
#include "binding/comm/memory.h"

#include "binding/runtime/dlpack_abi.h"

/* What is handed over; it keeps the memory. */
typedef struct loan {
    ctpy_dl_managed managed; /* first: the consumer has its address */
    PyObject *memory;
    int64_t n;
} loan;

/* Consumers let go of tensors from any thread, with the GIL or without. */
static void
give_back(ctpy_dl_managed *managed)
{
    loan *self = (loan *)managed;
    const PyGILState_STATE held = PyGILState_Ensure();
    Py_DECREF(self->memory);
    PyMem_Free(self);
    PyGILState_Release(held);
}

/* A capsule that nobody has taken over; one that was has another name. */
static void
drop_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CTPY_DLPACK_TENSOR)) {
        ctpy_dl_managed *managed = PyCapsule_GetPointer(capsule, CTPY_DLPACK_TENSOR);
        managed->deleter(managed);
    }
}

static PyObject *
lend(MappedMemory *self)
{
    loan *made = PyMem_Malloc(sizeof *made);
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    *made = (loan){
        .managed = {.tensor = {.data = self->pages.data,
                               .device_type = self->device->dlpack,
                               .device_id = self->pages.ordinal,
                               .ndim = 1,
                               .type_code = CTPY_DL_UINT,
                               .type_bits = 8,
                               .type_lanes = 1},
                    .deleter = give_back},
        .memory = Py_NewRef(self),
        .n = (int64_t)self->pages.bytes,
    };
    made->managed.tensor.shape = &made->n;
    PyObject *capsule = PyCapsule_New(made, CTPY_DLPACK_TENSOR, drop_capsule);
    if (capsule == NULL) {
        give_back(&made->managed);
    }
    return capsule;
}

const char MappedMemory_dlpack_doc[] =
    "__dlpack__($self, *, stream=None, max_version=None, dl_device=None,\n"
    "           copy=None)\n--\n\n"
    "A capsule of one row of uint8 over the memory, which it keeps.\n\n"
    "stream, max_version: nothing has to be waited for, and the capsule is one that\n"
    "consumers of every version take. Raises BufferError for a copy or another device.";

PyObject *
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
    if (copy == Py_True || type != self->device->dlpack || id != self->pages.ordinal) {
        PyErr_SetString(PyExc_BufferError,
                        "this memory is lent where it is; copy the tensor");
        return NULL;
    }
    return lend(self);
}

const char MappedMemory_dlpack_device_doc[] =
    "__dlpack_device__($self, /)\n--\n\n"
    "(device type, device number), by DLPack's enumeration.";

PyObject *
MappedMemory_dlpack_device(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const MappedMemory *self = (const MappedMemory *)op;
    return Py_BuildValue("ii", self->device->dlpack, self->pages.ordinal);
}
