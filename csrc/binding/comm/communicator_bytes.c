/* Communicator: bytes of any length between ranks, which objects are encoded as. */
#include "binding/comm/communicator.h"

#include "core/comm/bytes.h"

static PyObject *
split(const ct_gathered *gathered, int world_size)
{
    PyObject *list = PyList_New(world_size);
    for (Py_ssize_t r = 0; list != NULL && r < world_size; r++) {
        const char *data = (const char *)gathered->data + (size_t)r * gathered->stride;
        PyObject *bytes = PyBytes_FromStringAndSize(gathered->n[r] == 0 ? "" : data,
                                                    (Py_ssize_t)gathered->n[r]);
        if (bytes == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, r, bytes);
        }
    }
    return list;
}

const char Communicator_gather_bytes_doc[] =
    "gather_bytes($self, data, /)\n--\n\n"
    "Return what every rank gave, a list of bytes in rank order, on every rank.\n"
    "\n"
    "Each rank's data may have its own length.";

PyObject *
Communicator_gather_bytes(PyObject *op, PyObject *data)
{
    ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    Py_buffer view;
    if (comm == NULL || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    ct_gathered gathered;
    ct_status status;
    ct_error err;
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_gather_bytes(comm, view.buf, (size_t)view.len, &gathered, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    PyBuffer_Release(&view);
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *list = split(&gathered, comm->world_size);
    ct_gathered_fini(&gathered);
    return list;
}

/* The root's length on every rank, or -1 with an exception. */
static Py_ssize_t
agree_on_length(ctpy_state *state, PyObject *op, Py_ssize_t length, int root)
{
    int64_t n = length;
    const ct_request request = {
        .what = CT_BROADCAST, .root = root, .in = {&n, 1, CT_I64}
    };
    return ctpy_comm_run(state, op, &request) < 0 ? -1 : (Py_ssize_t)n;
}

/* Sends the bytes of `view` on the root; elsewhere view is NULL. */
static PyObject *
broadcast(PyObject *op, const Py_buffer *view, int root)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const Py_ssize_t n = agree_on_length(state, op, view == NULL ? 0 : view->len, root);
    PyObject *made =
        n < 0 ? NULL : PyBytes_FromStringAndSize(view == NULL ? NULL : view->buf, n);
    if (made == NULL) {
        return NULL;
    }
    const ct_request request = {
        .what = CT_BROADCAST,
        .root = root,
        .in = {PyBytes_AS_STRING(made), (size_t)n, CT_U8},
    };
    if (n > 0 && ctpy_comm_run(state, op, &request) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

const char Communicator_broadcast_bytes_doc[] =
    "broadcast_bytes($self, data, root=0)\n--\n\n"
    "Return the bytes of rank root on every rank; data of the others is not looked at.";

PyObject *
Communicator_broadcast_bytes(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "root", NULL};
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), op);
    PyObject *data;
    Py_buffer view;
    int root = 0;
    if (comm == NULL || !PyArg_ParseTupleAndKeywords(
                            args, kwargs, "O|i:broadcast_bytes", names, &data, &root)) {
        return NULL;
    }
    if (comm->rank != root) {
        return broadcast(op, NULL, root);
    }
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *made = broadcast(op, &view, root);
    PyBuffer_Release(&view);
    return made;
}
