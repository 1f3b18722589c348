/* ctrainer._C.Communicator, for the binding's own files. */
#ifndef BINDING_COMM_COMMUNICATOR_H
#define BINDING_COMM_COMMUNICATOR_H

#include "binding/runtime/ctpy.h"

#include "core/comm/comm.h"

typedef struct Communicator {
    PyObject_HEAD
    ct_comm *comm;   /* NULL once it is closed */
    Py_ssize_t busy; /* collectives under way, which close() waits for nobody to end */
} Communicator;

/* An instance of `type` over comm, which it takes over even on failure. */
PyObject *ctpy_communicator_steal(PyTypeObject *type, ct_comm *comm);

/* The table of a Communicator that is open; NULL with an exception for one that is not,
 * or for another object. */
ct_comm *ctpy_comm_borrow(ctpy_state *state, PyObject *op);

/* Leaves the group, without the GIL: closing may wait for others. */
void ctpy_comm_free(ct_comm *comm);

/* Runs a request without the GIL and raises what went wrong. 0 or -1. */
int ctpy_comm_run(ctpy_state *state, PyObject *op, const ct_request *request);

/* Reduces numbers in place, comparing what ranks have done (core/comm/history.h): the
 * exchange is for `label` where one is given. 0 or -1. */
int ctpy_comm_reduce_numbers(ctpy_state *state, PyObject *op, const ct_label *label,
                             double *numbers, size_t n, ct_reduce_op how);

/* binding/comm/python.c: a group whose collectives are those of a Python object with
 * rank, world_size and begin(what, out, in_, dtype, op, root), which returns a handle
 * with wait(). NULL with an exception. */
ct_comm *ctpy_comm_python_new(PyObject *backend);

/* What CTRAINER_CHECK_COLLECTIVES asks for: 1, ranks are to compare what they are about
 * to do together; 0; or -1 with an exception for a word that says neither. */
int ctpy_comm_wants_comparison(void);

PyObject *Communicator_gather_bytes(PyObject *op, PyObject *arg);

#endif
