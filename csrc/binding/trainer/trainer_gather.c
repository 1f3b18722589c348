/* Trainer: the hooks by which subclasses gather over the ranks. */
#include "binding/data/gather.h"
#include "binding/engine/ranks.h"

/* The rows of all ranks, those of a batch that only keeps them company left out; the
 * values themselves where the trainer is alone. */
static PyObject *
gather(PyObject *op, PyObject *value)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1 || value == Py_None) {
        return ranks < 0 ? NULL : Py_NewRef(value);
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->group), *result = NULL;
    PyObject *padding = PyLong_FromLong(-100);
    if (padding != NULL) {
        result =
            ctpy_gather_nested(state, group, value, padding, !((Trainer *)op)->spare);
        Py_DECREF(padding);
    }
    Py_DECREF(group);
    return result;
}

const char Trainer_gather_function_doc[] =
    "gather_function($self, input_data, use_gather_object=False)\n--\n\n"
    "Return the rows that all ranks have of nested tensors, each row once, in rank\n"
    "order; what is given, where there is one rank. All ranks have to call it.\n\n"
    "Shorter rows are filled with -100. use_gather_object changes nothing: other\n"
    "objects travel pickled anyway. A function that is assigned to this name takes\n"
    "its place in evaluation; the loop then does not gather what it returns.";

PyObject *
Trainer_gather_function(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"input_data", "use_gather_object", NULL};
    PyObject *value;
    int objects = 0;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:gather_function", keywords,
                                       &value, &objects)
               ? gather(op, value)
               : NULL;
}

const char Trainer__nested_gather_doc[] =
    "_nested_gather($self, tensors, name=None)\n--\n\n"
    "Do what gather_function does, by the name it had in older releases.";

PyObject *
Trainer__nested_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", "name", NULL};
    PyObject *value, *name = Py_None;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:_nested_gather", keywords,
                                       &value, &name)
               ? gather(op, value)
               : NULL;
}
