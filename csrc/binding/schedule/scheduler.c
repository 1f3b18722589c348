/* ctrainer._C.LRScheduler: core/schedule/schedule.h with the protocol and the state_dict of
 * torch.optim.lr_scheduler.LambdaLR, as transformers makes it. */
#include "binding/schedule/scheduler.h"

#include "binding/schedule/ctpy_scheduler.h"

static int
LRScheduler_traverse(PyObject *op, visitproc visit, void *arg)
{
    LRScheduler *self = (LRScheduler *)op;
    Py_VISIT(Py_TYPE(op));
#define FIELD(name) Py_VISIT(self->name);
    LRSCHEDULER_OBJECTS(FIELD)
#undef FIELD
    return 0;
}

static int
LRScheduler_clear(PyObject *op)
{
    LRScheduler *self = (LRScheduler *)op;
#define FIELD(name) Py_CLEAR(self->name);
    LRSCHEDULER_OBJECTS(FIELD)
#undef FIELD
    return 0;
}

static void
LRScheduler_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)LRScheduler_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- stepping ----------------------------------------------------------------------
 */

/* base_lrs scaled to `epoch`, as a new list. */
static PyObject *
rates_at(const LRScheduler *self, long long epoch)
{
    const double factor = ct_schedule_value(&self->schedule, epoch);
    PyObject *rates = PySequence_List(self->base_lrs);
    for (Py_ssize_t g = 0; rates != NULL && g < PyList_GET_SIZE(rates); g++) {
        double base = PyFloat_AsDouble(PyList_GET_ITEM(rates, g));
        PyObject *rate =
            base == -1.0 && PyErr_Occurred() ? NULL : PyFloat_FromDouble(base * factor);
        if (rate == NULL || PyList_SetItem(rates, g, rate) < 0) {
            Py_CLEAR(rates);
        }
    }
    return rates;
}

static int
advance_to(PyObject *op, long long epoch)
{
    LRScheduler *self = (LRScheduler *)op;
    if (self->base_lrs == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "LRScheduler has no base_lrs: __init__ was not called");
        return -1;
    }
    PyObject *rates = rates_at(self, epoch);
    if (rates == NULL ||
        scheduler_write_rates(ctpy_state_borrow(op), self->optimizer, rates) < 0) {
        Py_XDECREF(rates);
        return -1;
    }
    Py_XSETREF(self->last_lr, rates);
    self->last_epoch = epoch;
    self->step_count++;
    return 0;
}

int
ctpy_scheduler_step(PyObject *op)
{
    return advance_to(op, ((LRScheduler *)op)->last_epoch + 1);
}

/* ---- making ------------------------------------------------------------------------
 */

typedef struct init_arguments {
    PyObject *optimizer, *warmup, *training, *options;
    const char *name;
    long long last_epoch;
} init_arguments;

/* 1 where it is, 0 where not, -1 with an exception. */
static int
is_in(PyObject *options, const char *name)
{
    PyObject *key = PyDict_Check(options) ? PyUnicode_FromString(name) : NULL;
    const int found = key == NULL ? 0 : PyDict_Contains(options, key);
    Py_XDECREF(key);
    return PyErr_Occurred() ? -1 : found;
}

/* Rates in the options of "polynomial" and the like are told in those of the optimizer:
 * the factor is what they are of its default. */
static int
take_default_rate(PyObject *op, ct_schedule *schedule, const init_arguments *a)
{
    const int i = ct_schedule_find(schedule, "lr_init");
    PyObject *defaults, *rate;
    int found;
    if (!ct_schedule_takes(schedule, (size_t)i)) {
        return 0;
    }
    found = is_in(a->options, "lr_init");
    if (found > 0) {
        PyErr_SetString(PyExc_ValueError, "lr_init is no option of a scheduler: it is "
                                          "the optimizer's defaults['lr']");
    }
    if (found != 0) {
        return -1;
    }
    found = ctpy_lookup(a->optimizer, ctpy_state_borrow(op)->str_defaults, &defaults);
    if (found < 1) {
        return found;
    }
    rate = PyMapping_GetItemString(defaults, "lr");
    Py_DECREF(defaults);
    found = rate == NULL      ? -1
            : rate == Py_None ? 0
                              : ctpy_schedule_set_option(schedule, "lr_init", rate);
    Py_XDECREF(rate);
    return found;
}

/* A count of steps that get_scheduler is always given: kinds that do not read it pass
 * it over, as transformers' do. */
static int
take_steps(ct_schedule *schedule, const char *name, PyObject *steps,
           const init_arguments *a)
{
    const int i = ct_schedule_find(schedule, name);
    if (steps == Py_None || !ct_schedule_takes(schedule, (size_t)i)) {
        return 0;
    }
    const int twice = is_in(a->options, name);
    if (twice > 0) {
        PyErr_Format(PyExc_ValueError, "%s is given twice: by itself and in options",
                     name);
    }
    return twice != 0 ? -1 : ctpy_schedule_set_option(schedule, name, steps);
}

static int
make_schedule(PyObject *op, ct_schedule *schedule, const init_arguments *a)
{
    ct_error err;
    if (ct_schedule_init(schedule, a->name, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (ct_schedule_prefix(schedule)[0] != '\0') {
        PyErr_Format(PyExc_ValueError,
                     "name is '%.100s', which gives a rate; expected one of "
                     "transformers' schedules, which give a factor",
                     a->name);
        return -1;
    }
    if (take_default_rate(op, schedule, a) < 0 ||
        take_steps(schedule, "num_warmup_steps", a->warmup, a) < 0 ||
        take_steps(schedule, "num_training_steps", a->training, a) < 0 ||
        ctpy_schedule_set_options(schedule, a->options) < 0) {
        return -1;
    }
    return ct_schedule_finish(schedule, &err) == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* The groups' initial rates as a new list of floats. From the start they are the
 * rates of now, noted as initial_lr unless an earlier scheduler has done so. */
static PyObject *
initial_rates(PyObject *op, PyObject *optimizer, long long last_epoch)
{
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *groups = scheduler_groups(ctpy_state_borrow(op), optimizer),
             *rates = NULL;
    if (groups != NULL) {
        rates = PyList_New(PyTuple_GET_SIZE(groups));
    }
    for (Py_ssize_t g = 0; rates != NULL && g < PyTuple_GET_SIZE(groups); g++) {
        PyObject *rate = scheduler_group_rate(
            groups, g, last_epoch == -1 ? state->str_lr : state->str_initial_lr);
        if (rate != NULL && last_epoch == -1) {
            PyObject *kept = PyDict_SetDefault(PyTuple_GET_ITEM(groups, g),
                                               state->str_initial_lr, rate);
            Py_SETREF(rate, kept == NULL ? NULL : PyNumber_Float(kept));
        }
        if (rate == NULL) {
            Py_CLEAR(rates);
            break;
        }
        PyList_SET_ITEM(rates, g, rate);
    }
    Py_XDECREF(groups);
    return rates;
}

static int
LRScheduler_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "optimizer",  "name", "num_warmup_steps", "num_training_steps", "options",
        "last_epoch", NULL};
    LRScheduler *self = (LRScheduler *)op;
    init_arguments a = {
        .warmup = Py_None, .training = Py_None, .options = Py_None, .last_epoch = -1};
    ct_schedule schedule;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|OOOL:LRScheduler", names,
                                     &a.optimizer, &a.name, &a.warmup, &a.training,
                                     &a.options, &a.last_epoch)) {
        return -1;
    }
    if (a.last_epoch < -1) {
        PyErr_Format(PyExc_ValueError, "last_epoch must be >= -1, got %lld",
                     a.last_epoch);
        return -1;
    }
    if (make_schedule(op, &schedule, &a) < 0) {
        return -1;
    }
    PyObject *rates = initial_rates(op, a.optimizer, a.last_epoch);
    if (rates == NULL) {
        return -1;
    }
    Py_XSETREF(self->optimizer, Py_NewRef(a.optimizer));
    Py_XSETREF(self->base_lrs, rates);
    self->schedule = schedule;
    self->step_count = 0;
    return advance_to(op, a.last_epoch + 1);
}

/* ---- methods -----------------------------------------------------------------------
 */

PyDoc_STRVAR(step_doc, "step($self, /)\n--\n\n"
                       "Go one step on and write the new rate to every group.");

static PyObject *
LRScheduler_step(PyObject *op, PyObject *Py_UNUSED(unused))
{
    if (ctpy_scheduler_step(op) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(get_last_lr_doc,
             "get_last_lr($self, /)\n--\n\n"
             "Return the rates that the last step wrote, one a group.");

static PyObject *
LRScheduler_get_last_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *rates = ((LRScheduler *)op)->last_lr;
    return rates == NULL ? PyList_New(0) : PySequence_List(rates);
}

static PyMethodDef LRScheduler_methods[] = {
    SCHEDULER_METHOD("step", LRScheduler_step, METH_NOARGS, step_doc),
    SCHEDULER_METHOD("get_last_lr", LRScheduler_get_last_lr, METH_NOARGS,
                     get_last_lr_doc),
    SCHEDULER_METHOD("state_dict", LRScheduler_state_dict, METH_NOARGS,
                     LRScheduler_state_dict_doc),
    SCHEDULER_METHOD("load_state_dict", LRScheduler_load_state_dict, METH_O,
                     LRScheduler_load_state_dict_doc),
    SCHEDULER_METHOD("__setstate__", LRScheduler_setstate, METH_O,
                     LRScheduler_setstate_doc),
    SCHEDULER_METHOD("__reduce__", LRScheduler_reduce, METH_NOARGS,
                     LRScheduler_reduce_doc),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef LRScheduler_members[] = {
    {"optimizer", T_OBJECT_EX, offsetof(LRScheduler, optimizer), READONLY,
     "Whose groups' rates it writes."},
    {"base_lrs", T_OBJECT_EX, offsetof(LRScheduler, base_lrs), 0,
     "Each group's rate where the schedule's factor is 1."},
    {"_last_lr", T_OBJECT_EX, offsetof(LRScheduler, last_lr), READONLY, NULL},
    {"last_epoch", T_LONGLONG, offsetof(LRScheduler, last_epoch), 0,
     "Steps done since the start."},
    {"_step_count", T_LONGLONG, offsetof(LRScheduler, step_count), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    LRScheduler_doc,
    "LRScheduler(optimizer, name, num_warmup_steps=None,\n"
    "            num_training_steps=None, options=None, last_epoch=-1)\n--\n\n"
    "One of transformers' learning-rate schedules, with torch's protocol.\n\n"
    "name and options, a dict, are those of transformers.get_scheduler. Steps\n"
    "that the schedule does not read are passed over; those that it needs and\n"
    "an option that it does not have raise ValueError.");

static PyType_Slot LRScheduler_slots[] = {
    {Py_tp_doc,      (void *)LRScheduler_doc},
    {Py_tp_new,      PyType_GenericNew      },
    {Py_tp_init,     LRScheduler_init       },
    {Py_tp_traverse, LRScheduler_traverse   },
    {Py_tp_clear,    LRScheduler_clear      },
    {Py_tp_dealloc,  LRScheduler_dealloc    },
    {Py_tp_methods,  LRScheduler_methods    },
    {Py_tp_members,  LRScheduler_members    },
    {0,              NULL                   },
};

PyType_Spec LRScheduler_spec = {
    .name = "ctrainer._C.LRScheduler",
    .basicsize = sizeof(LRScheduler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = LRScheduler_slots,
};
