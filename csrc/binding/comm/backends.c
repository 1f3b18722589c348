/* Communicators of the processes of one machine. */
#include "binding/comm/communicator.h"

#include "core/comm/shm.h"

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

const char ctpy_shared_memory_communicator_doc[] =
    "shared_memory_communicator($module, key, rank, world_size, timeout_seconds, "
    "/)\n--\n\n"
    "Join the processes of one machine that give the same key; a Communicator.\n\n"
    "key: at most 255 bytes that no other group on the machine has at the time.\n"
    "rank: in [0, world_size); world_size: at most 1024. timeout_seconds: how long to\n"
    "wait for the others, now and in each collective.\n\n"
    "Raises ValueError for arguments that are out of range or that the ranks do not\n"
    "agree on, RuntimeError naming the rank that did not come, OSError.";

PyObject *
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
