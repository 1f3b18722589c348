/* Trainer: the group of its ranks. */
#include "binding/engine/ranks.h"

#include "binding/comm/communicator.h"
#include "binding/data/gather.h"

/* A group that a forked child finds is its parent's: it trains alone. */
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
    if (!is_open(self->group)) {
        PyObject *group = PyObject_CallMethodNoArgs(op, names->str__join_ranks);
        if (group == NULL || ctpy_comm_borrow(names, group) == NULL) {
            Py_XDECREF(group);
            return NULL;
        }
        Py_XSETREF(self->group, group);
    }
    return ctpy_comm_borrow(names, self->group);
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
    PyObject *group = Py_NewRef(((Trainer *)op)->group);
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
    PyObject *group = Py_NewRef(((Trainer *)op)->group);
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

int
ctpy_trainer_min(PyObject *op, int64_t *values, size_t n)
{
    return ctpy_trainer_reduce_span(op, &(ct_span){values, n, CT_I64}, CT_REDUCE_MIN);
}

bool
ctpy_trainer_is_alone(const PyObject *op)
{
    PyObject *group = ((const Trainer *)op)->group;
    return !is_open(group) || ((Communicator *)group)->comm->world_size == 1;
}

void
ctpy_ranks_leave(PyObject *op)
{
    if (ctpy_trainer_is_alone(op)) {
        return;
    }
    PyObject *answer =
        PyObject_CallMethodNoArgs(op, ctpy_state_borrow(op)->str__leave_ranks);
    if (answer == NULL) {
        PyErr_WriteUnraisable(op);
    }
    Py_XDECREF(answer);
}

PyObject *
ctpy_trainer_get_communicator(PyObject *op, void *Py_UNUSED(closure))
{
    return ctpy_trainer_comm_borrow(op) == NULL ? NULL
                                                : Py_NewRef(((Trainer *)op)->group);
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

/* The mark and the payload, in one message. */
static int
write_message(ct_packet *packet, char mark, PyObject *payload)
{
    ct_error err;
    const char marks[CT_PACKET_ALIGNMENT] = {mark};
    if (ct_packet_put(packet, marks, sizeof marks, &err) != CT_OK ||
        (payload != NULL &&
         ct_packet_put(packet, PyBytes_AS_STRING(payload),
                       (size_t)PyBytes_GET_SIZE(payload), &err) != CT_OK)) {
        return ctpy_raise_int(&err);
    }
    packet->n = CT_PACKET_ALIGNMENT + /* without the padding at the end */
                (payload == NULL ? 0 : (size_t)PyBytes_GET_SIZE(payload));
    return 0;
}

static PyObject *
send(PyObject *op, char mark, PyObject *payload)
{
    ct_packet packet = {0};
    PyObject *parts = NULL, *group = Py_NewRef(((Trainer *)op)->group);
    if (write_message(&packet, mark, payload) == 0) {
        parts = ctpy_exchange(ctpy_state_borrow(op), group, &packet);
    }
    ct_packet_fini(&packet);
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
        const Py_ssize_t n =
            PyBytes_GET_SIZE(PyList_GET_ITEM(parts, r)) - CT_PACKET_ALIGNMENT;
        if (message[0] == FAILED) {
            raise_for(doing, r, message + CT_PACKET_ALIGNMENT, n);
            Py_CLEAR(payloads);
            break;
        }
        PyObject *payload = PyBytes_FromStringAndSize(message + CT_PACKET_ALIGNMENT, n);
        if (payload == NULL || PyList_Append(payloads, payload) < 0) {
            Py_CLEAR(payloads);
        }
        Py_XDECREF(payload);
    }
    Py_DECREF(parts);
    return payloads;
}

/* Tells the others of the exception that is set, and keeps it. */
static void
tell_failure(PyObject *op)
{
    PyObject *type, *value, *trace, *parts;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = text_of(type, value);
    if (text == NULL) {
        PyErr_Clear();
    }
    if ((parts = send(op, FAILED, text)) == NULL) {
        PyErr_Clear(); /* the first failure is the one to tell */
    }
    Py_XDECREF(parts);
    Py_XDECREF(text);
    PyErr_Restore(type, value, trace);
}

PyObject *
ctpy_account(PyObject *op, const char *doing, PyObject *payload)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const int ranks = ctpy_trainer_world_size(op);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    if (PyErr_Occurred()) {
        if (ranks > 1) {
            tell_failure(op);
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
    all = ctpy_account(op, doing, payload == Py_None ? NULL : payload);
    Py_XDECREF(payload);
    return all;
}

PyMethodDef Trainer_engine_ranks_methods[] = {
    {"_together", (PyCFunction)(void (*)(void))Trainer__together,
     METH_VARARGS | METH_KEYWORDS,                                   Trainer__together_doc},
    {NULL,        NULL,                                           0, NULL                 },
};
