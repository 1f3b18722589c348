/* What schedulers that are stepped with an evaluation's metric share. */
#include "binding/scheduler_metric.h"

int
MetricScheduler_traverse(PyObject *op, visitproc visit, void *arg)
{
    MetricScheduler *self = (MetricScheduler *)op;
    Py_VISIT(Py_TYPE(op));
#define FIELD(name) Py_VISIT(self->name);
    METRIC_OBJECTS(FIELD)
#undef FIELD
    return 0;
}

int
MetricScheduler_clear(PyObject *op)
{
    MetricScheduler *self = (MetricScheduler *)op;
#define FIELD(name) Py_CLEAR(self->name);
    METRIC_OBJECTS(FIELD)
#undef FIELD
    return 0;
}

void
MetricScheduler_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)MetricScheduler_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* *epoch is the one that is given, or the next. */
static int
parse_step(PyObject *op, PyObject *args, PyObject *kwargs, double *metric,
           int64_t *epoch)
{
    static char *names[] = {"metrics", "epoch", NULL};
    PyObject *metrics, *given = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:step", names, &metrics,
                                     &given)) {
        return -1;
    }
    PyObject *number = PyNumber_Float(metrics); /* a tensor, too */
    if (number == NULL) {
        return -1;
    }
    *metric = PyFloat_AS_DOUBLE(number);
    Py_DECREF(number);
    *epoch = given == Py_None ? ((MetricScheduler *)op)->last_epoch + 1
                              : PyLong_AsLongLong(given);
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *
MetricScheduler_step(PyObject *op, PyObject *args, PyObject *kwargs,
                     metric_step *step_from)
{
    double metric;
    int64_t epoch;
    if (parse_step(op, args, kwargs, &metric, &epoch) < 0) {
        return NULL;
    }
    PyObject *before =
        scheduler_rates(ctpy_state_borrow(op), ((MetricScheduler *)op)->optimizer);
    int result = before == NULL ? -1 : step_from(op, metric, epoch, before);
    Py_XDECREF(before);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
list_of(const double *numbers, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t g = 0; list != NULL && g < n; g++) {
        PyObject *number = PyFloat_FromDouble(numbers[g]);
        if (number == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, g, number);
    }
    return list;
}

int
MetricScheduler_write(PyObject *op, const double *rates, PyObject *before,
                      int64_t epoch)
{
    MetricScheduler *self = (MetricScheduler *)op;
    PyObject *after = list_of(rates, PyList_GET_SIZE(before));
    if (after == NULL || scheduler_write_rates(ctpy_state_borrow(op), self->optimizer,
                                               after, before) < 0) {
        Py_XDECREF(after);
        return -1;
    }
    Py_XSETREF(self->last_lr, after);
    self->last_epoch = epoch;
    return 0;
}

PyObject *
MetricScheduler_copy(PyObject *list)
{
    return list == NULL ? PyList_New(0) : PySequence_List(list);
}

const char MetricScheduler_get_last_lr_doc[] =
    "get_last_lr($self, /)\n--\n\nReturn the groups' rates after the last step.";

PyObject *
MetricScheduler_get_last_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return MetricScheduler_copy(((MetricScheduler *)op)->last_lr);
}

const char MetricScheduler_setstate_doc[] =
    "__setstate__($self, state, /)\n--\n\nLoad a state_dict.";

PyObject *
MetricScheduler_setstate(PyObject *op, PyObject *state)
{
    return PyObject_CallMethod(op, "load_state_dict", "O", state);
}

const char MetricScheduler_reduce_doc[] =
    "__reduce__($self, /)\n--\n\nHelper for pickle and copy.";

PyObject *
MetricScheduler_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *optimizer = ((MetricScheduler *)op)->optimizer;
    if (optimizer == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "%.200s without an optimizer",
                            Py_TYPE(op)->tp_name);
    }
    return Py_BuildValue("O(O)N", Py_TYPE(op), optimizer,
                         PyObject_CallMethod(op, "state_dict", NULL));
}
