/* Trainer: a batch for the ranks of an evaluation that have none at all. */
#include "binding/comm/communicator.h"
#include "binding/engine/trainer_account.h"
#include "binding/evaluate/evaluate.h"

static PyObject *
pickled(const char *function, PyObject *value)
{
    PyObject *module = PyImport_ImportModule("pickle"), *result = NULL;
    if (module != NULL) {
        result = PyObject_CallMethod(module, function, "O", value);
        Py_DECREF(module);
    }
    return result;
}

/* On the root its batch as bytes, or none where pickle fails; elsewhere None. */
static PyObject *
message_to_lend(PyObject *inputs, bool is_root)
{
    if (!is_root) {
        return Py_NewRef(Py_None);
    }
    PyObject *data = pickled("dumps", inputs);
    if (data == NULL) {
        PyErr_WriteUnraisable(inputs); /* the others must not wait for it */
        data = PyBytes_FromStringAndSize("", 0);
    }
    return data;
}

PyObject *
ctpy_eval_lend(ctpy_eval_ranks *ranks, ctpy_state *names, PyObject *inputs, int root)
{
    const ct_comm *comm = ctpy_comm_borrow(names, ranks->group);
    if (comm == NULL) {
        return NULL;
    }
    const bool is_root = comm->rank == root;
    PyObject *data = message_to_lend(inputs, is_root), *lent = NULL;
    if (data == NULL) {
        return NULL;
    }
    ranks->told = true;
    PyObject *bytes =
        PyObject_CallMethod(ranks->group, "broadcast_bytes", "Oi", data, root);
    Py_DECREF(data);
    if (bytes == NULL) {
        ctpy_name_doing(CTPY_EVALUATING);
    }
    else if (PyBytes_GET_SIZE(bytes) == 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %d has the only batch of this evaluation, and it cannot be "
                     "pickled for the others; give each rank a batch of its own",
                     root);
    }
    else {
        ranks->told = false;
        lent = is_root ? Py_NewRef(inputs) : pickled("loads", bytes);
    }
    Py_XDECREF(bytes);
    return lent;
}
