/* Trainer: the group of ranks, and work that ranks succeed or fail in together.
 *
 * A message begins with one byte for success or failure, so that no rank waits for
 * another that has failed: a failed rank sends its error's text and keeps the error. */
#include "binding/engine/ranks.h"

#include "binding/comm/communicator.h"
#include "binding/data/gather.h"

/* A forked child trains alone: the group is the parent's. */
static int
is_open(PyObject *group)
{
    const ct_comm *comm = group == NULL ? NULL : ((Communicator *)group)->comm;
    return comm != NULL && ct_comm_is_here(comm);
}

ct_comm *
ctpy_trainer_comm_borrow(PyObject *op)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    if (!is_open(self->rank_group)) {
        PyObject *group = PyObject_CallMethodNoArgs(op, names->str__join_ranks);
        if (group == NULL || ctpy_comm_borrow(names, group) == NULL) {
            Py_XDECREF(group);
            return NULL;
        }
        Py_XSETREF(self->rank_group, group);
    }
    return ctpy_comm_borrow(names, self->rank_group);
}

int
ctpy_trainer_world_size(PyObject *op)
{
    const ct_comm *comm = ctpy_trainer_comm_borrow(op);
    return comm == NULL ? -1 : comm->world_size;
}

int
ctpy_trainer_reduce_span(PyObject *op, const ct_span *span, ct_reduce_op how)
{
    const ct_request request = {.what = CT_ALL_REDUCE, .op = how, .in = *span};
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->rank_group);
    int result = ctpy_comm_run(ctpy_state_borrow(op), group, &request);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how)
{
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->rank_group);
    int result =
        ctpy_comm_reduce_numbers(ctpy_state_borrow(op), group, NULL, values, n, how);
    Py_DECREF(group);
    return result;
}

int
ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n)
{
    return ctpy_trainer_reduce_span(op, &(ct_span){values, n, CT_I64}, CT_REDUCE_SUM);
}

bool
ctpy_trainer_is_alone(const PyObject *op)
{
    PyObject *group = ((const Trainer *)op)->rank_group;
    return !is_open(group) || ((Communicator *)group)->comm->world_size == 1;
}

PyObject *
ctpy_trainer_get_communicator(PyObject *op, void *Py_UNUSED(closure))
{
    return ctpy_trainer_comm_borrow(op) == NULL
               ? NULL
               : Py_NewRef(((Trainer *)op)->rank_group);
}

/* The first byte of a rank's message. */
enum {
    FARED_WELL = '+',
    FAILED = '-'
};

void
ctpy_name_doing(const char *doing)
{
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    PyErr_Format(type, "%s: %S", doing, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* "OSError: No space left on device" */
static PyObject *
text_of(PyObject *type, PyObject *value)
{
    PyObject *bytes = NULL;
    PyObject *text = PyUnicode_FromFormat("%s: %S", ((PyTypeObject *)type)->tp_name,
                                          value == NULL ? Py_None : value);
    if (text != NULL) {
        bytes = PyUnicode_AsEncodedString(text, "utf-8", "replace");
        Py_DECREF(text);
    }
    return bytes;
}

/* Exchanges the mark and the payload (bytes, or NULL for none). */
static PyObject *
send(PyObject *op, char mark, PyObject *payload)
{
    PyObject *parts = NULL, *group = Py_NewRef(((Trainer *)op)->rank_group);
    PyObject *message = PyBytes_FromStringAndSize(&mark, 1);
    if (message != NULL && payload != NULL) {
        PyBytes_Concat(&message, payload);
    }
    if (message != NULL) {
        parts = ctpy_exchange(ctpy_state_borrow(op), group, message);
        Py_DECREF(message);
    }
    Py_DECREF(group);
    return parts;
}

static void
raise_for(const char *doing, Py_ssize_t rank, const char *message, Py_ssize_t n)
{
    PyObject *text = PyUnicode_DecodeUTF8(message, n, "replace");
    if (text != NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s: rank %zd failed: %U", doing, rank, text);
        Py_DECREF(text);
    }
}

/* Strips the marks off; NULL with an exception that names the first rank that failed.
 */
static PyObject *
judge_steal(PyObject *parts, const char *doing)
{
    PyObject *payloads = PyList_New(0);
    for (Py_ssize_t r = 0; payloads != NULL && r < PyList_GET_SIZE(parts); r++) {
        const char *message = PyBytes_AS_STRING(PyList_GET_ITEM(parts, r));
        const Py_ssize_t n = PyBytes_GET_SIZE(PyList_GET_ITEM(parts, r)) - 1;
        if (message[0] == FAILED) {
            raise_for(doing, r, message + 1, n);
            Py_CLEAR(payloads);
            break;
        }
        PyObject *payload = PyBytes_FromStringAndSize(message + 1, n);
        if (payload == NULL || PyList_Append(payloads, payload) < 0) {
            Py_CLEAR(payloads);
        }
        Py_XDECREF(payload);
    }
    Py_DECREF(parts);
    return payloads;
}

/* Reports the exception that is set to the other ranks; the exception stays. */
static void
report_failure(PyObject *op)
{
    PyObject *type, *value, *trace, *parts;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = text_of(type, value);
    if (text == NULL) {
        PyErr_Clear();
    }
    if ((parts = send(op, FAILED, text)) == NULL) {
        PyErr_Clear(); /* the first failure is reported */
    }
    Py_XDECREF(parts);
    Py_XDECREF(text);
    PyErr_Restore(type, value, trace);
}

/* Says to the others how this rank has fared in what it was doing: with an exception
 * set that it failed, else what they get of it, bytes (NULL: none). Returns the
 * payloads of all ranks, a list in rank order; NULL with an exception when any has
 * failed: this rank's own, or a RuntimeError that names the rank, `doing` and its
 * error. Alone it is the list of its own payload. */
static PyObject *
account(PyObject *op, const char *doing, PyObject *payload)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const int ranks = ctpy_trainer_world_size(op);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    if (PyErr_Occurred()) {
        if (ranks > 1) {
            report_failure(op);
        }
        return NULL;
    }
    if (ranks == 1) {
        return payload == NULL ? Py_BuildValue("[y]", "")
                               : Py_BuildValue("[O]", payload);
    }
    PyObject *parts = send(op, FARED_WELL, payload);
    if (parts == NULL) {
        ctpy_name_doing(doing);
        return NULL;
    }
    return judge_steal(parts, doing);
}

static const char Trainer__leave_ranks_doc[] =
    "_leave_ranks($self, /)\n--\n\n"
    "Close the group, if the trainer has joined other ranks, so that none waits for\n"
    "this rank. Raises RuntimeError while a collective is under way.";

static PyObject *
Trainer__leave_ranks(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return ctpy_trainer_is_alone(op)
               ? Py_NewRef(Py_None)
               : PyObject_CallMethod(((Trainer *)op)->rank_group, "close", NULL);
}

static const char Trainer__together_doc[] =
    "_together($self, doing, function, /)\n--\n\n"
    "Call function() on every rank and return what all returned: bytes, or None.\n\n"
    "Returns a list in rank order, b'' for None, when all have come back. Where one\n"
    "fails, all raise: it its own exception, the others a RuntimeError that names the\n"
    "rank, `doing` and the error.";

static PyObject *
Trainer__together(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", "", NULL};
    const char *doing;
    PyObject *function, *payload, *all;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO:_together", keywords, &doing,
                                     &function)) {
        return NULL;
    }
    payload = PyObject_CallNoArgs(function);
    if (payload != NULL && payload != Py_None && !PyBytes_Check(payload)) {
        PyErr_Format(PyExc_TypeError, "%s: expected bytes or None, got a %.100s", doing,
                     Py_TYPE(payload)->tp_name);
        Py_CLEAR(payload);
    }
    all = account(op, doing, payload == Py_None ? NULL : payload);
    Py_XDECREF(payload);
    return all;
}

static const char Trainer__sum_over_ranks_doc[] =
    "_sum_over_ranks($self, a, b, /)\n--\n\n"
    "Return the sums over all ranks, which all have to call it, of two numbers.";

static PyObject *
Trainer__sum_over_ranks(PyObject *op, PyObject *args)
{
    double sums[2];
    return PyArg_ParseTuple(args, "dd:_sum_over_ranks", &sums[0], &sums[1]) &&
                   ctpy_trainer_reduce(op, sums, 2, CT_REDUCE_SUM) == 0
               ? Py_BuildValue("(dd)", sums[0], sums[1])
               : NULL;
}

PyMethodDef Trainer_engine_ranks_methods[] = {
    {"_leave_ranks",    Trainer__leave_ranks,                           METH_NOARGS,  Trainer__leave_ranks_doc},
    {"_sum_over_ranks", Trainer__sum_over_ranks,                        METH_VARARGS,
     Trainer__sum_over_ranks_doc                                                                              },
    {"_together",       (PyCFunction)(void (*)(void))Trainer__together,
     METH_VARARGS | METH_KEYWORDS,                                                    Trainer__together_doc   },
    {NULL,              NULL,                                           0,            NULL                    },
};
