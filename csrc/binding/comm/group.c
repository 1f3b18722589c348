/* A Communicator as the rest of the binding uses it: the group, and collectives without
 * the GIL. Apart from the type's methods, because other files below the methods use a
 * group, too. */
#include "binding/comm/communicator.h"

#include "core/comm/history.h"

ct_comm *
ctpy_comm_borrow(ctpy_state *state, PyObject *op)
{
    if (!PyObject_TypeCheck(op, state->Communicator)) {
        PyErr_Format(PyExc_TypeError, "expected a ctrainer.Communicator, got a %.200s",
                     Py_TYPE(op)->tp_name);
        return NULL;
    }
    ct_comm *comm = ((Communicator *)op)->comm;
    if (comm == NULL) {
        PyErr_SetString(PyExc_ValueError, "this Communicator has been closed");
    }
    return comm;
}

PyThreadState *
ctpy_comm_enter(PyObject *op)
{
    ((Communicator *)op)->busy++;
    return PyEval_SaveThread();
}

void
ctpy_comm_leave(PyObject *op, PyThreadState *thread)
{
    PyEval_RestoreThread(thread);
    ((Communicator *)op)->busy--;
}

int
ctpy_comm_run(ctpy_state *state, PyObject *op, const ct_request *request)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    PyThreadState *thread = ctpy_comm_enter(op);
    const ct_status status = ct_comm_run(comm, request, &err);
    ctpy_comm_leave(op, thread);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_comm_reduce_numbers(ctpy_state *state, PyObject *op, const ct_label *label,
                         double *numbers, size_t n, ct_reduce_op how)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    PyThreadState *thread = ctpy_comm_enter(op);
    if (label != NULL) {
        ct_comm_label(comm, label, CT_ALL_REDUCE);
    }
    const ct_status status = ct_comm_reduce_numbers(comm, numbers, n, how, &err);
    ct_comm_unlabel(comm);
    ctpy_comm_leave(op, thread);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_comm_span(ctpy_state *state, const ct_comm *comm, PyObject *op, const char *what,
               ct_span *span)
{
    const ctpy_place place = {.what = what, .group = -1};
    ctpy_view view;
    const int found = comm != NULL && comm->ops->takes_device_memory
                          ? ctpy_view_anywhere(state, op, &place, &view)
                          : ctpy_view_of(state, op, &place, &view);
    if (found < 0) {
        return -1;
    }
    if (view.readonly) {
        PyErr_Format(PyExc_ValueError, "%s is read-only; a collective writes into it",
                     what);
        return -1;
    }
    *span = view.span;
    return 0;
}

/* A group without comparison of requests keeps a history. 0, or -1
 * with an exception. */
static int
keep_history(ct_comm *comm)
{
    /* Raises for a wrong word with any backend. */
    const int compares = comm->world_size == 1 ? 1 : ctpy_comm_wants_comparison();
    if (compares != 0 || comm->ops->compares) {
        return compares < 0 ? -1 : 0;
    }
    comm->history = ct_history_new();
    if (comm->history == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

void
ctpy_comm_free(ct_comm *comm)
{
    if (comm != NULL) {
        ct_history_free(comm->history);
        comm->ops->free(comm);
    }
}

PyObject *
ctpy_communicator_steal(PyTypeObject *type, ct_comm *comm)
{
    PyObject *op = keep_history(comm) < 0 ? NULL : type->tp_alloc(type, 0);
    if (op == NULL) {
        ctpy_comm_free(comm);
        return NULL;
    }
    ((Communicator *)op)->comm = comm;
    return op;
}
