/* Functions of the module that make ranks alike, or find out whether they are: tensors
 * become one rank's or the sum of all, and lines of text are compared. */
#include "binding/comm/communicator.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"

/* ---- one rank's tensors for all -------------------------------------------------- */

/* Tensors to be broadcast: those in host memory first, then the others. */
typedef struct placed_spans {
    size_t n, n_host;
    ct_span *spans;
    ctpy_target *targets;
} placed_spans;

static int
read_spans(ctpy_state *state, PyObject *tensors, placed_spans *all)
{
    size_t end = all->n;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *op = PyTuple_GET_ITEM(tensors, i);
        char text[40];
        (void)PyOS_snprintf(text, sizeof text, "tensor %zd", i);
        const ctpy_place place = {.what = text, .group = -1};
        ctpy_view view;
        ctpy_target target;
        if (ctpy_view_anywhere(state, op, &place, &view) < 0 ||
            ctpy_target_of(state, op, &place, &view, &target) < 0) {
            return -1;
        }
        if (view.readonly) {
            return ctpy_reject_readonly(text);
        }
        const size_t at = target.device == &ct_device_cpu ? all->n_host++ : --end;
        all->spans[at] = view.span;
        all->targets[at] = target;
    }
    return 0;
}

/* Behind what torch has enqueued on the device, whose stream waits in place of the
 * host. */
static ct_status
run_on_device(ct_comm *comm, const ct_request *request, const ctpy_target *target,
              ct_error *err)
{
    int ordinal = target->ordinal;
    ct_staged staged;
    ct_error unused;
    ct_comm *there = ctpy_comm_at(comm, target, &staged);
    ct_status status = ct_device_switch(target->device, &ordinal, err);
    if (status != CT_OK) {
        return status;
    }
    status = ct_comm_enqueue(there, request, target->stream, err);
    (void)ct_device_switch(target->device, &ordinal, &unused);
    ct_staged_fini(&staged);
    return status;
}

static ct_status
broadcast_on_device(ct_comm *comm, const ct_span *span, const ctpy_target *target,
                    int root, ct_error *err)
{
    const ct_span bytes = {span->data, span->n * ct_dtype_size(span->dtype), CT_U8};
    const ct_request request = {.what = CT_BROADCAST, .root = root, .in = bytes};
    return run_on_device(comm, &request, target, err);
}

static int
broadcast_spans(ctpy_state *state, PyObject *communicator, const placed_spans *all,
                int root)
{
    ct_comm *comm = ctpy_comm_borrow(state, communicator);
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    PyThreadState *thread = ctpy_comm_enter(communicator);
    ct_status status =
        ct_comm_broadcast_spans(comm, all->spans, all->n_host, root, &err);
    for (size_t i = all->n; status == CT_OK && i-- > all->n_host;) {
        status =
            broadcast_on_device(comm, &all->spans[i], &all->targets[i], root, &err);
    }
    ctpy_comm_leave(communicator, thread);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_broadcast_sequence(ctpy_state *state, PyObject *communicator, PyObject *tensors,
                        int root)
{
    /* A tuple keeps the tensors alive while the GIL is released. */
    PyObject *all = PySequence_Tuple(tensors);
    int result = all == NULL ? -1 : 0;
    if (all != NULL && PyTuple_GET_SIZE(all) > 0) {
        placed_spans found = {.n = (size_t)PyTuple_GET_SIZE(all)};
        found.spans = ct_calloc(found.n, sizeof *found.spans);
        found.targets = ct_calloc(found.n, sizeof *found.targets);
        result = -1;
        if (found.spans == NULL || found.targets == NULL) {
            PyErr_NoMemory();
        }
        else if (read_spans(state, all, &found) == 0) {
            result = broadcast_spans(state, communicator, &found, root);
        }
        ct_free(found.spans);
        ct_free(found.targets);
    }
    Py_XDECREF(all);
    return result;
}

static const char ctpy_broadcast_tensors_doc[] =
    "broadcast_tensors($module, communicator, tensors, root=0, /)\n--\n\n"
    "Replace the elements of all tensors, of any dtype, by those of rank root.\n\n"
    "tensors: a sequence of tensors or arrays without gaps, with the same lengths,\n"
    "dtypes and kinds of device on every rank. Short ones in host memory travel\n"
    "together.\n\n"
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

/* ---- sums of all ranks ----------------------------------------------------------- */

static const char ctpy_sum_tensor_doc[] =
    "sum_tensor($module, communicator, tensor, /)\n--\n\n"
    "Replace the elements of a tensor by their sums over all ranks.\n\n"
    "tensor: a tensor or array without gaps, of one length, dtype and kind of device "
    "on\n"
    "every rank. On a GPU for whose memory the group has NCCL, the stream waits for "
    "the\n"
    "sums in place of the host.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

static PyObject *
ctpy_sum_tensor(PyObject *module, PyObject *args)
{
    ctpy_state *state = PyModule_GetState(module);
    const ctpy_place place = {.what = "tensor", .group = -1};
    PyObject *communicator, *tensor;
    ctpy_target target;
    ctpy_view view;
    ct_error err;
    if (!PyArg_ParseTuple(args, "OO:sum_tensor", &communicator, &tensor) ||
        ctpy_view_anywhere(state, tensor, &place, &view) < 0 ||
        ctpy_target_of(state, tensor, &place, &view, &target) < 0) {
        return NULL;
    }
    if (view.readonly) {
        (void)ctpy_reject_readonly("tensor");
        return NULL;
    }
    ct_comm *comm = ctpy_comm_borrow(state, communicator);
    if (comm == NULL) {
        return NULL;
    }
    const ct_request request = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = view.span};
    PyThreadState *thread = ctpy_comm_enter(communicator);
    const ct_status status = target.device == &ct_device_cpu
                                 ? ct_comm_run(comm, &request, &err)
                                 : run_on_device(comm, &request, &target, &err);
    ctpy_comm_leave(communicator, thread);
    return status == CT_OK ? Py_NewRef(Py_None) : ctpy_raise(&err);
}

/* ---- lines that all ranks have to have ------------------------------------------- */

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

PyMethodDef ctpy_comm_alike_functions[] = {
    {"broadcast_tensors", ctpy_broadcast_tensors, METH_VARARGS,
     ctpy_broadcast_tensors_doc                                                    },
    {"check_ranks_agree", ctpy_check_ranks_agree, METH_VARARGS,
     ctpy_check_ranks_agree_doc                                                    },
    {"sum_tensor",        ctpy_sum_tensor,        METH_VARARGS, ctpy_sum_tensor_doc},
    {NULL,                NULL,                   0,            NULL               },
};
