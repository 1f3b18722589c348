/* Makers of communicators: shared memory, two levels, a device's plugin. */
#include "binding/comm/backends.h"

#include "binding/comm/communicator.h"

#include "core/comm/hierarchical.h"
#include "core/comm/history.h"
#include "core/comm/plugin.h"
#include "core/comm/shm.h"

static const char ctpy_shared_memory_communicator_doc[] =
    "shared_memory_communicator($module, key, rank, world_size, timeout_seconds, "
    "/)\n--\n\n"
    "Join the processes of one machine that give the same key; a Communicator.\n\n"
    "key: at most 255 bytes that no other group on the machine has at the time.\n"
    "rank: in [0, world_size); world_size: at most 1024. timeout_seconds: how long to\n"
    "wait for the others, now and in each collective.\n\n"
    "Raises ValueError for arguments that are out of range or that the ranks do not\n"
    "agree on, RuntimeError naming the rank that did not come, OSError.";

static PyObject *
ctpy_shared_memory_communicator(PyObject *module, PyObject *args)
{
    const char *key;
    int rank, world_size;
    double timeout_seconds;
    ct_comm *comm;
    ct_status status;
    ct_error err;
    if (!PyArg_ParseTuple(args, "siid:shared_memory_communicator", &key, &rank,
                          &world_size, &timeout_seconds)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_shm_new(&comm, key, rank, world_size, timeout_seconds, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    ctpy_state *state = PyModule_GetState(module);
    return ctpy_communicator_steal(state->Communicator, comm);
}

static const char ctpy_two_level_communicator_doc[] =
    "two_level_communicator($module, inner, outer, whole, /)\n--\n\n"
    "A Communicator of all ranks over the group of each machine and one across.\n\n"
    "inner: this machine's ranks. outer: the ranks that have this one's place on "
    "their\n"
    "machines, in the machines' order. whole: all ranks, used to split the group. "
    "Ranks "
    "are\n"
    "numbered machine by machine, as many on each. The three are closed, and\n"
    "their groups used by the new one.\n\n"
    "Raises ValueError for groups that do not fit together, RuntimeError where one "
    "has\n"
    "collectives under way.";

/* Closes the Communicator; the group is the caller's. */
static ct_comm *
take(PyObject *op)
{
    Communicator *self = (Communicator *)op;
    ct_comm *comm = self->comm;
    self->comm = NULL;
    ct_history_free(comm->history);
    comm->history = NULL;
    return comm;
}

static int
check_free(ctpy_state *state, PyObject *op)
{
    if (ctpy_comm_borrow(state, op) == NULL) {
        return -1;
    }
    if (((Communicator *)op)->busy > 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a Communicator with collectives under way cannot be taken "
                        "over; wait for them first");
        return -1;
    }
    return 0;
}

static PyObject *
ctpy_two_level_communicator(PyObject *module, PyObject *args)
{
    ctpy_state *state = PyModule_GetState(module);
    PyObject *inner, *outer, *whole;
    ct_comm *comm = NULL;
    ct_error err;
    if (!PyArg_ParseTuple(args, "OOO:two_level_communicator", &inner, &outer, &whole) ||
        check_free(state, inner) < 0 || check_free(state, outer) < 0 ||
        check_free(state, whole) < 0) {
        return NULL;
    }
    if (inner == outer || inner == whole || outer == whole) {
        PyErr_SetString(PyExc_ValueError,
                        "inner, outer and whole must be three groups");
        return NULL;
    }
    const int compares = ctpy_comm_wants_comparison();
    if (compares < 0) {
        return NULL;
    }
    return ct_comm_hierarchical_new_steal(&comm, take(inner), take(outer), take(whole),
                                          compares > 0, &err) == CT_OK
               ? ctpy_communicator_steal(state->Communicator, comm)
               : ctpy_raise(&err);
}

/* The plugin's tables, if their version is ours. */
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

static const char ctpy_plugin_communicator_doc[] =
    "plugin_communicator($module, plugin, id, rank, world_size, stream,\n"
    "                    timeout_seconds, /)\n--\n\n"
    "Join the processes that give the same id; a Communicator on a GPU's memory.\n\n"
    "plugin: ctrainer._cuda.plugin. id: 128 bytes, of _cuda.comm_id() on one rank. "
    "rank:\nin [0, world_size). stream: the address of a CUDA stream of the current "
    "device, 0\nfor the default one, on which collectives are enqueued. "
    "timeout_seconds: how long to\nwait for the others, now and in each collective.\n\n"
    "Raises ValueError for arguments that are out of range or no such plugin, "
    "RuntimeError\nwhen NCCL cannot be found, or others fail or stay away.";

static PyObject *
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

PyMethodDef ctpy_comm_backends_functions[] = {
    {"plugin_communicator",        ctpy_plugin_communicator,        METH_VARARGS,
     ctpy_plugin_communicator_doc                                                     },
    {"shared_memory_communicator", ctpy_shared_memory_communicator, METH_VARARGS,
     ctpy_shared_memory_communicator_doc                                              },
    {"two_level_communicator",     ctpy_two_level_communicator,     METH_VARARGS,
     ctpy_two_level_communicator_doc                                                  },
    {NULL,                         NULL,                            0,            NULL},
};
