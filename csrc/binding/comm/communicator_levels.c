/* Communicators over two others: within machines and across them. */
#include "binding/comm/communicator.h"

#include "core/comm/comm_levels.h"
#include "core/comm/history.h"

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

const char ctpy_two_level_communicator_doc[] =
    "two_level_communicator($module, inner, outer, whole, /)\n--\n\n"
    "A Communicator of all ranks over the group of each machine and one across.\n\n"
    "inner: this machine's ranks. outer: the ranks that have this one's place on "
    "their\n"
    "machines, in the machines' order. whole: all ranks; it splits the group. Ranks "
    "are\n"
    "numbered machine by machine, as many on each. It takes the three over: they are\n"
    "closed.\n\n"
    "Raises ValueError for groups that do not fit together, RuntimeError where one "
    "has\n"
    "collectives under way.";

/* Closes it for Python; the caller owns what it had. */
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

PyObject *
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
    return ct_comm_levels_new_steal(&comm, take(inner), take(outer), take(whole),
                                    compares > 0, &err) == CT_OK
               ? ctpy_communicator_steal(state->Communicator, comm)
               : ctpy_raise(&err);
}
