/* A device's plugin, ctrainer._cuda's: its table, and communicators over its memory,
 * NCCL's. */
#include "binding/comm/communicator.h"
#include "binding/comm/backends.h"

#include "core/comm/plugin.h"

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

/* Its tables, once the version says that they are those that we know. */
static const ct_plugin *
plugin_of(PyObject *capsule)
{
    const ct_plugin *plugin = PyCapsule_GetPointer(capsule, CT_PLUGIN_CAPSULE);
    if (plugin != NULL && plugin->version != CT_DEVICE_VERSION) {
        PyErr_Format(PyExc_RuntimeError,
                     "the device's plugin has tables of version %d, and ctrainer._C of "
                     "%d: install both from one release of ctrainer",
                     plugin->version, CT_DEVICE_VERSION);
        return NULL;
    }
    return plugin;
}

const ct_device *
ctpy_device_borrow(PyObject *capsule)
{
    if (Py_IsNone(capsule)) {
        return &ct_device_cpu;
    }
    const ct_plugin *plugin = plugin_of(capsule);
    return plugin == NULL ? NULL : plugin->device;
}

const char ctpy_plugin_communicator_doc[] =
    "plugin_communicator($module, plugin, id, rank, world_size, stream,\n"
    "                    timeout_seconds, /)\n--\n\n"
    "Join the processes that give the same id; a Communicator on a GPU's memory.\n\n"
    "plugin: ctrainer._cuda.plugin. id: 128 bytes, of _cuda.comm_id() on one rank. "
    "rank:\nin [0, world_size). stream: the address of a CUDA stream of the current "
    "device, 0\nfor the default one, on which collectives are enqueued. "
    "timeout_seconds: how long to\nwait for the others, now and in each collective.\n\n"
    "Raises ValueError for arguments that are out of range or no such plugin, "
    "RuntimeError\nwhen NCCL cannot be found, or others fail or stay away.";

PyObject *
ctpy_plugin_communicator(PyObject *module, PyObject *args)
{
    PyObject *capsule, *address;
    const char *id;
    Py_ssize_t id_bytes;
    int rank, world_size;
    double timeout_seconds;
    ct_comm *comm = NULL;
    ct_status status;
    ct_error err;
    if (!PyArg_ParseTuple(args, "Oy#iiOd:plugin_communicator", &capsule, &id, &id_bytes,
                          &rank, &world_size, &address, &timeout_seconds)) {
        return NULL;
    }
    const ct_plugin *plugin = plugin_of(capsule);
    void *stream = plugin == NULL ? NULL : PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (id_bytes != CT_COMM_ID_BYTES) {
        return PyErr_Format(PyExc_ValueError, "id must have %d bytes, got %zd",
                            CT_COMM_ID_BYTES, id_bytes);
    }
    Py_BEGIN_ALLOW_THREADS
    status =
        plugin->comm_join(id, rank, world_size, stream, timeout_seconds, &comm, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    ctpy_state *state = PyModule_GetState(module);
    return ctpy_communicator_steal(state->Communicator, comm);
}
