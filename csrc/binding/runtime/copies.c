/* What copying and pickling of our types share: the attributes that users and
 * subclasses have added go along with what a type keeps in its struct. */
#include "binding/runtime/copies.h"

PyObject *
ctpy_copy_state_steal(PyObject *op, PyObject *fields)
{
    PyObject *own = NULL, *state = NULL;
    if (fields != NULL) {
        own = PyObject_GenericGetDict(op, NULL);
        if (own == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            own = Py_NewRef(Py_None); /* a type without attributes of its own */
        }
    }
    if (own != NULL && own != Py_None) {
        Py_SETREF(own, PyDict_Copy(own));
    }
    if (own != NULL) {
        state = PyTuple_Pack(2, own, fields);
    }
    Py_XDECREF(own);
    Py_XDECREF(fields);
    return state;
}

PyObject *
ctpy_take_copy_state_borrow(PyObject *op, PyObject *state)
{
    if (!PyTuple_Check(state) || PyTuple_GET_SIZE(state) != 2 ||
        !PyDict_Check(PyTuple_GET_ITEM(state, 1)) ||
        !(PyDict_Check(PyTuple_GET_ITEM(state, 0)) ||
          PyTuple_GET_ITEM(state, 0) == Py_None)) {
        PyErr_Format(PyExc_TypeError,
                     "%.100s.__setstate__ takes what __getstate__ returned",
                     Py_TYPE(op)->tp_name);
        return NULL;
    }
    PyObject *name, *value, *own = PyTuple_GET_ITEM(state, 0);
    Py_ssize_t at = 0;
    while (own != Py_None && PyDict_Next(own, &at, &name, &value)) {
        PyObject *mine = PyObject_GenericGetDict(op, NULL);
        const int failed = mine == NULL || PyDict_SetItem(mine, name, value) < 0;
        Py_XDECREF(mine);
        if (failed) {
            return NULL;
        }
    }
    return PyTuple_GET_ITEM(state, 1);
}

typedef struct refusal {
    PyTypeObject *type; /* borrowed from the module's state */
    const char *why;
} refusal;

static const char of_group[] = "it belongs to the ranks of an open group";
static const char of_run[] = "it is a part of a run that is under way";

/* Whether a subclass says what its copies are made of; -1 with an exception. */
static int
has_own_reduce(PyObject *op)
{
    PyObject *own = PyObject_GetAttrString((PyObject *)Py_TYPE(op), "__reduce__");
    PyObject *usual =
        PyObject_GetAttrString((PyObject *)&PyBaseObject_Type, "__reduce__");
    const int result = own == NULL || usual == NULL ? -1 : own != usual;
    Py_XDECREF(own);
    Py_XDECREF(usual);
    return result;
}

static PyObject *
refuse(PyObject *op, PyObject *Py_UNUSED(protocol))
{
    ctpy_state *state = ctpy_state_borrow(op);
    const int own = has_own_reduce(op);
    if (own != 0) {
        return own < 0 ? NULL : PyObject_CallMethod(op, "__reduce__", NULL);
    }
    const refusal known[] = {
        {state->BatchShard,       of_run                                           },
        {state->CheckpointWriter, "it writes files from a thread of this process"  },
        {state->FairseqTrainer,   "it holds a run that is under way"               },
        {state->FSDPUnit,         "its memory is a shard of the group's parameters"},
        {state->GradHook,         of_run                                           },
        {state->MappedMemory,     "it maps memory of this process"                 },
        {state->ObjectWatch,      of_run                                           },
        {state->RowBuffer,        "it may map a file that this process has opened" },
    };
    const char *why = of_group;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (PyObject_TypeCheck(op, known[i].type)) {
            why = known[i].why;
        }
    }
    PyErr_Format(PyExc_TypeError,
                 "a %.100s cannot be copied or pickled: %s. Copy what holds it before "
                 "training begins, or save a checkpoint and load that",
                 Py_TYPE(op)->tp_name, why);
    return NULL;
}

static PyMethodDef refusing = {"__reduce_ex__", refuse, METH_O,
                               "__reduce_ex__($self, protocol, /)\n--\n\nRaise "
                               "TypeError: there are no copies, but those of a "
                               "subclass's own __reduce__()."};

int
ctpy_refuse_copies(const ctpy_state *state)
{
    PyTypeObject *const types[] = {
        state->BMUF,           state->BatchShard,   state->CheckpointWriter,
        state->CollectiveWork, state->Communicator, state->FSDPUnit,
        state->FairseqTrainer, state->GradHook,     state->GradReducer,
        state->GroupMemory,    state->MappedMemory, state->ObjectWatch,
        state->RowBuffer,
    };
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        PyObject *method = PyDescr_NewMethod(types[i], &refusing);
        const int failed =
            method == NULL ||
            PyObject_SetAttrString((PyObject *)types[i], refusing.ml_name, method) < 0;
        Py_XDECREF(method);
        if (failed) {
            return -1;
        }
    }
    return 0;
}
