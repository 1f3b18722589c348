/* Communicator: parts of different lengths. */
#include "binding/runtime/buffer.h"
#include "binding/comm/communicator.h"

#include "core/base/alloc.h"
#include "core/comm/padded.h"

static int
views_of(ctpy_state *state, PyObject *out, PyObject *in, ct_span spans[2])
{
    ctpy_view view;
    if (ctpy_view_of(state, in, &(ctpy_place){.what = "in_", .group = -1}, &view) < 0) {
        return -1;
    }
    spans[1] = view.span;
    if (ctpy_view_of(state, out, &(ctpy_place){.what = "out", .group = -1}, &view) <
        0) {
        return -1;
    }
    if (view.readonly) {
        PyErr_SetString(PyExc_ValueError,
                        "out is read-only; a collective writes into it");
        return -1;
    }
    spans[0] = view.span;
    return 0;
}

static PyObject *
list_of(const int64_t *lengths, int n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t r = 0; list != NULL && r < n; r++) {
        PyObject *length = PyLong_FromLongLong(lengths[r]);
        if (length == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, r, length);
        }
    }
    return list;
}

static PyObject *
gather(PyObject *op, ct_comm *comm, const ct_span spans[2])
{
    int64_t *lengths = ct_calloc((size_t)comm->world_size, sizeof *lengths);
    ct_status status;
    ct_error err;
    if (lengths == NULL) {
        return PyErr_NoMemory();
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_gather_padded(comm, &spans[0], &spans[1], lengths, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    PyObject *list =
        status == CT_OK ? list_of(lengths, comm->world_size) : ctpy_raise(&err);
    ct_free(lengths);
    return list;
}

const char Communicator_all_gather_padded_doc[] =
    "all_gather_padded($self, out, in_)\n--\n\n"
    "Gather parts of different lengths; return the lengths, a list in rank order.\n"
    "\n"
    "in_: a tensor or array of this rank's length. out: of the same dtype, with a "
    "part\n"
    "for every rank that is as long as the longest in_, or longer; behind a shorter\n"
    "in_, a part of out is filled with zeros. They do not overlap.\n"
    "\n"
    "Raises ValueError on every rank where the operands of one do not fit.";

PyObject *
Communicator_all_gather_padded(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"out", "in_", NULL};
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *out, *in;
    ct_span spans[2];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:all_gather_padded", names, &out,
                                     &in) ||
        views_of(state, out, in, spans) < 0) {
        return NULL;
    }
    ct_comm *comm = ctpy_comm_borrow(state, op);
    return comm == NULL ? NULL : gather(op, comm, spans);
}
