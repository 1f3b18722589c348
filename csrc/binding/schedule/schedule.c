/* ctrainer._C.Schedule: a schedule of core/schedule/schedule.h as a function, with the
 * options as a dict. */
#include "binding/schedule/scheduler.h"

#include <math.h>
#include <string.h>

/* ---- options --------------------------------------------------------------------- */

PyDoc_STRVAR(name_doc, "Its name, the family's prefix included.");
PyDoc_STRVAR(options_doc, "A new dict of the options in force.");

int
ctpy_schedule_set_option(ct_schedule *schedule, const char *name, PyObject *value)
{
    ct_error err;
    ct_status status;
    if (PyUnicode_Check(value)) {
        const char *word = PyUnicode_AsUTF8(value);
        if (word == NULL) {
            return -1;
        }
        status = ct_schedule_set_word(schedule, name, word, &err);
    }
    else if (PyBool_Check(value)) {
        status = ct_schedule_set_flag(schedule, name, value == Py_True, &err);
    }
    else {
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Format(PyExc_TypeError, "%s is a %.200s; expected a number", name,
                             Py_TYPE(value)->tp_name);
            }
            return -1;
        }
        status = ct_schedule_set(schedule, name, number, &err);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* A copy of the dict's pairs, as a value's __float__ may change the dict. */
static PyObject *
items_of(PyObject *options)
{
    if (options != Py_None && !PyDict_Check(options)) {
        return PyErr_Format(PyExc_TypeError, "options is a %.200s; expected a dict",
                            Py_TYPE(options)->tp_name);
    }
    return options == Py_None ? PyList_New(0) : PyDict_Items(options);
}

int
ctpy_schedule_set_options(ct_schedule *schedule, PyObject *options)
{
    PyObject *items = items_of(options);
    int result = items == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(items); i++) {
        PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 0);
        PyObject *value = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 1);
        const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;
        if (name == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_TypeError, "the option %R is no str", key);
            }
            result = -1;
        }
        else if (value != Py_None) {
            result = ctpy_schedule_set_option(schedule, name, value);
        }
    }
    Py_XDECREF(items);
    return result;
}

static PyObject *
option_value(const ct_schedule_option *option, double value)
{
    switch (option->form) {
    case CT_OPTION_INTEGER:
        return PyLong_FromDouble(value);
    case CT_OPTION_FLAG:
        return PyBool_FromLong(value != 0.0);
    case CT_OPTION_WORD:
        return PyUnicode_FromString(option->words[(size_t)value]);
    case CT_OPTION_REAL:
        break;
    }
    return PyFloat_FromDouble(value);
}

PyObject *
ctpy_schedule_options(const ct_schedule *schedule)
{
    PyObject *options = PyDict_New();
    const ct_schedule_option *option;
    for (size_t i = 0;
         options != NULL && (option = ct_schedule_option_at(schedule, i)) != NULL;
         i++) {
        if (!ct_schedule_takes(schedule, i) || isnan(schedule->slots[i])) {
            continue;
        }
        PyObject *value = option_value(option, schedule->slots[i]);
        if (value == NULL || PyDict_SetItemString(options, option->name, value) < 0) {
            Py_CLEAR(options);
        }
        Py_XDECREF(value);
    }
    return options;
}

/* ---- the type -------------------------------------------------------------------- */

typedef struct Schedule {
    PyObject_HEAD
    ct_schedule core; /* finished, and never changed */
} Schedule;

PyDoc_STRVAR(
    Schedule_doc,
    "Schedule(name, options=None)\n--\n\n"
    "A learning-rate schedule as a function: schedule(step) returns a float.\n\n"
    "name is one of transformers' ('linear'), of fairseq's ('fairseq.cosine')\n"
    "or of DeepSpeed's ('deepspeed.WarmupLR'); options is a dict of what its\n"
    "formula reads. transformers' give the factor of a learning rate, the others\n"
    "the learning rate. Raises ValueError or TypeError that names the option at\n"
    "fault.\n\n"
    "Example:\n"
    "    >>> from ctrainer.schedules import Schedule\n"
    "    >>> Schedule('linear', {'num_warmup_steps': 0, 'num_training_steps': 4})(1)\n"
    "    0.75");

static PyObject *
Schedule_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "options", NULL};
    const char *name;
    PyObject *options = Py_None;
    ct_schedule core;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|O:Schedule", names, &name,
                                     &options)) {
        return NULL;
    }
    if (ct_schedule_init(&core, name, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    if (ctpy_schedule_set_options(&core, options) < 0) {
        return NULL;
    }
    if (ct_schedule_finish(&core, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ((Schedule *)op)->core = core;
    }
    return op;
}

static PyObject *
Schedule_call(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"step", NULL};
    long long step;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L:Schedule", names, &step)) {
        return NULL;
    }
    return PyFloat_FromDouble(ct_schedule_value(&((Schedule *)op)->core, step));
}

static PyObject *
Schedule_name(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_schedule *core = &((Schedule *)op)->core;
    return PyUnicode_FromFormat("%s%s", ct_schedule_prefix(core),
                                ct_schedule_name(core));
}

static PyObject *
Schedule_options(PyObject *op, void *Py_UNUSED(closure))
{
    return ctpy_schedule_options(&((Schedule *)op)->core);
}

PyDoc_STRVAR(reduce_doc, "__reduce__($self, /)\n--\n\nHelper for pickle and copy.");

static PyObject *
Schedule_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("O(NN)", Py_TYPE(op), Schedule_name(op, NULL),
                         Schedule_options(op, NULL));
}

static PyMethodDef Schedule_methods[] = {
    {"__reduce__", Schedule_reduce, METH_NOARGS, reduce_doc},
    {NULL,         NULL,            0,           NULL      },
};

static PyGetSetDef Schedule_getset[] = {
    {"name",    Schedule_name,    NULL, name_doc,    NULL},
    {"options", Schedule_options, NULL, options_doc, NULL},
    {NULL,      NULL,             NULL, NULL,        NULL},
};

static PyType_Slot Schedule_slots[] = {
    {Py_tp_doc,      (void *)Schedule_doc},
    {Py_tp_new,      Schedule_new        },
    {Py_tp_call,     Schedule_call       },
    {Py_tp_traverse, ctpy_leaf_traverse  },
    {Py_tp_dealloc,  ctpy_leaf_dealloc   },
    {Py_tp_methods,  Schedule_methods    },
    {Py_tp_getset,   Schedule_getset     },
    {0,              NULL                },
};

PyType_Spec Schedule_spec = {
    .name = "ctrainer._C.Schedule",
    .basicsize = sizeof(Schedule),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Schedule_slots,
};
