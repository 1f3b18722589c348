/* ctrainer._C.Communicator, for the binding's own files. */
#ifndef BINDING_COMM_COMMUNICATOR_H
#define BINDING_COMM_COMMUNICATOR_H

#include "binding/runtime/buffer.h"

#include "core/comm/comm.h"
#include "core/comm/staged.h"
#include "core/device/device.h"

typedef struct Communicator {
    PyObject_HEAD
    ct_comm *comm;   /* NULL once it is closed */
    Py_ssize_t busy; /* calls and collectives under way; close() fails meanwhile */
    PyObject *over;  /* of a group for a GPU's memory: the same ranks' group for the
                      * host's; or NULL */
} Communicator;

/* An instance of `type` that owns comm, also on failure. */
PyObject *ctpy_communicator_steal(PyTypeObject *type, ct_comm *comm);

/* NULL, with the exception for an object that is no open Communicator. */
ct_comm *ctpy_comm_reject(ctpy_state *state, PyObject *op);

/* The group of an open Communicator; NULL with an exception for a closed group or
 * another object. */
static inline ct_comm *
ctpy_comm_borrow(ctpy_state *state, PyObject *op)
{
    ct_comm *comm =
        PyObject_TypeCheck(op, state->Communicator) ? ((Communicator *)op)->comm : NULL;
    return comm != NULL ? comm : ctpy_comm_reject(state, op);
}

/* The group of the same ranks for numbers of the hosts: best one that waits for no GPU.
 */
static inline PyObject *
ctpy_comm_of_hosts(PyObject *op)
{
    PyObject *over = ((Communicator *)op)->over;
    return over != NULL && ((Communicator *)over)->comm != NULL ? over : op;
}

/* Leaves the group, with the GIL. */
void ctpy_comm_free(ct_comm *comm);

/* Releases the GIL for a call on the communicator, which stays open until
 * ctpy_comm_leave. */
PyThreadState *ctpy_comm_enter(PyObject *op);
void ctpy_comm_leave(PyObject *op, PyThreadState *thread);

/* Runs a request without the GIL. 0, or -1 with an exception. */
int ctpy_comm_run(ctpy_state *state, PyObject *op, const ct_request *request);

/* Reduces numbers in place and compares the ranks' histories (core/comm/collectives.h);
 * label: the purpose of the exchange, or NULL. 0 or -1. */
int ctpy_comm_reduce_numbers(ctpy_state *state, PyObject *op, const ct_label *label,
                             double *numbers, size_t n, ct_reduce_op how);

/* Fills *span from a writable tensor or array, elements in the order of memory: in host
 * memory or, if comm takes device memory, in a GPU's, and then behind what torch has
 * enqueued there. comm: NULL for host memory alone; what: the name in messages. 0 or
 * -1. */
int ctpy_comm_span(ctpy_state *state, const ct_comm *comm, PyObject *op,
                   const char *what, ct_span *span);

/* Raises the ValueError of an array without write access; -1. */
int ctpy_reject_readonly(const char *what);

/* Whether the group takes spans in the target's memory. */
static inline bool
ctpy_comm_takes(const ct_comm *comm, const ctpy_target *target)
{
    return target->device == &ct_device_cpu || comm->ops->takes_device_memory;
}

/* The group for spans in the target's memory: comm, or the group for a GPU's memory
 * that comm owns; NULL if neither does. */
static inline ct_comm *
ctpy_comm_for(ct_comm *comm, const ctpy_target *target)
{
    ct_comm *on_gpu = comm->on_gpu;
    return ctpy_comm_takes(comm, target)                      ? comm
           : on_gpu != NULL && on_gpu->gpu == target->ordinal ? on_gpu
                                                              : NULL;
}

/* ctpy_comm_for(), or *staged over comm; the caller ends *staged. */
ct_comm *ctpy_comm_at(ct_comm *comm, const ctpy_target *target, ct_staged *staged);

/* A group over a Python object with rank, world_size and
 * begin(what, out, in_, dtype, op, root) -> a handle with wait(). NULL with an
 * exception. */
ct_comm *ctpy_comm_python_new(PyObject *backend);

/* CTRAINER_CHECK_COLLECTIVES: 1, ranks compare their requests before each collective;
 * 0; or -1 with an exception for another word. */
int ctpy_comm_wants_comparison(void);

PyObject *Communicator_gather_bytes(PyObject *op, PyObject *arg);

/* The elements of every tensor, in host memory or a GPU's, become the root's. 0 or -1;
 * nothing for an empty sequence. */
int ctpy_broadcast_sequence(ctpy_state *state, PyObject *communicator,
                            PyObject *tensors, int root);

#endif
