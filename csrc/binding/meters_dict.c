/* ctrainer._C.MetersDict: meters by name, in the order of priority and insertion.
 *
 * A dict keeps the order of insertion; a meter of a lower priority than some that are
 * there moves those behind itself. An update of fairseq's makes one such dict of five
 * meters and throws it away, which is why this is C.
 *
 * Source of the rules: fairseq, logging/meters.py. */
#include "binding/meters.h"

#include <stdbool.h>

typedef struct MetersDict {
    PyDictObject dict;
    PyObject *ranks;    /* key: (priority, place), of keys that were removed too */
    long long added;    /* the next place */
    long long priority; /* the highest that was ever given */
} MetersDict;

static PyObject *
MetersDict_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *op = PyDict_Type.tp_new(type, args, kwargs);
    if (op != NULL) {
        MetersDict *self = (MetersDict *)op;
        self->priority = LLONG_MIN;
        self->ranks = PyDict_New();
        if (self->ranks == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

static int
MetersDict_init(PyObject *Py_UNUSED(op), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, ":MetersDict", names) ? 0 : -1;
}

static int
MetersDict_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((MetersDict *)op)->ranks);
    return PyDict_Type.tp_traverse(op, visit, arg);
}

static int
MetersDict_clear(PyObject *op)
{
    return PyDict_Type.tp_clear(op); /* ranks hold names and numbers alone */
}

static void
MetersDict_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    Py_CLEAR(((MetersDict *)op)->ranks);
    PyDict_Type.tp_dealloc(op);
    Py_DECREF(type);
}

/* ---- adding ------------------------------------------------------------------------
 */

/* The priority of a key that is there; -1 with an exception. */
static int
rank_of(MetersDict *self, PyObject *key, long long *priority)
{
    PyObject *rank = PyDict_GetItemWithError(self->ranks, key);
    if (rank == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_RuntimeError,
                         "%R came into this MetersDict without a priority; use "
                         "add_meter()",
                         key);
        }
        return -1;
    }
    *priority = PyLong_AsLongLong(PyTuple_GET_ITEM(rank, 0));
    return *priority == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The keys of higher priorities, in their order. */
static PyObject *
keys_above(MetersDict *self, long long limit)
{
    PyObject *found = PyList_New(0), *keys = PyDict_Keys((PyObject *)self);
    int failed = found == NULL || keys == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        long long priority;
        failed = rank_of(self, key, &priority) < 0 ||
                 (priority > limit && PyList_Append(found, key) < 0);
    }
    Py_XDECREF(keys);
    if (failed) {
        Py_CLEAR(found);
    }
    return found;
}

static int
move_to_end(PyObject *op, PyObject *key)
{
    PyObject *meter = Py_XNewRef(PyDict_GetItemWithError(op, key));
    int failed = meter == NULL || PyDict_DelItem(op, key) < 0 ||
                 PyDict_SetItem(op, key, meter) < 0;
    Py_XDECREF(meter);
    return failed ? -1 : 0;
}

/* Moves what belongs behind a new meter of that priority there. */
static int
make_way(MetersDict *self, long long priority)
{
    if (priority >= self->priority) {
        self->priority = priority;
        return 0;
    }
    PyObject *later = keys_above(self, priority);
    int failed = later == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(later); i++) {
        failed = move_to_end((PyObject *)self, PyList_GET_ITEM(later, i)) < 0;
    }
    Py_XDECREF(later);
    return failed ? -1 : 0;
}

static int
add_meter(MetersDict *self, PyObject *key, PyObject *meter, long long priority)
{
    PyObject *op = (PyObject *)self;
    int has = PyDict_Contains(op, key);
    if (has != 0) {
        if (has == 1) {
            PyErr_Format(PyExc_ValueError,
                         "MetersDict doesn't support reassignment: there is a meter %R",
                         key);
        }
        return -1;
    }
    PyObject *rank = Py_BuildValue("(LL)", priority, self->added);
    int failed = rank == NULL || PyDict_SetItem(self->ranks, key, rank) < 0 ||
                 PyDict_SetItem(op, key, meter) < 0 || make_way(self, priority) < 0;
    Py_XDECREF(rank);
    self->added++;
    return failed ? -1 : 0;
}

PyDoc_STRVAR(add_meter_doc, "add_meter($self, key, meter, priority)\n--\n\n"
                            "Add a meter. Raises ValueError where the key has one.");

static PyObject *
MetersDict_add_meter(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "meter", "priority", NULL};
    PyObject *key, *meter;
    long long priority;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL:add_meter", names, &key, &meter,
                                     &priority) ||
        add_meter((MetersDict *)op, key, meter, priority) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* meters[key] = (priority, meter), and del meters[key] */
static int
MetersDict_ass_subscript(PyObject *op, PyObject *key, PyObject *value)
{
    PyObject *meter;
    long long priority;
    if (value == NULL) {
        return PyDict_DelItem(op, key);
    }
    if (!PyTuple_Check(value)) {
        PyErr_Format(PyExc_TypeError,
                     "meters[%R] was given a %.100s; expected (priority, meter)", key,
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    return PyArg_ParseTuple(value, "LO:MetersDict", &priority, &meter)
               ? add_meter((MetersDict *)op, key, meter, priority)
               : -1;
}

/* ---- reading -----------------------------------------------------------------------
 */

static PyObject *
MetersDict_priorities(PyObject *op, void *Py_UNUSED(closure))
{
    MetersDict *self = (MetersDict *)op;
    PyObject *made = PyList_New(0), *keys = PyDict_Keys(op);
    int failed = made == NULL || keys == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i), *entry = NULL;
        long long priority;
        if (rank_of(self, key, &priority) == 0) {
            PyObject *rank = PyDict_GetItemWithError(self->ranks, key);
            entry = Py_BuildValue("(LOO)", priority, PyTuple_GET_ITEM(rank, 1), key);
        }
        failed = entry == NULL || PyList_Append(made, entry) < 0;
        Py_XDECREF(entry);
    }
    Py_XDECREF(keys);
    if (failed) {
        Py_CLEAR(made);
    }
    return made;
}

PyDoc_STRVAR(get_smoothed_value_doc,
             "get_smoothed_value($self, key, /)\n--\n\n"
             "Return the value of one meter as it is reported. Raises KeyError.\n\n"
             "A meter with a method derived_from(meters) is asked that.");

static PyObject *
MetersDict_get_smoothed_value(PyObject *op, PyObject *key)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *derive = NULL, *result = NULL;
    PyObject *meter = PyObject_GetItem(op, key);
    if (meter == NULL) {
        return NULL;
    }
    int derived = PyObject_TypeCheck(meter, names->AverageMeter)
                      ? 0
                      : ctpy_lookup(meter, names->str_derived_from, &derive);
    if (derived >= 0) {
        result = derived ? PyObject_CallOneArg(derive, op)
                         : PyObject_GetAttr(meter, names->str_smoothed_value);
    }
    Py_XDECREF(derive);
    Py_DECREF(meter);
    return result;
}

static bool
is_hidden(PyObject *key)
{
    return PyUnicode_Check(key) && PyUnicode_GET_LENGTH(key) > 0 &&
           PyUnicode_READ_CHAR(key, 0) == '_';
}

PyDoc_STRVAR(get_smoothed_values_doc,
             "get_smoothed_values($self, /)\n--\n\n"
             "Return the values of all meters whose names do not begin with an\n"
             "underscore, an OrderedDict.");

static PyObject *
MetersDict_get_smoothed_values(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *name = ctpy_state_borrow(op)->str_get_smoothed_value;
    PyObject *made = PyODict_New(), *keys = PyDict_Keys(op);
    int failed = made == NULL || keys == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        if (!is_hidden(key)) {
            PyObject *value = PyObject_CallMethodOneArg(op, name, key);
            failed = value == NULL || PyODict_SetItem(made, key, value) < 0;
            Py_XDECREF(value);
        }
    }
    Py_XDECREF(keys);
    if (failed) {
        Py_CLEAR(made);
    }
    return made;
}

static PyMethodDef MetersDict_methods[] = {
    {"add_meter",           (PyCFunction)(void (*)(void))MetersDict_add_meter,
     METH_VARARGS | METH_KEYWORDS,                                                          add_meter_doc},
    {"get_smoothed_value",  MetersDict_get_smoothed_value,                     METH_O,
     get_smoothed_value_doc                                                                              },
    {"get_smoothed_values", MetersDict_get_smoothed_values,                    METH_NOARGS,
     get_smoothed_values_doc                                                                             },
    {NULL,                  NULL,                                              0,           NULL         },
};

static PyGetSetDef MetersDict_getset[] = {
    {"priorities", MetersDict_priorities, NULL,
     "(priority, place of insertion, key) of each meter, in their order.", NULL},
    {NULL,         NULL,                  NULL, NULL,                      NULL},
};

PyDoc_STRVAR(MetersDict_doc, "MetersDict()\n--\n\n"
                             "Meters by name, in the order of (priority, insertion).\n"
                             "ctrainer.fairseq.meters.MetersDict is its public face.");

static PyType_Slot MetersDict_slots[] = {
    {Py_tp_base,          &PyDict_Type            },
    {Py_tp_doc,           (void *)MetersDict_doc  },
    {Py_tp_new,           MetersDict_new          },
    {Py_tp_init,          MetersDict_init         },
    {Py_tp_traverse,      MetersDict_traverse     },
    {Py_tp_clear,         MetersDict_clear        },
    {Py_tp_dealloc,       MetersDict_dealloc      },
    {Py_mp_ass_subscript, MetersDict_ass_subscript},
    {Py_tp_methods,       MetersDict_methods      },
    {Py_tp_getset,        MetersDict_getset       },
    {0,                   NULL                    },
};

PyType_Spec MetersDict_spec = {
    .name = "ctrainer._C.MetersDict",
    .basicsize = sizeof(MetersDict),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = MetersDict_slots,
};
