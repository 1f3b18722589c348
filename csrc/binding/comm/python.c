/* A group over a Python object, such as torch's process groups.
 *
 * A ct_comm is called without the GIL; each entry holds the GIL while the backend
 * works. Buffers are passed as memoryviews, so the backend makes arrays without a copy.
 */
#include "binding/comm/communicator.h"

#include "core/base/alloc.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct python_comm {
    ct_comm base; /* first: a ct_comm * of ours is a python_comm * */
    PyObject *backend;
    bool compares; /* all ranks' requests before each collective */
} python_comm;

struct ct_work {
    PyObject *handle;
    ct_request request; /* for messages */
};

/* The status of the exception that is set, and its text: bad arguments are CT_EINVAL;
 * an interruption and a lack of memory stay set, to be raised unchanged. */
static ct_status
failed(const ct_comm *comm, const ct_request *request, ct_error *err)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return ct_fail(err, CT_EHOST, "the backend was interrupted");
    }
    const ct_status code = PyErr_ExceptionMatches(PyExc_TypeError) ||
                                   PyErr_ExceptionMatches(PyExc_ValueError)
                               ? CT_EINVAL
                               : CT_ECOMM;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    const char *said = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const ct_status status =
        ct_fail(err, code, "%s on rank %d of %d: %s", ct_collective_name(request->what),
                ct_rank_called(&comm->names, comm->rank), comm->names.of,
                said == NULL ? "the backend failed and gave no reason" : said);
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(trace);
    Py_XDECREF(value);
    Py_XDECREF(type);
    return status;
}

static PyObject *
view_of(const ct_span *span)
{
    static char nothing[1];
    char *data = span->n == 0 ? nothing : span->data;
    const size_t bytes = span->n * ct_dtype_size(span->dtype);
    return PyMemoryView_FromMemory(data, (Py_ssize_t)bytes, PyBUF_WRITE);
}

static PyObject *
begin(const python_comm *comm, const ct_request *r)
{
    PyObject *out = view_of(&r->out), *in = view_of(&r->in), *handle = NULL;
    if (out != NULL && in != NULL) {
        handle = PyObject_CallMethod(
            comm->backend, "begin", "sOOssi", ct_collective_name(r->what), out, in,
            ct_dtype_name(r->in.dtype), ct_reduce_op_name(r->op), r->root);
    }
    Py_XDECREF(in);
    Py_XDECREF(out);
    return handle;
}

static ct_status
finish_steal(const ct_comm *comm, const ct_request *request, PyObject *handle,
             ct_error *err)
{
    PyObject *answer = PyObject_CallMethod(handle, "wait", NULL);
    ct_status status = answer == NULL ? failed(comm, request, err) : CT_OK;
    Py_XDECREF(answer);
    Py_DECREF(handle);
    return status;
}

/* Without comparison a backend would hang, or mix up the data of different collectives.
 */
static ct_status
compare(const ct_comm *comm, const ct_request *request, ct_error *err)
{
    python_comm plain = *(const python_comm *)comm;
    if (!plain.compares) {
        return CT_OK;
    }
    const ct_request own = ct_request_labelled(comm, request);
    plain.compares = false; /* the requests' own exchange is alike on all ranks */
    return ct_requests_exchange(&plain.base, &own, err);
}

/* The start of a collective, with the GIL: the handle, or NULL with *status and *err.
 */
static PyObject *
begin_checked(ct_comm *comm, const ct_request *request, ct_status *status,
              ct_error *err)
{
    *status = compare(comm, request, err);
    if (*status == CT_OK) {
        *status = ct_request_check(request, comm->world_size, err);
    }
    if (*status != CT_OK) {
        return NULL;
    }
    PyObject *handle = begin((python_comm *)comm, request);
    if (handle == NULL) {
        *status = failed(comm, request, err);
    }
    return handle;
}

static ct_status
python_run(ct_comm *comm, const ct_request *request, ct_error *err)
{
    ct_status status = ct_comm_check_here(comm, ct_collective_name(request->what), err);
    if (status != CT_OK) {
        return status;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *handle = begin_checked(comm, request, &status, err);
    if (handle != NULL) {
        status = finish_steal(comm, request, handle, err);
    }
    PyGILState_Release(gil);
    return status;
}

static ct_status
python_start(ct_comm *comm, const ct_request *request, ct_work **work, ct_error *err)
{
    ct_status status = ct_comm_check_here(comm, ct_collective_name(request->what), err);
    if (status != CT_OK) {
        return status;
    }
    ct_work *made = ct_alloc(sizeof *made);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to begin a collective");
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    *made = (ct_work){begin_checked(comm, request, &status, err), *request};
    PyGILState_Release(gil);
    if (status != CT_OK) {
        ct_free(made);
        return status;
    }
    *work = made;
    return CT_OK;
}

static ct_status
python_wait(ct_comm *comm, ct_work *work, ct_error *err)
{
    const ct_status here =
        ct_comm_check_here(comm, ct_collective_name(work->request.what), err);
    if (here != CT_OK) {
        return here;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    ct_status status = finish_steal(comm, &work->request, work->handle, err);
    PyGILState_Release(gil);
    ct_free(work);
    return status;
}

/* int(backend.name); -1 with an exception. */
static int
read_count(PyObject *backend, const char *name)
{
    PyObject *value = PyObject_GetAttrString(backend, name);
    const long number = value == NULL ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    return number > INT_MAX || number < 0 ? -1 : (int)number;
}

int
ctpy_comm_wants_comparison(void)
{
    static const char *const words[][2] = {
        {"0",     "1"   },
        {"false", "true"},
        {"no",    "yes" },
        {"off",   "on"  },
        {"",      "1"   },
    };
    const char *wish = getenv("CTRAINER_CHECK_COLLECTIVES");
    for (size_t i = 0; wish != NULL && i < sizeof words / sizeof *words; i++) {
        for (int wants = 0; wants < 2; wants++) {
            if (strcasecmp(wish, words[i][wants]) == 0) {
                return wants;
            }
        }
    }
    if (wish != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "the environment variable CTRAINER_CHECK_COLLECTIVES is '%s'; "
                     "expected 1, true, yes or on to compare what ranks call, 0, "
                     "false, no or off, or nothing, not to",
                     wish);
        return -1;
    }
    return 0;
}

static ct_comm *
new_over(const ct_comm_ops *ops, PyObject *backend)
{
    const int world_size = read_count(backend, "world_size");
    const int rank = world_size < 0 ? -1 : read_count(backend, "rank");
    if (world_size < 1 || rank < 0 || rank >= world_size) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError,
                         "the backend's rank is %d and its world_size %d; expected "
                         "0 <= rank < world_size",
                         rank, world_size);
        }
        return NULL;
    }
    const int compares = ctpy_comm_wants_comparison();
    python_comm *made = compares < 0 ? NULL : ct_alloc(sizeof *made);
    if (made == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        return NULL;
    }
    *made = (python_comm){
        .base = ct_comm_made(ops, rank, world_size),
        .backend = Py_NewRef(backend),
        .compares = compares > 0,
    };
    return &made->base;
}

/* A communicator over the result of backend.make_group(ranks). */
static ct_comm *
make_group(const python_comm *self, const ct_members *members)
{
    PyObject *ranks = PyList_New(members->n), *made = NULL;
    ct_comm *comm = NULL;
    for (int i = 0; ranks != NULL && i < members->n; i++) {
        PyObject *rank = PyLong_FromLong(members->ranks[i]);
        if (rank == NULL) {
            Py_CLEAR(ranks);
            break;
        }
        PyList_SET_ITEM(ranks, i, rank);
    }
    if (ranks != NULL) {
        made = PyObject_CallMethod(self->backend, "make_group", "O", ranks);
    }
    if (made != NULL) {
        comm = new_over(self->base.ops, made);
    }
    Py_XDECREF(made);
    Py_XDECREF(ranks);
    return comm;
}

static ct_status
python_group(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    if (members->n < 2) {
        return CT_OK;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    *made = make_group((python_comm *)comm, members);
    ct_status status = CT_OK;
    if (*made == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        status = ct_fail(err, CT_EINVAL,
                         "this backend cannot be split: it has no make_group(ranks)");
    }
    else if (*made == NULL) {
        status = ct_fail(err, CT_EHOST, "the backend made no group");
    }
    PyGILState_Release(gil);
    return status;
}

/* A forked child never releases the backend: the destruction of torch's process groups
 * and of MPI waits for threads and peers that only the parent has. */
static void
python_free(ct_comm *comm)
{
    if (ct_comm_is_here(comm)) {
        const PyGILState_STATE gil = PyGILState_Ensure();
        Py_CLEAR(((python_comm *)comm)->backend);
        PyGILState_Release(gil);
    }
    ct_free(comm);
}

static const ct_comm_ops python_ops = {
    .name = "python",
    .run = python_run,
    .start = python_start,
    .wait = python_wait,
    .group = python_group,
    .free = python_free,
};

ct_comm *
ctpy_comm_python_new(PyObject *backend)
{
    return new_over(&python_ops, backend);
}
