/* Communicator: smaller groups. */
#include "binding/comm/communicator.h"

const char Communicator_split_doc[] =
    "split($self, color=None, key=0, *, ranks=None)\n--\n\n"
    "Make a smaller group of the ranks that give the same color.\n\n"
    "color: 0 or more; None: this rank is in no group, and gets None. key: ranks of a\n"
    "group are in the order of their keys, and of their ranks where these are equal.\n"
    "ranks: instead of a color, the ranks of one group in their order, the same on "
    "all\n"
    "ranks. Every rank of this group calls it; the new group stands by itself, with "
    "the\n"
    "same backend and time-out.\n\n"
    "Raises ValueError for colors below 0, ranks that are out of range or repeated, "
    "and\n"
    "backends that have no smaller groups; RuntimeError when other ranks fail.";

typedef struct wish {
    long long color, key;
} wish;

/* The place of this rank in `ranks` becomes its key. 0 or -1. */
static int
wish_among(const ct_comm *comm, PyObject *ranks, wish *w)
{
    PyObject *list = PySequence_List(ranks), *seen = PySet_New(NULL);
    int status = list == NULL || seen == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        const long rank = PyLong_AsLong(item);
        if ((rank == -1 && PyErr_Occurred()) || PySet_Add(seen, item) < 0) {
            status = -1;
        }
        else if (rank < 0 || rank >= comm->world_size ||
                 PySet_GET_SIZE(seen) != i + 1) {
            PyErr_Format(PyExc_ValueError,
                         "ranks must be different and in [0, %d), got %R",
                         comm->world_size, list);
            status = -1;
        }
        else if (rank == comm->rank) {
            *w = (wish){0, i};
        }
    }
    Py_XDECREF(seen);
    Py_XDECREF(list);
    return status;
}

static int
wish_of(const ct_comm *comm, PyObject *color, PyObject *ranks, wish *w)
{
    if (ranks != Py_None && color != Py_None) {
        PyErr_SetString(PyExc_ValueError, "give a color or ranks, not both");
        return -1;
    }
    if (ranks != Py_None) {
        return wish_among(comm, ranks, w);
    }
    if (color == Py_None) {
        return 0;
    }
    w->color = PyLong_AsLongLong(color);
    if (w->color < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "color must be 0 or more, or None, got %lld",
                     w->color);
    }
    return w->color < 0 ? -1 : 0;
}

PyObject *
Communicator_split(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"color", "key", "ranks", NULL};
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *color = Py_None, *ranks = Py_None;
    wish w = {.color = -1};
    ct_comm *made = NULL;
    ct_status status;
    ct_error err;
    ct_comm *comm = ctpy_comm_borrow(state, op);
    if (comm == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OL$O:split", names, &color, &w.key,
                                     &ranks) ||
        wish_of(comm, color, ranks, &w) < 0) {
        return NULL;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_split(comm, w.color, w.key, &made, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    return made == NULL ? Py_NewRef(Py_None)
                        : ctpy_communicator_steal(state->Communicator, made);
}
