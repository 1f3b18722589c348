/* ctrainer._C.AverageMeter: a weighted mean of numbers or tensors of one element.
 *
 * The hooks _type_as(total, value) and _safe_round(value, digits) know what this file
 * does not: tensors. Plain numbers never get there.
 *
 * Source of the rules: fairseq, logging/meters.py. */
#include "binding/meters.h"

#define AVERAGE_FIELDS(X)                                                              \
    X(val)                                                                             \
    X(sum)                                                                             \
    X(count)                                                                           \
    X(round)

typedef struct AverageMeter {
    PyObject_HEAD
#define FIELD(name) PyObject *name; /* NULL where somebody has deleted it */
    AVERAGE_FIELDS(FIELD)
#undef FIELD
} AverageMeter;

static void
forget(AverageMeter *self)
{
    Py_XSETREF(self->val, Py_NewRef(Py_None));
    Py_XSETREF(self->sum, PyLong_FromLong(0)); /* small numbers are there already */
    Py_XSETREF(self->count, PyLong_FromLong(0));
}

static PyObject *
AverageMeter_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        forget((AverageMeter *)op);
        ((AverageMeter *)op)->round = Py_NewRef(Py_None);
    }
    return op;
}

static int
AverageMeter_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"round", NULL};
    PyObject *digits = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:AverageMeter", names, &digits)) {
        return -1;
    }
    Py_XSETREF(((AverageMeter *)op)->round, Py_NewRef(digits));
    PyObject *answer = PyObject_CallMethodNoArgs(op, ctpy_state_borrow(op)->str_reset);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
AverageMeter_traverse(PyObject *op, visitproc visit, void *arg)
{
    AverageMeter *self = (AverageMeter *)op;
    Py_VISIT(Py_TYPE(op));
#define FIELD(name) Py_VISIT(self->name);
    AVERAGE_FIELDS(FIELD)
#undef FIELD
    return 0;
}

static int
AverageMeter_clear(PyObject *op)
{
    AverageMeter *self = (AverageMeter *)op;
#define FIELD(name) Py_CLEAR(self->name);
    AVERAGE_FIELDS(FIELD)
#undef FIELD
    return 0;
}

static void
AverageMeter_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)AverageMeter_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- arithmetic --------------------------------------------------------------------
 */

/* A new reference to a field, or NULL with AttributeError. */
static PyObject *
held(PyObject *field, const char *name)
{
    if (field == NULL) {
        PyErr_Format(PyExc_AttributeError, "the meter's %s has been deleted", name);
    }
    return Py_XNewRef(field);
}

/* The total that value can be added to: on its device and in its dtype. */
static PyObject *
type_as_steal(PyObject *op, PyObject *total, PyObject *value)
{
    if (total == NULL || PyFloat_Check(total) || PyLong_Check(total)) {
        return total;
    }
    PyObject *stack[] = {total, value};
    PyObject *made = ctpy_call_hook(op, ctpy_state_borrow(op)->str__type_as, stack, 2);
    Py_DECREF(total);
    return made;
}

/* The total plus value, as a new object. */
static PyObject *
plus(PyObject *op, PyObject *field, const char *name, PyObject *like, PyObject *value)
{
    PyObject *total = type_as_steal(op, held(field, name), like);
    PyObject *sum = total == NULL ? NULL : PyNumber_Add(total, value);
    Py_XDECREF(total);
    return sum;
}

static int
is_positive(PyObject *number)
{
    PyObject *zero = PyLong_FromLong(0);
    int result = zero == NULL ? -1 : PyObject_RichCompareBool(number, zero, Py_GT);
    Py_XDECREF(zero);
    return result;
}

/* Adds value times weight to sum, and weight to count. */
static int
add(PyObject *op, PyObject *value, PyObject *weight)
{
    AverageMeter *self = (AverageMeter *)op;
    PyObject *part = PyNumber_Multiply(value, weight);
    PyObject *sum = part == NULL ? NULL : plus(op, self->sum, "sum", value, part);
    PyObject *count =
        sum == NULL ? NULL : plus(op, self->count, "count", weight, weight);
    Py_XDECREF(part);
    if (count == NULL) {
        Py_XDECREF(sum);
        return -1;
    }
    Py_XSETREF(self->sum, sum);
    Py_XSETREF(self->count, count);
    return 0;
}

int
ctpy_average_update(PyObject *op, PyObject *value, PyObject *weight)
{
    if (value == Py_None) {
        return 0;
    }
    int positive = is_positive(weight);
    if (positive < 0 || (positive && add(op, value, weight) < 0)) {
        return -1;
    }
    Py_XSETREF(((AverageMeter *)op)->val, Py_NewRef(value));
    return 0;
}

PyDoc_STRVAR(update_doc, "update($self, val, n=1)\n--\n\n"
                         "Add val with weight n; None is left out.");

static PyObject *
AverageMeter_update(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"val", "n", NULL};
    PyObject *value, *weight = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:update", names, &value,
                                     &weight)) {
        return NULL;
    }
    weight = weight == NULL ? PyLong_FromLong(1) : Py_NewRef(weight);
    int failed = weight == NULL || ctpy_average_update(op, value, weight) < 0;
    Py_XDECREF(weight);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(reset_doc, "reset($self, /)\n--\n\nForget all values.");

static PyObject *
AverageMeter_reset(PyObject *op, PyObject *Py_UNUSED(unused))
{
    forget((AverageMeter *)op);
    Py_RETURN_NONE;
}

/* ---- what is reported --------------------------------------------------------------
 */

static PyObject *
AverageMeter_avg(PyObject *op, void *Py_UNUSED(closure))
{
    AverageMeter *self = (AverageMeter *)op;
    PyObject *count = held(self->count, "count"), *result = NULL;
    int positive = count == NULL ? -1 : is_positive(count);
    if (positive == 0) {
        result = held(self->val, "val");
    }
    else if (positive == 1) {
        PyObject *sum = held(self->sum, "sum");
        result = sum == NULL ? NULL : PyNumber_TrueDivide(sum, count);
        Py_XDECREF(sum);
    }
    Py_XDECREF(count);
    return result;
}

static PyObject *
AverageMeter_smoothed(PyObject *op, void *Py_UNUSED(closure))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *value = PyObject_GetAttr(op, names->str_avg);
    PyObject *digits = held(((AverageMeter *)op)->round, "round"), *result = NULL;
    if (value != NULL && digits != NULL) {
        PyObject *stack[] = {value, digits};
        result = value == Py_None || digits == Py_None ? Py_NewRef(value)
                 : PyFloat_CheckExact(value)
                     ? PyObject_CallMethodOneArg(value, names->str___round__, digits)
                     : ctpy_call_hook(op, names->str__safe_round, stack, 2);
    }
    Py_XDECREF(digits);
    Py_XDECREF(value);
    return result;
}

/* ---- state -------------------------------------------------------------------------
 */

PyDoc_STRVAR(state_dict_doc, "state_dict($self, /)\n--\n\n"
                             "Return val, sum, count and round as a dict.");

static PyObject *
AverageMeter_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    AverageMeter *self = (AverageMeter *)op;
    PyObject *made = PyDict_New();
    int failed = made == NULL;
#define FIELD(name)                                                                    \
    failed = failed || (self->name != NULL &&                                          \
                        PyDict_SetItemString(made, #name, self->name) < 0);
    AVERAGE_FIELDS(FIELD)
#undef FIELD
    if (failed) {
        Py_CLEAR(made);
    }
    return made;
}

PyDoc_STRVAR(load_state_dict_doc,
             "load_state_dict($self, state_dict, /)\n--\n\n"
             "Take over val, sum and count, and round, None where it is missing.\n\n"
             "Raises KeyError for another that is missing; nothing has changed then.");

static PyObject *
AverageMeter_load_state_dict(PyObject *op, PyObject *state)
{
    AverageMeter *self = (AverageMeter *)op;
    PyObject *val = PyMapping_GetItemString(state, "val"), *sum = NULL, *count = NULL,
             *digits = NULL;
    if (val == NULL || (sum = PyMapping_GetItemString(state, "sum")) == NULL ||
        (count = PyMapping_GetItemString(state, "count")) == NULL) {
        goto done;
    }
    if (ctpy_item(state, "round", &digits) == 0) {
        digits = Py_NewRef(Py_None);
    }
    if (digits != NULL) {
#define KEEP(name, value) Py_XSETREF(self->name, Py_NewRef(value))
        KEEP(val, val);
        KEEP(sum, sum);
        KEEP(count, count);
        KEEP(round, digits);
#undef KEEP
    }
done:
    Py_XDECREF(count);
    Py_XDECREF(sum);
    Py_XDECREF(val);
    if (digits == NULL) {
        return NULL;
    }
    Py_DECREF(digits);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reduce_doc, "__reduce__($self, /)\n--\n\nSupport copying and pickling.");

static PyObject *
AverageMeter_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *extra, *state = AverageMeter_state_dict(op, NULL), *made = NULL;
    if (state != NULL && ctpy_lookup(op, names->str___dict__, &extra) >= 0) {
        made = Py_BuildValue("(O()(OO))", Py_TYPE(op), state,
                             extra == NULL ? Py_None : extra);
        Py_XDECREF(extra);
    }
    Py_XDECREF(state);
    return made;
}

PyDoc_STRVAR(setstate_doc, "__setstate__($self, state, /)\n--\n\n"
                           "Take over what __reduce__() gave.");

static PyObject *
AverageMeter_setstate(PyObject *op, PyObject *state)
{
    PyObject *fields, *extra;
    if (!PyTuple_Check(state)) {
        return PyErr_Format(PyExc_TypeError, "state is a %.100s; expected a tuple",
                            Py_TYPE(state)->tp_name);
    }
    if (!PyArg_ParseTuple(state, "OO:__setstate__", &fields, &extra)) {
        return NULL;
    }
    PyObject *done = AverageMeter_load_state_dict(op, fields);
    if (done == NULL || extra == Py_None) {
        return done;
    }
    Py_DECREF(done);
    PyObject *own = PyObject_GetAttr(op, ctpy_state_borrow(op)->str___dict__);
    int failed = own == NULL || PyDict_Update(own, extra) < 0;
    Py_XDECREF(own);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef AverageMeter_methods[] = {
    {"reset",           AverageMeter_reset,                               METH_NOARGS, reset_doc          },
    {"update",          (PyCFunction)(void (*)(void))AverageMeter_update,
     METH_VARARGS | METH_KEYWORDS,                                                     update_doc         },
    {"state_dict",      AverageMeter_state_dict,                          METH_NOARGS, state_dict_doc     },
    {"load_state_dict", AverageMeter_load_state_dict,                     METH_O,      load_state_dict_doc},
    {"__reduce__",      AverageMeter_reduce,                              METH_NOARGS, reduce_doc         },
    {"__setstate__",    AverageMeter_setstate,                            METH_O,      setstate_doc       },
    {NULL,              NULL,                                             0,           NULL               },
};

static PyMemberDef AverageMeter_members[] = {
    {"val", T_OBJECT_EX, offsetof(AverageMeter, val), 0, "The latest value."},
    {"sum", T_OBJECT_EX, offsetof(AverageMeter, sum), 0,
     "The sum of values times weights."},
    {"count", T_OBJECT_EX, offsetof(AverageMeter, count), 0, "The sum of weights."},
    {"round", T_OBJECT_EX, offsetof(AverageMeter, round), 0,
     "Decimals of what is reported, or None for all."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef AverageMeter_getset[] = {
    {"avg",            AverageMeter_avg,      NULL,
     "The mean, or the latest value where nothing had weight.",           NULL},
    {"smoothed_value", AverageMeter_smoothed, NULL, "The mean, rounded.", NULL},
    {NULL,             NULL,                  NULL, NULL,                 NULL},
};

PyDoc_STRVAR(AverageMeter_doc,
             "AverageMeter(round=None)\n--\n\n"
             "The weighted mean of what it was updated with, as fairseq has it.\n"
             "ctrainer.fairseq.meters.AverageMeter is its public face.");

static PyType_Slot AverageMeter_slots[] = {
    {Py_tp_doc,      (void *)AverageMeter_doc},
    {Py_tp_new,      AverageMeter_new        },
    {Py_tp_init,     AverageMeter_init       },
    {Py_tp_traverse, AverageMeter_traverse   },
    {Py_tp_clear,    AverageMeter_clear      },
    {Py_tp_dealloc,  AverageMeter_dealloc    },
    {Py_tp_methods,  AverageMeter_methods    },
    {Py_tp_members,  AverageMeter_members    },
    {Py_tp_getset,   AverageMeter_getset     },
    {0,              NULL                    },
};

PyType_Spec AverageMeter_spec = {
    .name = "ctrainer._C.AverageMeter",
    .basicsize = sizeof(AverageMeter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = AverageMeter_slots,
};
