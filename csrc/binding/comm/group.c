/* A Communicator as the rest of the binding uses it, and the makers of communicators:
 * over shared memory, hierarchical, a device's plugin, or a Python object such as
 * torch's process groups. Below the type's methods, since other files need a group and
 * no methods. */
#include "binding/comm/communicator.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "core/comm/hierarchical.h"
#include "core/comm/shm.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- collectives without the GIL ------------------------------------------------- */

ct_comm *
ctpy_comm_reject(ctpy_state *state, PyObject *op)
{
    if (PyObject_TypeCheck(op, state->Communicator)) {
        PyErr_SetString(PyExc_ValueError,
                        "this Communicator has been closed, by close() or by a "
                        "training that failed on this rank: make a new one, and anew "
                        "what was made with it, such as sharded modules");
    }
    else {
        PyErr_Format(PyExc_TypeError, "expected a ctrainer.Communicator, got a %.200s",
                     Py_TYPE(op)->tp_name);
    }
    return NULL;
}

/* The count comes first: close() must not run between the two. */
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
    /* The label is the caller's, perhaps on the stack. */
    ct_comm_unlabel(comm);
    ctpy_comm_leave(op, thread);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Torch's stream has the work on the tensor; the group's may be another. */
static int
follow_torch(ctpy_state *state, const ct_comm *comm, const ctpy_view *view)
{
    void *stream;
    ct_error err;
    if (comm == NULL || view->memory == CTPY_DL_CPU) {
        return 0;
    }
    if (ctpy_current_stream(state, view->memory, view->ordinal, &stream) < 0) {
        return -1;
    }
    return ct_comm_follow((ct_comm *)comm, stream, &err) == CT_OK
               ? 0
               : ctpy_raise_int(&err);
}

int
ctpy_reject_readonly(const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s is read-only; a collective writes into it",
                 what);
    return -1;
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
    if (found < 0 || ctpy_device_of(state, op, &place, &view) == NULL) {
        return -1;
    }
    /* Collectives write in place, and the array may be a mapping without write
     * access. */
    if (view.readonly) {
        return ctpy_reject_readonly(what);
    }
    *span = view.span;
    return follow_torch(state, comm, &view);
}

ct_comm *
ctpy_comm_at(ct_comm *comm, const ctpy_target *target, ct_staged *staged)
{
    ct_comm *found = ctpy_comm_for(comm, target);
    ct_staged_init(staged, comm, target->device, target->stream);
    return found != NULL ? found : &staged->base;
}

/* ---- the beginning and the end of a group ---------------------------------------- */

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
        ctpy_comm_free(comm->on_gpu);
        ct_history_free(comm->history);
        Py_BEGIN_ALLOW_THREADS /* NCCL's waits for the device */
        comm->ops->free(comm);
        Py_END_ALLOW_THREADS
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

/* ---- a group over a Python object ------------------------------------------------ */

/* The ct_comm is called without the GIL; each entry holds the GIL while the backend
 * works. Buffers are passed as memoryviews, so the backend makes arrays without a copy.
 */

typedef struct python_comm {
    ct_comm base; /* first: a ct_comm * of ours is a python_comm * */
    PyObject *backend;
    bool compares; /* all ranks' requests before each collective */
    bool notes;    /* the backend has note_request() */
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
    /* Python's words for a wrong argument; all else is the network's or the backend's
     * failure. */
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
    /* Raised again from the status, after the GIL has been released and taken. */
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
    /* PyMemoryView_FromMemory rejects NULL, the address of an empty span. */
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

/* What backend.note_request() gets: the same bytes on all ranks that call alike, so
 * without addresses and with zeros between the fields. */
typedef struct noted {
    ct_rank_names names;
    ct_request request;
} noted;

static int
note(const python_comm *comm, const ct_request *request)
{
    const ct_request r = ct_request_labelled(&comm->base, request);
    noted n;
    memset(&n, 0, sizeof n);
    n.names = comm->base.names;
    n.request.what = r.what;
    n.request.op = r.op;
    n.request.root = r.root;
    n.request.in.n = r.in.n;
    n.request.in.dtype = r.in.dtype;
    n.request.out.n = r.out.n;
    n.request.out.dtype = r.out.dtype;
    n.request.label.tag = r.label.tag;
    n.request.label.call = r.label.call;
    memcpy(n.request.label.name, r.label.name, sizeof r.label.name);
    n.request.label.is_step = r.label.is_step;
    PyObject *answer = PyObject_CallMethod(comm->backend, "note_request", "y#",
                                           (const char *)&n, (Py_ssize_t)sizeof n);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static const ct_request *
noted_at(const void *group, int rank)
{
    const void *bytes = PyBytes_AS_STRING(PyList_GET_ITEM((PyObject *)group, rank));
    const noted *n = bytes;
    return &n->request;
}

static const char ctpy_compare_requests_doc[] =
    "compare_requests($module, requests, /)\n--\n\n"
    "Compare what a backend's note_request() got on all ranks: a list of bytes, by "
    "rank.\n\n"
    "Raises ValueError where ranks have called for different collectives; the message "
    "names\nthe ranks and what they called.";

static PyObject *
ctpy_compare_requests(PyObject *Py_UNUSED(module), PyObject *requests)
{
    const Py_ssize_t n = PyList_Check(requests) ? PyList_GET_SIZE(requests) : 0;
    bool are_noted = n != 0;
    for (Py_ssize_t i = 0; are_noted && i < n; i++) {
        PyObject *each = PyList_GET_ITEM(requests, i);
        are_noted =
            PyBytes_Check(each) && PyBytes_GET_SIZE(each) == (Py_ssize_t)sizeof(noted);
    }
    if (!are_noted) {
        PyErr_SetString(PyExc_TypeError, "expected a list of what note_request() got");
        return NULL;
    }
    noted first;
    ct_error err;
    memcpy(&first, PyBytes_AS_STRING(PyList_GET_ITEM(requests, 0)), sizeof first);
    if (ct_requests_compare(noted_at, requests, (int)n, &first.names, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
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
    const python_comm *self = (const python_comm *)comm;
    PyObject *handle =
        self->notes && note(self, request) < 0 ? NULL : begin(self, request);
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
    /* Behind the check: a forked child must not run the backend's code at all. */
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
    /* Before the collective begins: a failure after that would leave the other ranks
     * waiting. */
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
        .notes = PyObject_HasAttrString(backend, "note_request") != 0,
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
        /* Of the same table, so the smaller group can be split again. */
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

/* ---- module functions: shared memory, hierarchical, a device ----------------------
 */

static const char ctpy_shared_memory_communicator_doc[] =
    "shared_memory_communicator($module, key, rank, world_size, timeout_seconds, "
    "/)\n--\n\n"
    "Join the processes of one machine that give the same key; a Communicator.\n\n"
    "key: at most 255 bytes that no other group on the machine has at the time.\n"
    "rank: in [0, world_size); world_size: at most 1024. timeout_seconds: how long to\n"
    "wait for the others, now and in each collective.\n\n"
    "Raises ValueError for arguments that are out of range or that the ranks do not\n"
    "agree on, RuntimeError naming the rank that did not come, OSError.";

static PyObject *
ctpy_shared_memory_communicator(PyObject *module, PyObject *args)
{
    const char *key;
    int rank, world_size;
    double timeout_seconds;
    ct_comm *comm;
    ct_status status;
    ct_error err;
    if (!PyArg_ParseTuple(args, "siid:shared_memory_communicator", &key, &rank,
                          &world_size, &timeout_seconds)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_comm_shm_new(&comm, key, rank, world_size, timeout_seconds, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    ctpy_state *state = PyModule_GetState(module);
    return ctpy_communicator_steal(state->Communicator, comm);
}

static const char ctpy_hierarchical_communicator_doc[] =
    "hierarchical_communicator($module, inner, outer, whole, /)\n--\n\n"
    "A Communicator of all ranks over the group of each machine and one across.\n\n"
    "inner: this machine's ranks. outer: the ranks that have this one's place on "
    "their\n"
    "machines, in the machines' order. whole: all ranks, used to split the group. "
    "Ranks "
    "are\n"
    "numbered machine by machine, as many on each. The three are closed, and\n"
    "their groups used by the new one.\n\n"
    "Raises ValueError for groups that do not fit together, RuntimeError where one "
    "has\n"
    "collectives under way.";

/* Closes the Communicator; the group is the caller's. */
static ct_comm *
take(PyObject *op)
{
    Communicator *self = (Communicator *)op;
    ct_comm *comm = self->comm;
    self->comm = NULL;
    ct_history_free(comm->history);
    comm->history = NULL;
    return comm;
}

static int
check_free(ctpy_state *state, PyObject *op)
{
    if (ctpy_comm_borrow(state, op) == NULL) {
        return -1;
    }
    if (((Communicator *)op)->busy > 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a Communicator with collectives under way cannot be taken "
                        "over; wait for them first");
        return -1;
    }
    return 0;
}

static PyObject *
ctpy_hierarchical_communicator(PyObject *module, PyObject *args)
{
    ctpy_state *state = PyModule_GetState(module);
    PyObject *inner, *outer, *whole;
    ct_comm *comm = NULL;
    ct_error err;
    if (!PyArg_ParseTuple(args, "OOO:hierarchical_communicator", &inner, &outer,
                          &whole) ||
        check_free(state, inner) < 0 || check_free(state, outer) < 0 ||
        check_free(state, whole) < 0) {
        return NULL;
    }
    if (inner == outer || inner == whole || outer == whole) {
        PyErr_SetString(PyExc_ValueError,
                        "inner, outer and whole must be three groups");
        return NULL;
    }
    const int compares = ctpy_comm_wants_comparison();
    if (compares < 0) {
        return NULL;
    }
    return ct_comm_hierarchical_new_steal(&comm, take(inner), take(outer), take(whole),
                                          compares > 0, &err) == CT_OK
               ? ctpy_communicator_steal(state->Communicator, comm)
               : ctpy_raise(&err);
}

static const char ctpy_plugin_communicator_doc[] =
    "plugin_communicator($module, plugin, id, rank, world_size, stream,\n"
    "                    timeout_seconds, over=None, /)\n--\n\n"
    "Join the processes that give the same id; a Communicator on a GPU's memory.\n\n"
    "plugin: ctrainer._cuda.plugin. id: 128 bytes, of _cuda.comm_id() on one rank. "
    "rank:\nin [0, world_size). stream: the address of a CUDA stream of the current "
    "device, 0\nfor the default one, on which collectives are enqueued. "
    "timeout_seconds: how long to\nwait for the others, now and in each collective. "
    "over: a Communicator of the same\nranks, for what their hosts exchange without "
    "the GPU.\n\n"
    "Raises ValueError for arguments that are out of range or no such plugin, "
    "RuntimeError\nwhen NCCL cannot be found, or others fail or stay away.";

static PyObject *
ctpy_plugin_communicator(PyObject *module, PyObject *args)
{
    PyObject *capsule, *address, *over = Py_None;
    const char *id;
    Py_ssize_t id_bytes;
    int rank, world_size;
    double timeout_seconds;
    ct_comm *comm = NULL;
    ct_status status;
    ct_error err;
    if (!PyArg_ParseTuple(args, "Oy#iiOd|O:plugin_communicator", &capsule, &id,
                          &id_bytes, &rank, &world_size, &address, &timeout_seconds,
                          &over)) {
        return NULL;
    }
    ctpy_state *state = PyModule_GetState(module);
    const ct_comm *hosts = over == Py_None ? NULL : ctpy_comm_borrow(state, over);
    if (over != Py_None && hosts == NULL) {
        return NULL;
    }
    if (hosts != NULL && (hosts->rank != rank || hosts->world_size != world_size)) {
        return PyErr_Format(
            PyExc_ValueError,
            "over is the group of rank %d of %d; expected rank %d of %d", hosts->rank,
            hosts->world_size, rank, world_size);
    }
    const ct_plugin *plugin = ctpy_plugin_borrow(capsule);
    if (plugin == NULL) {
        return NULL;
    }
    void *stream = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (id_bytes != CT_COMM_ID_BYTES) {
        return PyErr_Format(PyExc_ValueError, "id must have %d bytes, got %zd",
                            CT_COMM_ID_BYTES, id_bytes);
    }
    Py_BEGIN_ALLOW_THREADS
    status =
        plugin->comm_join(id, rank, world_size, stream, timeout_seconds, &comm, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *made = ctpy_communicator_steal(state->Communicator, comm);
    if (made != NULL && hosts != NULL) {
        ((Communicator *)made)->over = Py_NewRef(over);
    }
    return made;
}

PyMethodDef ctpy_comm_group_functions[] = {
    {"plugin_communicator",        ctpy_plugin_communicator,        METH_VARARGS,
     ctpy_plugin_communicator_doc                                                                          },
    {"compare_requests",           ctpy_compare_requests,           METH_O,       ctpy_compare_requests_doc},
    {"shared_memory_communicator", ctpy_shared_memory_communicator, METH_VARARGS,
     ctpy_shared_memory_communicator_doc                                                                   },
    {"hierarchical_communicator",  ctpy_hierarchical_communicator,  METH_VARARGS,
     ctpy_hierarchical_communicator_doc                                                                    },
    {NULL,                         NULL,                            0,            NULL                     },
};
