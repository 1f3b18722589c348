/* ctrainer._C.LRScheduler: core/ct_schedule.h with the protocol and the state_dict of
 * torch.optim.lr_scheduler.LambdaLR, as transformers makes it. */
#include "binding/scheduler.h"

#include "binding/ctpy_scheduler.h"

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

/* ---- groups ------------------------------------------------------------------------
 */

/* param_groups as a new tuple of dicts: a hook cannot take one away meanwhile. */
static PyObject *
groups_of(PyObject *op, PyObject *optimizer)
{
    if (optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "LRScheduler has no optimizer: __init__ was not called");
        return NULL;
    }
    PyObject *found =
        PyObject_GetAttr(optimizer, ctpy_state_borrow(op)->str_param_groups);
    PyObject *groups = found == NULL ? NULL : PySequence_Tuple(found);
    Py_XDECREF(found);
    for (Py_ssize_t g = 0; groups != NULL && g < PyTuple_GET_SIZE(groups); g++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(groups, g))) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zd] is a %.200s; expected a dict", g,
                         Py_TYPE(PyTuple_GET_ITEM(groups, g))->tp_name);
            Py_CLEAR(groups);
        }
    }
    return groups;
}

/* group[key] as a new float object. */
static PyObject *
group_rate(PyObject *group, PyObject *key, Py_ssize_t g)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (value == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_KeyError,
                         "param_groups[%zd] has no %R: load the optimizer's state_dict "
                         "before a scheduler that starts at last_epoch >= 0",
                         g, key);
        }
        return NULL;
    }
    Py_INCREF(value);
    PyObject *rate = PyNumber_Float(value);
    Py_DECREF(value);
    return rate;
}

/* A rate kept in a tensor is filled, so that whoever holds the tensor sees it. */
static int
write_rate(PyObject *op, PyObject *group, PyObject *rate)
{
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *old = PyDict_GetItemWithError(group, state->str_lr);
    if (old == NULL ? PyErr_Occurred() != NULL : PyFloat_CheckExact(old)) {
        return old == NULL ? -1 : PyDict_SetItem(group, state->str_lr, rate);
    }
    PyObject *fill;
    int tensor = old == NULL ? 0 : ctpy_lookup(old, state->str_fill_, &fill);
    if (tensor < 1) {
        return tensor < 0 ? -1 : PyDict_SetItem(group, state->str_lr, rate);
    }
    PyObject *done = PyObject_CallOneArg(fill, rate);
    Py_DECREF(fill);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* ---- stepping ----------------------------------------------------------------------
 */

/* base_lrs scaled to `epoch`, as a new list. */
static PyObject *
rates_at(const LRScheduler *self, long long epoch)
{
    const double factor = ct_schedule_factor(&self->schedule, epoch);
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

int
scheduler_write_rates(PyObject *op, PyObject *rates)
{
    PyObject *groups = groups_of(op, ((LRScheduler *)op)->optimizer);
    int result = groups == NULL ? -1 : 0;
    if (result == 0 && PyTuple_GET_SIZE(groups) != PyList_GET_SIZE(rates)) {
        PyErr_Format(PyExc_ValueError,
                     "the optimizer has %zd groups, and had %zd when the scheduler was "
                     "made: make a new scheduler after add_param_group()",
                     PyTuple_GET_SIZE(groups), PyList_GET_SIZE(rates));
        result = -1;
    }
    for (Py_ssize_t g = 0; result == 0 && g < PyTuple_GET_SIZE(groups); g++) {
        result = write_rate(op, PyTuple_GET_ITEM(groups, g), PyList_GET_ITEM(rates, g));
    }
    Py_XDECREF(groups);
    return result;
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
    if (rates == NULL || scheduler_write_rates(op, rates) < 0) {
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

static int
parse_schedule(const char *name, ct_schedule *schedule)
{
    ct_error err;
    schedule->kind = ct_schedule_from_name(name);
    if (schedule->kind == CT_SCHEDULE_KIND_COUNT) {
        PyErr_Format(PyExc_ValueError,
                     "name is '%.100s'; expected 'constant', 'constant_with_warmup', "
                     "'linear' or 'cosine'",
                     name);
        return -1;
    }
    return ct_schedule_check(schedule, &err) == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* The groups' initial rates as a new list of floats. From the start they are the
 * rates of now, noted as initial_lr unless an earlier scheduler has done so. */
static PyObject *
initial_rates(PyObject *op, PyObject *optimizer, long long last_epoch)
{
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *groups = groups_of(op, optimizer), *rates = NULL;
    if (groups != NULL) {
        rates = PyList_New(PyTuple_GET_SIZE(groups));
    }
    for (Py_ssize_t g = 0; rates != NULL && g < PyTuple_GET_SIZE(groups); g++) {
        PyObject *group = PyTuple_GET_ITEM(groups, g);
        PyObject *rate = last_epoch == -1 ? group_rate(group, state->str_lr, g)
                                          : group_rate(group, state->str_initial_lr, g);
        if (rate != NULL && last_epoch == -1) {
            PyObject *kept = PyDict_SetDefault(group, state->str_initial_lr, rate);
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
        "optimizer",  "name", "num_warmup_steps", "num_training_steps", "num_cycles",
        "last_epoch", NULL};
    LRScheduler *self = (LRScheduler *)op;
    ct_schedule schedule = {.num_cycles = 0.5};
    PyObject *optimizer;
    const char *name;
    long long warmup = 0, training = 0, last_epoch = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|LLdL:LRScheduler", names,
                                     &optimizer, &name, &warmup, &training,
                                     &schedule.num_cycles, &last_epoch)) {
        return -1;
    }
    schedule.num_warmup_steps = warmup;
    schedule.num_training_steps = training;
    if (last_epoch < -1) {
        PyErr_Format(PyExc_ValueError, "last_epoch must be >= -1, got %lld",
                     last_epoch);
        return -1;
    }
    if (parse_schedule(name, &schedule) < 0) {
        return -1;
    }
    PyObject *rates = initial_rates(op, optimizer, last_epoch);
    if (rates == NULL) {
        return -1;
    }
    Py_XSETREF(self->optimizer, Py_NewRef(optimizer));
    Py_XSETREF(self->base_lrs, rates);
    self->schedule = schedule;
    self->step_count = 0;
    return advance_to(op, last_epoch + 1);
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
    {"step",            LRScheduler_step,            METH_NOARGS, step_doc                  },
    {"get_last_lr",     LRScheduler_get_last_lr,     METH_NOARGS, get_last_lr_doc           },
    {"state_dict",      LRScheduler_state_dict,      METH_NOARGS, LRScheduler_state_dict_doc},
    {"load_state_dict", LRScheduler_load_state_dict, METH_O,
     LRScheduler_load_state_dict_doc                                                        },
    {"__setstate__",    LRScheduler_setstate,        METH_O,      LRScheduler_setstate_doc  },
    {"__reduce__",      LRScheduler_reduce,          METH_NOARGS, LRScheduler_reduce_doc    },
    {NULL,              NULL,                        0,           NULL                      },
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

PyDoc_STRVAR(LRScheduler_doc,
             "LRScheduler(optimizer, name, num_warmup_steps=0, num_training_steps=0,\n"
             "            num_cycles=0.5, last_epoch=-1)\n--\n\n"
             "Learning-rate schedule: 'constant', 'constant_with_warmup', 'linear', "
             "'cosine'.\n\n"
             "The rates of transformers.get_scheduler(name), with torch's protocol.");

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
