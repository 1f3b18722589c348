/* Communicator: its collectives, run or begun. */
#include "binding/runtime/buffer.h"
#include "binding/comm/communicator.h"
#include "core/comm/history.h"

#include <stdbool.h>
#include <string.h>

/* ---- running a request -------------------------------------------------------------
 */

int
ctpy_comm_run(ctpy_state *state, PyObject *op, const ct_request *request)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_run(comm, request, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_comm_reduce_numbers(ctpy_state *state, PyObject *op, const ct_label *label,
                         double *numbers, size_t n, ct_reduce_op how)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    if (label != NULL) {
        ct_comm_label(comm, label, CT_ALL_REDUCE);
    }
    status = ct_comm_reduce_numbers(comm, numbers, n, how, &err);
    ct_comm_unlabel(comm);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Waits for work that nobody can be given, and leaves the exception that says so. */
static void
abandon(PyObject *op, ct_comm *comm, ct_work *work)
{
    PyObject *type, *value, *trace;
    ct_error err;
    PyErr_Fetch(&type, &value, &trace);
    if (ct_comm_wait(comm, work, &err) != CT_OK) {
        (void)ctpy_raise(&err);
        PyErr_WriteUnraisable(op);
    }
    PyErr_Restore(type, value, trace);
}

static PyObject *
start(ctpy_state *state, PyObject *op, const ct_request *request, PyObject *tensors)
{
    ct_comm *comm = ctpy_comm_borrow(state, op);
    ct_work *work = NULL;
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return NULL;
    }
    ((Communicator *)op)->busy++;
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_start(comm, request, &work, &err);
    Py_END_ALLOW_THREADS((Communicator *)op)
    ->busy--;
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *made = ctpy_work_new(state, op, tensors, work);
    if (made == NULL) {
        abandon(op, comm, work);
    }
    return made;
}

/* Fills *span from a tensor or array that the result is written into. */
static int
span_of(ctpy_state *state, const ct_comm *comm, PyObject *op, const char *what,
        ct_span *span)
{
    const ctpy_place place = {.what = what, .group = -1};
    ctpy_view view;
    const int found = comm->ops->takes_device_memory
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

static int
op_of(const char *name, ct_reduce_op *op)
{
    static const struct {
        const char *name;
        ct_reduce_op op;
    } ops[] = {
        {"sum",  CT_REDUCE_SUM },
        {"mean", CT_REDUCE_MEAN},
        {"max",  CT_REDUCE_MAX },
        {"min",  CT_REDUCE_MIN },
    };
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        if (strcmp(ops[i].name, name) == 0) {
            *op = ops[i].op;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op is '%s'; expected sum, mean, max or min", name);
    return -1;
}

/* Runs the request on one tensor or two, or begins it. */
static PyObject *
collect(PyObject *op, ct_request *request, PyObject *out, PyObject *in, int begins)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const ct_comm *comm = ctpy_comm_borrow(state, op);
    if (comm == NULL ||
        span_of(state, comm, in, out == NULL ? "tensor" : "in_", &request->in) < 0 ||
        (out != NULL && span_of(state, comm, out, "out", &request->out) < 0)) {
        return NULL;
    }
    if (!begins) {
        return ctpy_comm_run(state, op, request) < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *tensors = PyTuple_Pack(2, in, out == NULL ? Py_None : out);
    PyObject *work = tensors == NULL ? NULL : start(state, op, request, tensors);
    Py_XDECREF(tensors);
    return work;
}

/* What a collective of tensors is called with: an op where it reduces, and `out` where
 * that is not `in`. */
typedef struct signature {
    ct_collective what;
    const char *format;
    char *names[5];
    bool has_out, reduces;
} signature;

static int
parse(PyObject *args, PyObject *kwargs, signature *s, PyObject **out, PyObject **in,
      const char **reduce, int *begins)
{
    if (!s->has_out) {
        return PyArg_ParseTupleAndKeywords(args, kwargs, s->format, s->names, in,
                                           reduce, begins);
    }
    return s->reduces ? PyArg_ParseTupleAndKeywords(args, kwargs, s->format, s->names,
                                                    out, in, reduce, begins)
                      : PyArg_ParseTupleAndKeywords(args, kwargs, s->format, s->names,
                                                    out, in, begins);
}

static PyObject *
parse_and_collect(PyObject *op, PyObject *args, PyObject *kwargs, signature s)
{
    ct_request request = {.what = s.what};
    PyObject *out = NULL, *in = NULL;
    const char *reduce = "sum";
    int begins = false;
    if (!parse(args, kwargs, &s, &out, &in, &reduce, &begins) ||
        op_of(reduce, &request.op) < 0) {
        return NULL;
    }
    return collect(op, &request, out, in, begins);
}

/* ---- the collectives ---------------------------------------------------------------
 */

const char Communicator_all_reduce_doc[] =
    "all_reduce($self, tensor, op='sum', *, async_op=False)\n--\n\n"
    "Replace the elements of tensor by their sum, mean, max or min over all "
    "ranks.\n\n"
    "tensor: a tensor or array without gaps in host memory, of the same "
    "length and\ndtype on every rank; float64, float32, bfloat16, float16, "
    "int64 and what else\nthe backend has. async_op: return a CollectiveWork "
    "at once.\n\n"
    "Raises ValueError for operands that do not fit, RuntimeError naming the\n"
    "collective and the rank when other ranks fail or stay away.";

PyObject *
Communicator_all_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return parse_and_collect(op, args, kwargs,
                             (signature){
                                 CT_ALL_REDUCE,
                                 "O|s$p:all_reduce",
                                 {"tensor", "op", "async_op", NULL},
                                 false,
                                 true
    });
}

const char Communicator_all_gather_doc[] =
    "all_gather($self, out, in_, *, async_op=False)\n--\n\n"
    "Fill out with in_ of every rank, in rank order: world_size times as long.";

PyObject *
Communicator_all_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return parse_and_collect(op, args, kwargs,
                             (signature){
                                 CT_ALL_GATHER,
                                 "OO|$p:all_gather",
                                 {"out", "in_", "async_op", NULL},
                                 true,
                                 false
    });
}

const char Communicator_reduce_scatter_doc[] =
    "reduce_scatter($self, out, in_, op='sum', *, async_op=False)\n--\n\n"
    "Reduce in_ over all ranks and keep this rank's part, len(in_) / "
    "world_size.";

PyObject *
Communicator_reduce_scatter(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return parse_and_collect(op, args, kwargs,
                             (signature){
                                 CT_REDUCE_SCATTER,
                                 "OO|s$p:reduce_scatter",
                                 {"out", "in_", "op", "async_op", NULL},
                                 true,
                                 true
    });
}

const char Communicator_all_to_all_doc[] =
    "all_to_all($self, out, in_, *, async_op=False)\n--\n\n"
    "Send part r of in_ to rank r, and receive its part for this rank as part "
    "r of\nout. Both have a part of the same length for every rank.";

PyObject *
Communicator_all_to_all(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return parse_and_collect(op, args, kwargs,
                             (signature){
                                 CT_ALL_TO_ALL,
                                 "OO|$p:all_to_all",
                                 {"out", "in_", "async_op", NULL},
                                 true,
                                 false
    });
}

const char Communicator_broadcast_doc[] =
    "broadcast($self, tensor, root=0, *, async_op=False)\n--\n\n"
    "Replace the elements of tensor by those of rank root.";

PyObject *
Communicator_broadcast(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor", "root", "async_op", NULL};
    ct_request request = {.what = CT_BROADCAST};
    PyObject *tensor;
    int begins = false;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|i$p:broadcast", names, &tensor,
                                       &request.root, &begins)
               ? collect(op, &request, NULL, tensor, begins)
               : NULL;
}

const char Communicator_reduce_doc[] =
    "reduce($self, tensor, root=0, op='sum', *, async_op=False)\n--\n\n"
    "On rank root replace the elements of tensor by their sum, mean, max or min over\n"
    "all ranks. What the other ranks' tensors hold afterwards is not said.";

PyObject *
Communicator_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor", "root", "op", "async_op", NULL};
    ct_request request = {.what = CT_REDUCE};
    PyObject *tensor;
    const char *how = "sum";
    int begins = false;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|is$p:reduce", names, &tensor,
                                       &request.root, &how, &begins) &&
                   op_of(how, &request.op) == 0
               ? collect(op, &request, NULL, tensor, begins)
               : NULL;
}

const char Communicator_barrier_doc[] =
    "barrier($self, /)\n--\n\nWait until every rank has come.";

PyObject *
Communicator_barrier(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const ct_request request = {.what = CT_BARRIER};
    return ctpy_comm_run(ctpy_state_borrow(op), op, &request) < 0 ? NULL
                                                                  : Py_NewRef(Py_None);
}
