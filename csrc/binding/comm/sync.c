/* Module functions that make ranks alike, or find out whether they are. */
#include "binding/comm/sync.h"

#include "binding/comm/communicator.h"
#include "core/base/alloc.h"
#include "core/comm/sync.h"

static int
read_spans(ctpy_state *state, PyObject *tensors, ct_span *spans)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        char text[40];
        (void)PyOS_snprintf(text, sizeof text, "tensor %zd", i);
        if (ctpy_comm_span(state, NULL, PyTuple_GET_ITEM(tensors, i), text, &spans[i]) <
            0) {
            return -1;
        }
    }
    return 0;
}

static int
broadcast(ctpy_state *state, PyObject *communicator, const ct_span *spans, size_t n,
          int root)
{
    ct_comm *comm = ctpy_comm_borrow(state, communicator);
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    PyThreadState *thread = ctpy_comm_enter(communicator);
    const ct_status status = ct_comm_broadcast_spans(comm, spans, n, root, &err);
    ctpy_comm_leave(communicator, thread);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_broadcast_sequence(ctpy_state *state, PyObject *communicator, PyObject *tensors,
                        int root)
{
    PyObject *all = PySequence_Tuple(tensors);
    int result = all == NULL ? -1 : 0;
    if (all != NULL && PyTuple_GET_SIZE(all) > 0) {
        const size_t n = (size_t)PyTuple_GET_SIZE(all);
        ct_span *spans = ct_calloc(n, sizeof *spans);
        if (spans == NULL) {
            PyErr_NoMemory();
        }
        result = spans == NULL || read_spans(state, all, spans) < 0
                     ? -1
                     : broadcast(state, communicator, spans, n, root);
        ct_free(spans);
    }
    Py_XDECREF(all);
    return result;
}

static const char ctpy_broadcast_tensors_doc[] =
    "broadcast_tensors($module, communicator, tensors, root=0, /)\n--\n\n"
    "Replace the elements of all tensors, of any dtype, by those of rank root.\n\n"
    "tensors: a sequence of tensors or arrays without gaps in host memory, with the\n"
    "same lengths and dtypes on every rank. Short ones travel together.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

static PyObject *
ctpy_broadcast_tensors(PyObject *module, PyObject *args)
{
    PyObject *communicator, *tensors;
    int root = 0;
    return PyArg_ParseTuple(args, "OO|i:broadcast_tensors", &communicator, &tensors,
                            &root) &&
                   ctpy_broadcast_sequence(PyModule_GetState(module), communicator,
                                           tensors, root) == 0
               ? Py_NewRef(Py_None)
               : NULL;
}

static const char ctpy_check_ranks_agree_doc[] =
    "check_ranks_agree($module, communicator, what, lines, /)\n--\n\n"
    "Raise ValueError on every rank unless all have the same lines.\n\n"
    "what: the kind of thing that a line describes, for the message, which names the\n"
    "first line that differs and whose it is. lines: a str of lines, each ended.";

static PyObject *
ctpy_check_ranks_agree(PyObject *module, PyObject *args)
{
    PyObject *communicator;
    const char *what, *lines;
    Py_ssize_t n;
    ct_error err;
    if (!PyArg_ParseTuple(args, "Oss#:check_ranks_agree", &communicator, &what, &lines,
                          &n)) {
        return NULL;
    }
    ct_comm *comm = ctpy_comm_borrow(PyModule_GetState(module), communicator);
    if (comm == NULL) {
        return NULL;
    }
    PyThreadState *thread = ctpy_comm_enter(communicator);
    const ct_status status = ct_comm_check_lines(comm, what, lines, (size_t)n, &err);
    ctpy_comm_leave(communicator, thread);
    return status == CT_OK ? Py_NewRef(Py_None) : ctpy_raise(&err);
}

PyMethodDef ctpy_comm_sync_functions[] = {
    {"broadcast_tensors", ctpy_broadcast_tensors, METH_VARARGS,
     ctpy_broadcast_tensors_doc                                     },
    {"check_ranks_agree", ctpy_check_ranks_agree, METH_VARARGS,
     ctpy_check_ranks_agree_doc                                     },
    {NULL,                NULL,                   0,            NULL},
};
