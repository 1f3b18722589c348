/* ctrainer._C.Schedule, a schedule of core/schedule/schedule.h as a function, and
 * ctrainer._C.LRScheduler, the same with the protocol and the state_dict of
 * torch.optim.lr_scheduler.LambdaLR, as transformers makes it.
 *
 * The formulas are the core's. A step reads the attributes of the optimizer anew, as
 * schedulers and users write to param_groups at any time, and changes the scheduler
 * only after every group has its learning rate. */
#include "binding/schedule/scheduler.h"
#include "binding/runtime/objects.h"

#include "core/schedule/schedule.h"

#include <math.h>
#include <string.h>

/* ---- options as Python's --------------------------------------------------------- */

PyDoc_STRVAR(name_doc, "Its name, the family's prefix included.");
PyDoc_STRVAR(options_doc, "A new dict of the options in force.");

/* Sets an option to a Python number or word. */
static int
set_option(ct_schedule *schedule, const char *name, PyObject *value)
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
    /* Before numbers: bool is a subclass of int. */
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

/* Sets the options in a dict, or in None; a value of None is skipped. Returns 0, or -1
 * with a ValueError or TypeError that names the option. */
static int
set_options(ct_schedule *schedule, PyObject *options)
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
            result = set_option(schedule, name, value);
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

/* The options of the kind that have a value, as a new dict. */
static PyObject *
options_of(const ct_schedule *schedule)
{
    PyObject *options = PyDict_New();
    const ct_schedule_option *option;
    for (size_t i = 0;
         options != NULL && (option = ct_schedule_option_at(schedule, i)) != NULL;
         i++) {
        /* NaN stands for an option without a value; a copy by these options has none
         * either. */
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

/* ---- Schedule -------------------------------------------------------------------- */

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
    if (set_options(&core, options) < 0) {
        return NULL;
    }
    if (ct_schedule_finish(&core, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    /* Last, so that no unfinished schedule is ever visible. */
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
    return options_of(&((Schedule *)op)->core);
}

PyDoc_STRVAR(reduce_doc, "__reduce__($self, /)\n--\n\nHelper for pickle and copy.");

/* Name and options say everything: the constants are derived from them. */
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

/* ---- LRScheduler ----------------------------------------------------------------- */

/* An entry of a table of methods; function may take keywords. */
#define SCHEDULER_METHOD(name, function, flags, doc)                                   \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

/* The Python objects of a scheduler, for init, traverse and clear. */
#define LRSCHEDULER_OBJECTS(X)                                                         \
    X(optimizer) /* NULL before __init__; has param_groups */                          \
    X(base_lrs)  /* list of float: each group's learning rate at factor 1 */           \
    X(last_lr)   /* list of float: written by the last step */

typedef struct LRScheduler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    LRSCHEDULER_OBJECTS(FIELD)
#undef FIELD
    ct_schedule schedule; /* kind is NULL before __init__ */
    int64_t last_epoch;   /* scheduler steps done: the step of last_lr */
    int64_t step_count;   /* calls of step(), with that of __init__ */
} LRScheduler;

PyDoc_STRVAR(
    LRScheduler_doc,
    "LRScheduler(optimizer, name, num_warmup_steps=None,\n"
    "            num_training_steps=None, options=None, last_epoch=-1)\n--\n\n"
    "One of transformers' learning-rate schedules, with torch's protocol.\n\n"
    "Args:\n"
    "    optimizer: Its param_groups are dicts with \"lr\".\n"
    "    name, options: As those of transformers.get_scheduler; options is a dict.\n"
    "    num_warmup_steps, num_training_steps: Steps that the schedule does not read\n"
    "        are ignored; those that it needs raise ValueError where they are "
    "missing.\n"
    "    last_epoch: The step before the first, to resume.\n\n"
    "Example:\n"
    "    >>> import torch\n"
    "    >>> from ctrainer.optim import LRScheduler, SGD\n"
    "    >>> optimizer = SGD(torch.nn.Linear(3, 2).parameters(), lr=1.0)\n"
    "    >>> LRScheduler(optimizer, 'linear', 0, 4).get_last_lr()\n"
    "    [1.0]");

CTPY_LIFETIME(LRScheduler, LRSCHEDULER_OBJECTS)

/* ---- stepping -------------------------------------------------------------------- */

/* base_lrs scaled to `epoch`, as a new list. */
static PyObject *
lrs_at(const LRScheduler *self, long long epoch)
{
    const double factor = ct_schedule_value(&self->schedule, epoch);
    /* base_lrs can be set from Python, so neither length nor types are certain. */
    PyObject *lrs = PySequence_List(self->base_lrs);
    for (Py_ssize_t g = 0; lrs != NULL && g < PyList_GET_SIZE(lrs); g++) {
        double base = PyFloat_AsDouble(PyList_GET_ITEM(lrs, g));
        PyObject *lr =
            base == -1.0 && PyErr_Occurred() ? NULL : PyFloat_FromDouble(base * factor);
        if (lr == NULL || PyList_SetItem(lrs, g, lr) < 0) {
            Py_CLEAR(lrs);
        }
    }
    return lrs;
}

/* param_groups as a new tuple of dicts: a hook cannot take one away meanwhile.
 * optimizer may be NULL, which raises. */
static PyObject *
scheduler_groups(const ctpy_state *state, PyObject *optimizer)
{
    if (optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the scheduler has no optimizer: __init__ was not called");
        return NULL;
    }
    PyObject *found = PyObject_GetAttr(optimizer, state->str_param_groups);
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

/* A learning rate in a tensor is filled in place, visible to all users of the tensor. A
 * plain float, by far the most frequent, needs no lookup. */
static int
write_lr(const ctpy_state *state, PyObject *group, PyObject *lr)
{
    PyObject *old = PyDict_GetItemWithError(group, state->str_lr);
    if (old == NULL ? PyErr_Occurred() != NULL : PyFloat_CheckExact(old)) {
        return old == NULL ? -1 : PyDict_SetItem(group, state->str_lr, lr);
    }
    PyObject *fill;
    int tensor = old == NULL ? 0 : ctpy_lookup(old, state->str_fill_, &fill);
    if (tensor < 1) {
        return tensor < 0 ? -1 : PyDict_SetItem(group, state->str_lr, lr);
    }
    PyObject *done = PyObject_CallOneArg(fill, lr);
    Py_DECREF(fill);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Writes learning rates, a list with a float for each group. */
static int
scheduler_write_lrs(const ctpy_state *state, PyObject *optimizer, PyObject *lrs)
{
    PyObject *groups = scheduler_groups(state, optimizer);
    int result = groups == NULL ? -1 : 0;
    /* Before the first write, so that no group is left behind. */
    if (result == 0 && PyTuple_GET_SIZE(groups) != PyList_GET_SIZE(lrs)) {
        PyErr_Format(PyExc_ValueError,
                     "the optimizer has %zd groups, and had %zd when the scheduler was "
                     "made: make a new scheduler after add_param_group()",
                     PyTuple_GET_SIZE(groups), PyList_GET_SIZE(lrs));
        result = -1;
    }
    for (Py_ssize_t g = 0; result == 0 && g < PyTuple_GET_SIZE(groups); g++) {
        result = write_lr(state, PyTuple_GET_ITEM(groups, g), PyList_GET_ITEM(lrs, g));
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
    PyObject *lrs = lrs_at(self, epoch);
    if (lrs == NULL ||
        scheduler_write_lrs(ctpy_state_borrow(op), self->optimizer, lrs) < 0) {
        Py_XDECREF(lrs);
        return -1;
    }
    /* Only now, so that a step that raises can be repeated. */
    Py_XSETREF(self->last_lr, lrs);
    self->last_epoch = epoch;
    self->step_count++;
    return 0;
}

int
ctpy_scheduler_step(PyObject *op)
{
    return advance_to(op, ((LRScheduler *)op)->last_epoch + 1);
}

int
ctpy_scheduler_step_back(PyObject *op)
{
    LRScheduler *self = (LRScheduler *)op;
    const int result = advance_to(op, self->last_epoch - 1);
    self->step_count -= result == 0 ? 2 : 0;
    return result;
}

/* ---- making ---------------------------------------------------------------------- */

typedef struct init_arguments {
    PyObject *optimizer, *warmup, *training, *options;
    const char *name;
    long long last_epoch;
} init_arguments;

/* 1: yes, 0: no, -1 with an exception. */
static int
is_in(PyObject *options, const char *name)
{
    PyObject *key = PyDict_Check(options) ? PyUnicode_FromString(name) : NULL;
    const int found = key == NULL ? 0 : PyDict_Contains(options, key);
    Py_XDECREF(key);
    return PyErr_Occurred() ? -1 : found;
}

/* Options of "polynomial" and the like hold learning rates; the factor divides them by
 * the optimizer's default. */
static int
take_default_lr(PyObject *op, ct_schedule *schedule, const init_arguments *a)
{
    const int i = ct_schedule_find(schedule, "lr_init");
    PyObject *defaults, *lr;
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
    lr = PyMapping_GetItemString(defaults, "lr");
    Py_DECREF(defaults);
    found = lr == NULL ? -1 : lr == Py_None ? 0 : set_option(schedule, "lr_init", lr);
    Py_XDECREF(lr);
    return found;
}

/* get_scheduler always receives the count of steps; kinds without this option ignore
 * it, as transformers' do. */
static int
take_steps(ct_schedule *schedule, const char *name, PyObject *steps,
           const init_arguments *a)
{
    const int i = ct_schedule_find(schedule, name);
    if (steps == Py_None || !ct_schedule_takes(schedule, (size_t)i)) {
        return 0;
    }
    /* Two values for one option may differ, and neither is the obvious one. */
    const int twice = is_in(a->options, name);
    if (twice > 0) {
        PyErr_Format(PyExc_ValueError, "%s is given twice: by itself and in options",
                     name);
    }
    return twice != 0 ? -1 : set_option(schedule, name, steps);
}

static int
make_schedule(PyObject *op, ct_schedule *schedule, const init_arguments *a)
{
    ct_error err;
    if (ct_schedule_init(schedule, a->name, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    /* base_lr * factor is the protocol of LambdaLR; a learning rate is no factor. */
    if (ct_schedule_prefix(schedule)[0] != '\0') {
        PyErr_Format(PyExc_ValueError,
                     "name is '%.100s', which returns a learning rate; expected one of "
                     "transformers' schedules, which give a factor",
                     a->name);
        return -1;
    }
    if (take_default_lr(op, schedule, a) < 0 ||
        take_steps(schedule, "num_warmup_steps", a->warmup, a) < 0 ||
        take_steps(schedule, "num_training_steps", a->training, a) < 0 ||
        set_options(schedule, a->options) < 0) {
        return -1;
    }
    return ct_schedule_finish(schedule, &err) == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* groups[g][key] as a new float. */
static PyObject *
scheduler_group_lr(PyObject *groups, Py_ssize_t g, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(groups, g), key);
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
    PyObject *lr = PyNumber_Float(value);
    Py_DECREF(value);
    return lr;
}

/* The groups' initial learning rates as a new list of floats: at the start the current
 * learning rates, noted as initial_lr unless an earlier scheduler has noted them. */
static PyObject *
initial_lrs(PyObject *op, PyObject *optimizer, long long last_epoch)
{
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *groups = scheduler_groups(ctpy_state_borrow(op), optimizer), *lrs = NULL;
    if (groups != NULL) {
        lrs = PyList_New(PyTuple_GET_SIZE(groups));
    }
    for (Py_ssize_t g = 0; lrs != NULL && g < PyTuple_GET_SIZE(groups); g++) {
        PyObject *lr = scheduler_group_lr(
            groups, g, last_epoch == -1 ? state->str_lr : state->str_initial_lr);
        if (lr != NULL && last_epoch == -1) {
            /* torch's own key, so that schedulers of both kinds may follow each
             * other. */
            PyObject *kept = PyDict_SetDefault(PyTuple_GET_ITEM(groups, g),
                                               state->str_initial_lr, lr);
            Py_SETREF(lr, kept == NULL ? NULL : PyNumber_Float(kept));
        }
        if (lr == NULL) {
            Py_CLEAR(lrs);
            break;
        }
        PyList_SET_ITEM(lrs, g, lr);
    }
    Py_XDECREF(groups);
    return lrs;
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
    PyObject *lrs = initial_lrs(op, a.optimizer, a.last_epoch);
    if (lrs == NULL) {
        return -1;
    }
    Py_XSETREF(self->optimizer, Py_NewRef(a.optimizer));
    Py_XSETREF(self->base_lrs, lrs);
    self->schedule = schedule;
    /* advance_to makes it 1, as torch's first step in __init__ does. */
    self->step_count = 0;
    return advance_to(op, a.last_epoch + 1);
}

/* ---- methods --------------------------------------------------------------------- */

PyDoc_STRVAR(step_doc, "step($self, /)\n--\n\n"
                       "Take one step and write the new learning rate of every group.");

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
             "Return the learning rates that the last step wrote, one a group.");

static PyObject *
LRScheduler_get_last_lr(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *lrs = ((LRScheduler *)op)->last_lr;
    return lrs == NULL ? PyList_New(0) : PySequence_List(lrs);
}

static const char LRScheduler_state_dict_doc[] =
    "state_dict($self, /)\n--\n\n"
    "Return what torch's LambdaLR would: counts and learning rates, not the optimizer.";

/* torch keeps None for a function and the attributes of anything else that is called:
 * transformers' constant schedule is a function, and the rest are partial objects. */
static int
is_function(const LRScheduler *self)
{
    return self->schedule.kind != NULL &&
           strcmp(ct_schedule_name(&self->schedule), "constant") == 0;
}

static PyObject *
LRScheduler_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    LRScheduler *self = (LRScheduler *)op;
    const int constant = is_function(self);
    PyObject *none = PyList_New(0), *lambdas = PyList_New(0), *result = NULL;
    PyObject *base = self->base_lrs == NULL ? none : self->base_lrs;
    PyObject *last = self->last_lr == NULL ? none : self->last_lr;
    Py_ssize_t n = none == NULL || lambdas == NULL ? -1 : PySequence_Size(base);
    for (Py_ssize_t g = 0; g < n; g++) {
        /* An entry for each group, as LambdaLR has a function for each. */
        PyObject *entry = constant ? Py_NewRef(Py_None) : PyDict_New();
        n = entry == NULL || PyList_Append(lambdas, entry) < 0 ? -1 : n;
        Py_XDECREF(entry);
    }
    if (n >= 0) {
        result = Py_BuildValue("{sNsLsLsOsOsNsO}", "base_lrs", PySequence_List(base),
                               "last_epoch", (long long)self->last_epoch, "_step_count",
                               (long long)self->step_count, "_is_initial", Py_False,
                               "_get_lr_called_within_step", Py_False, "_last_lr",
                               PySequence_List(last), "lr_lambdas", lambdas);
    }
    Py_XDECREF(lambdas);
    Py_XDECREF(none);
    return result;
}

static const char LRScheduler_load_state_dict_doc[] =
    "load_state_dict($self, state_dict, /)\n--\n\n"
    "Load what state_dict() gave, of this type or of torch's LambdaLR.\n\n"
    "The groups' learning rates come with the optimizer's own state_dict. Raises\n"
    "KeyError, ValueError or TypeError, nothing changed.";

/* transformers' schedules keep nothing in lr_lambdas: each entry is None or {}. */
static int
reject_lambdas(PyObject *state)
{
    PyObject *lambdas = PyMapping_GetItemString(state, "lr_lambdas");
    PyObject *list = lambdas == NULL ? NULL : PySequence_List(lambdas);
    int result = list == NULL ? -1 : 0;
    for (Py_ssize_t g = 0; result == 0 && g < PyList_GET_SIZE(list); g++) {
        int filled = PyObject_IsTrue(PyList_GET_ITEM(list, g));
        if (filled > 0) {
            PyErr_Format(PyExc_ValueError,
                         "state_dict['lr_lambdas'][%zd] is %R; expected None or {}: it "
                         "belongs to a schedule of another kind",
                         g, PyList_GET_ITEM(list, g));
        }
        result = filled == 0 ? 0 : -1;
    }
    Py_XDECREF(list);
    Py_XDECREF(lambdas);
    return result;
}

/* state[key] as a new list of n floats, one per group. */
static PyObject *
state_lrs(PyObject *state, const char *key, Py_ssize_t n)
{
    PyObject *found = PyMapping_GetItemString(state, key);
    PyObject *lrs = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    if (lrs != NULL && PyList_GET_SIZE(lrs) != n) {
        PyErr_Format(PyExc_ValueError,
                     "state_dict['%s'] has %zd learning rates; the optimizer has %zd "
                     "groups",
                     key, PyList_GET_SIZE(lrs), n);
        Py_CLEAR(lrs);
    }
    for (Py_ssize_t g = 0; lrs != NULL && g < n; g++) {
        PyObject *lr = PyNumber_Float(PyList_GET_ITEM(lrs, g));
        if (lr == NULL || PyList_SetItem(lrs, g, lr) < 0) {
            Py_CLEAR(lrs);
        }
    }
    return lrs;
}

static int
state_integer(PyObject *state, const char *key, int64_t *value)
{
    PyObject *found = PyMapping_GetItemString(state, key);
    *value = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *
LRScheduler_load_state_dict(PyObject *op, PyObject *state)
{
    LRScheduler *self = (LRScheduler *)op;
    int64_t last_epoch, step_count;
    Py_ssize_t n = self->last_lr == NULL ? 0 : PySequence_Size(self->last_lr);
    /* Everything is read before the first field changes. */
    PyObject *base = n < 0 ? NULL : state_lrs(state, "base_lrs", n);
    PyObject *last = base == NULL ? NULL : state_lrs(state, "_last_lr", n);
    if (last == NULL || reject_lambdas(state) < 0 ||
        state_integer(state, "last_epoch", &last_epoch) < 0 ||
        state_integer(state, "_step_count", &step_count) < 0) {
        Py_XDECREF(last);
        Py_XDECREF(base);
        return NULL;
    }
    Py_XSETREF(self->base_lrs, base);
    Py_XSETREF(self->last_lr, last);
    self->last_epoch = last_epoch;
    self->step_count = step_count;
    Py_RETURN_NONE;
}

static const char LRScheduler_setstate_doc[] =
    "__setstate__($self, state, /)\n--\n\n"
    "Load a state_dict and write its learning rates to the groups.";

static PyObject *
LRScheduler_setstate(PyObject *op, PyObject *state)
{
    PyObject *loaded = LRScheduler_load_state_dict(op, state);
    if (loaded != NULL && ((LRScheduler *)op)->last_lr != NULL &&
        scheduler_write_lrs(ctpy_state_borrow(op), ((LRScheduler *)op)->optimizer,
                            ((LRScheduler *)op)->last_lr) < 0) {
        Py_CLEAR(loaded);
    }
    return loaded;
}

static const char LRScheduler_reduce_doc[] =
    "__reduce__($self, /)\n--\n\nHelper for pickle and copy.";

/* Without the optimizer's values; a load reads them again. */
static PyObject *
own_options(const ct_schedule *schedule)
{
    PyObject *options = options_of(schedule), *found = NULL;
    if (options != NULL &&
        (ctpy_item(options, "lr_init", &found) < 0 ||
         (found != NULL && PyDict_DelItemString(options, "lr_init") < 0))) {
        Py_CLEAR(options);
    }
    Py_XDECREF(found);
    return options;
}

static PyObject *
LRScheduler_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    LRScheduler *self = (LRScheduler *)op;
    if (self->optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "LRScheduler without an optimizer");
        return NULL;
    }
    /* Steps are among the options by now, hence None for both. */
    return Py_BuildValue("O(OsOON)N", Py_TYPE(op), self->optimizer,
                         ct_schedule_name(&self->schedule), Py_None, Py_None,
                         own_options(&self->schedule),
                         LRScheduler_state_dict(op, NULL));
}

bool
ctpy_scheduler_is_native(const ctpy_state *state, PyObject *op)
{
    if (op == NULL || !PyObject_TypeCheck(op, state->LRScheduler)) {
        return false;
    }
    PyObject *step = PyObject_GetAttrString(op, "step");
    const bool native = step != NULL && PyCFunction_Check(step) &&
                        PyCFunction_GET_SELF(step) == op &&
                        PyCFunction_GET_FUNCTION(step) == LRScheduler_step;
    if (step == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(step);
    return native;
}

/* For each group the schedule as a function of the step, as in torch's LambdaLR. */
static PyObject *
LRScheduler_get_lr_lambdas(PyObject *op, void *Py_UNUSED(closure))
{
    const LRScheduler *self = (LRScheduler *)op;
    PyTypeObject *type = ctpy_state_borrow(op)->Schedule;
    const Py_ssize_t n = self->base_lrs == NULL ? 0 : PyObject_Size(self->base_lrs);
    PyObject *schedule = n < 0 ? NULL : type->tp_alloc(type, 0);
    PyObject *list = schedule == NULL ? NULL : PyList_New(n);
    if (list != NULL) {
        ((Schedule *)schedule)->core = self->schedule;
    }
    for (Py_ssize_t g = 0; list != NULL && g < n; g++) {
        PyList_SET_ITEM(list, g, Py_NewRef(schedule));
    }
    Py_XDECREF(schedule);
    return list;
}

/* Learning rates of an optimizer's groups, for every type of scheduler. */

static const char ctpy_write_lrs_doc[] =
    "write_lrs(optimizer, lrs, /)\n--\n\n"
    "Write learning rates, a list with a float for each of optimizer.param_groups,\n"
    "to the groups' 'lr'. A tensor is filled. ValueError: one list is longer.";

static PyObject *
ctpy_write_lrs(PyObject *module, PyObject *args)
{
    PyObject *optimizer, *lrs;
    if (!PyArg_ParseTuple(args, "OO!:write_lrs", &optimizer, &PyList_Type, &lrs)) {
        return NULL;
    }
    if (scheduler_write_lrs(PyModule_GetState(module), optimizer, lrs) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The scheduler's state_dict, interchangeable with that of torch's LambdaLR. */

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
     "Whose groups' learning rates it writes."},
    {"base_lrs", T_OBJECT_EX, offsetof(LRScheduler, base_lrs), 0,
     "Each group's learning rate where the schedule's factor is 1."},
    {"_last_lr", T_OBJECT_EX, offsetof(LRScheduler, last_lr), READONLY, NULL},
    {"last_epoch", T_LONGLONG, offsetof(LRScheduler, last_epoch), 0,
     "Steps done since the start."},
    {"_step_count", T_LONGLONG, offsetof(LRScheduler, step_count), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef LRScheduler_getset[] = {
    {"lr_lambdas", LRScheduler_get_lr_lambdas, NULL,
     "A Schedule for each group: the factor of its base_lr at a step.", NULL},
    {NULL,         NULL,                       NULL, NULL,              NULL},
};

static PyType_Slot LRScheduler_slots[] = {
    {Py_tp_doc,      (void *)LRScheduler_doc},
    {Py_tp_new,      PyType_GenericNew      },
    {Py_tp_init,     LRScheduler_init       },
    {Py_tp_traverse, LRScheduler_traverse   },
    {Py_tp_clear,    LRScheduler_clear      },
    {Py_tp_dealloc,  LRScheduler_dealloc    },
    {Py_tp_methods,  LRScheduler_methods    },
    {Py_tp_members,  LRScheduler_members    },
    {Py_tp_getset,   LRScheduler_getset     },
    {0,              NULL                   },
};

PyType_Spec LRScheduler_spec = {
    .name = "ctrainer._C.LRScheduler",
    .basicsize = sizeof(LRScheduler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = LRScheduler_slots,
};

PyMethodDef ctpy_schedule_scheduler_functions[] = {
    {"write_lrs", ctpy_write_lrs, METH_VARARGS, ctpy_write_lrs_doc},
    {NULL,        NULL,           0,            NULL              },
};
