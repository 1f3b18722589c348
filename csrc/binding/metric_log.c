/* ctrainer._C.MetricLog: logs values into every active aggregator. */
#include "binding/meters.h"

typedef struct MetricLog {
    PyObject_HEAD
    PyObject *average; /* the class of the meters that log_scalar() makes */
    PyObject *active;  /* a dict of aggregators, outermost first; or NULL */
} MetricLog;

static int
MetricLog_clear(PyObject *op)
{
    Py_CLEAR(((MetricLog *)op)->average);
    Py_CLEAR(((MetricLog *)op)->active);
    return 0;
}

static int
MetricLog_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"average", NULL};
    PyTypeObject *base = ctpy_state_borrow(op)->AverageMeter;
    PyObject *average;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:MetricLog", names, &PyType_Type,
                                     &average)) {
        return -1;
    }
    if (!PyType_IsSubtype((PyTypeObject *)average, base)) {
        PyErr_Format(PyExc_TypeError, "average is %R; expected a subclass of %R",
                     average, base);
        return -1;
    }
    Py_XSETREF(((MetricLog *)op)->average, Py_NewRef(average));
    return 0;
}

static int
MetricLog_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((MetricLog *)op)->average);
    Py_VISIT(((MetricLog *)op)->active);
    return 0;
}

static void
MetricLog_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)MetricLog_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- log_scalar() ------------------------------------------------------------------
 */

typedef struct scalar {
    PyObject *key, *value, *weight, *priority, *round;
} scalar;

/* The meter of that key in an aggregator, made where there is none. */
static PyObject *
find_or_make(MetricLog *self, PyObject *meters, const scalar *s)
{
    ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    PyObject *found = Py_XNewRef(PyDict_GetItemWithError(meters, s->key));
    if (found != NULL || PyErr_Occurred()) {
        return found;
    }
    PyObject *average = Py_NewRef(self->average);
    PyObject *made = PyObject_CallOneArg(average, s->round);
    Py_DECREF(average);
    PyObject *stack[] = {s->key, made, s->priority};
    PyObject *answer =
        made == NULL ? NULL : ctpy_call_hook(meters, names->str_add_meter, stack, 3);
    if (answer == NULL) {
        Py_CLEAR(made);
    }
    Py_XDECREF(answer);
    return made;
}

/* meter.update(value, weight) */
static int
update(MetricLog *self, PyObject *meter, const scalar *s)
{
    if ((PyObject *)Py_TYPE(meter) == self->average) {
        return ctpy_average_update(meter, s->value, s->weight);
    }
    PyObject *stack[] = {s->value, s->weight};
    PyObject *answer = ctpy_call_hook(
        meter, ctpy_state_borrow((PyObject *)self)->str_update, stack, 2);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
log_scalar(MetricLog *self, const scalar *s)
{
    PyObject *active =
        self->active == NULL ? PyList_New(0) : PyDict_Values(self->active);
    int failed = active == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(active); i++) {
        PyObject *meters = PyList_GET_ITEM(active, i);
        if (!PyDict_Check(meters)) {
            PyErr_Format(PyExc_TypeError,
                         "an active aggregator is a %.100s; expected "
                         "a MetersDict",
                         Py_TYPE(meters)->tp_name);
            failed = 1;
            break;
        }
        PyObject *meter = find_or_make(self, meters, s);
        failed = meter == NULL || update(self, meter, s) < 0;
        Py_XDECREF(meter);
    }
    Py_XDECREF(active);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(log_scalar_doc,
             "log_scalar($self, key, value, weight=1, priority=10, round=None)\n--\n\n"
             "Log value for a mean in which it counts weight times.\n"
             "\n"
             "With weight 0 the latest value is what is reported. Low priorities are\n"
             "reported first; round is the number of decimals, None for all. Both are\n"
             "taken from the first call for a key.");

static PyObject *
MetricLog_log_scalar(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "value", "weight", "priority", "round", NULL};
    scalar s = {.weight = NULL, .priority = NULL, .round = Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OOO:log_scalar", names, &s.key,
                                     &s.value, &s.weight, &s.priority, &s.round)) {
        return NULL;
    }
    s.weight = s.weight == NULL ? PyLong_FromLong(1) : Py_NewRef(s.weight);
    s.priority = s.priority == NULL ? PyLong_FromLong(10) : Py_NewRef(s.priority);
    int failed =
        s.weight == NULL || s.priority == NULL || log_scalar((MetricLog *)op, &s) < 0;
    Py_XDECREF(s.priority);
    Py_XDECREF(s.weight);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- active ------------------------------------------------------------------------
 */

static PyObject *
MetricLog_get_active(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *active = ((MetricLog *)op)->active;
    return active == NULL ? PyDict_New() : Py_NewRef(active);
}

static int
MetricLog_set_active(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    if (value != NULL && !PyDict_Check(value)) {
        PyErr_Format(PyExc_TypeError, "active was given a %.100s; expected a dict",
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    Py_XSETREF(((MetricLog *)op)->active, Py_XNewRef(value));
    return 0;
}

static PyMethodDef MetricLog_methods[] = {
    {"log_scalar", (PyCFunction)(void (*)(void))MetricLog_log_scalar,
     METH_VARARGS | METH_KEYWORDS,                                       log_scalar_doc},
    {NULL,         NULL,                                              0, NULL          },
};

static PyGetSetDef MetricLog_getset[] = {
    {"active", MetricLog_get_active, MetricLog_set_active,
     "The aggregators that log, outermost first: a dict, kept and not copied.", NULL},
    {NULL,     NULL,                 NULL,                 NULL,                NULL},
};

PyDoc_STRVAR(MetricLog_doc, "MetricLog(average)\n--\n\n"
                            "Logs into every aggregator of `active`.\n"
                            "\n"
                            "average: the subclass of AverageMeter that it makes.");

static PyType_Slot MetricLog_slots[] = {
    {Py_tp_doc,      (void *)MetricLog_doc},
    {Py_tp_init,     MetricLog_init       },
    {Py_tp_traverse, MetricLog_traverse   },
    {Py_tp_clear,    MetricLog_clear      },
    {Py_tp_dealloc,  MetricLog_dealloc    },
    {Py_tp_methods,  MetricLog_methods    },
    {Py_tp_getset,   MetricLog_getset     },
    {0,              NULL                 },
};

PyType_Spec MetricLog_spec = {
    .name = "ctrainer._C.MetricLog",
    .basicsize = sizeof(MetricLog),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = MetricLog_slots,
};
