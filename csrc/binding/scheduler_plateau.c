/* ctrainer._C.ReduceLROnPlateau: core/ct_plateau.h with the protocol and the state_dict
 * of torch.optim.lr_scheduler.ReduceLROnPlateau. */
#include "binding/scheduler_metric.h"
#include "core/ct_plateau.h"

typedef struct ReduceLROnPlateau {
    MetricScheduler base;
    ct_plateau core;
} ReduceLROnPlateau;

#define REAL(name, member) {name, FIELD_REAL, offsetof(ReduceLROnPlateau, member), NULL}
#define COUNT(name, member)                                                            \
    {name, FIELD_INTEGER, offsetof(ReduceLROnPlateau, member), NULL}
#define WORD(name, member, words)                                                      \
    {name, FIELD_WORD, offsetof(ReduceLROnPlateau, member), words}

static const scheduler_field fields[] = {
    REAL("factor", core.factor),
    REAL("eps", core.eps),
    REAL("threshold", core.rule.threshold),
    REAL("best", core.best),
    COUNT("patience", core.patience),
    COUNT("cooldown", core.cooldown),
    COUNT("cooldown_counter", core.cooldown_counter),
    COUNT("num_bad_epochs", core.num_bad_epochs),
    COUNT("last_epoch", base.last_epoch),
    WORD("mode", core.rule.maximise, scheduler_modes),
    WORD("threshold_mode", core.rule.absolute, scheduler_threshold_modes),
    {NULL, FIELD_REAL, 0, NULL},
};

/* Takes `core` over with limits and rates of its own, or changes nothing. */
static int
start(PyObject *op, const ct_plateau *core, PyObject *optimizer, PyObject *min_lr)
{
    MetricScheduler *base = (MetricScheduler *)op;
    PyObject *rates = scheduler_rates(ctpy_state_borrow(op), optimizer), *limits = NULL,
             *shared = NULL;
    if (rates != NULL) {
        limits = scheduler_limits(min_lr, "min_lr", PyList_GET_SIZE(rates));
    }
    if (limits != NULL) {
        shared = PyList_Check(min_lr) || PyTuple_Check(min_lr) ? Py_NewRef(Py_None)
                                                               : PyNumber_Float(min_lr);
    }
    if (shared == NULL) {
        Py_XDECREF(limits);
        Py_XDECREF(rates);
        return -1;
    }
    Py_XSETREF(base->optimizer, Py_NewRef(optimizer));
    Py_XSETREF(base->min_lrs, limits);
    Py_XSETREF(base->default_min_lr, shared);
    Py_XSETREF(base->last_lr, rates);
    base->last_epoch = 0;
    ((ReduceLROnPlateau *)op)->core = *core;
    return 0;
}

static int
ReduceLROnPlateau_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "optimizer",      "mode",     "factor", "patience", "threshold",
        "threshold_mode", "cooldown", "min_lr", "eps",      NULL};
    ct_plateau core = ct_plateau_defaults();
    PyObject *optimizer, *min_lr = Py_False; /* the number 0 */
    const char *mode = "min", *threshold_mode = "rel";
    long long patience = core.patience, cooldown = core.cooldown;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|sdLdsLOd:ReduceLROnPlateau",
                                     names, &optimizer, &mode, &core.factor, &patience,
                                     &core.rule.threshold, &threshold_mode, &cooldown,
                                     &min_lr, &core.eps) ||
        scheduler_rule(mode, threshold_mode, &core.rule) < 0) {
        return -1;
    }
    core.patience = patience;
    core.cooldown = cooldown;
    core.best = ct_metric_worst(&core.rule);
    if (ct_plateau_check(&core, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    return start(op, &core, optimizer, min_lr);
}

/* min_lrs again for n groups, where all have the same: groups may have been added. */
static int
fit_limits(MetricScheduler *base, Py_ssize_t n)
{
    Py_ssize_t had = base->min_lrs == NULL ? n : PySequence_Size(base->min_lrs);
    if (had == n || had < 0 || base->default_min_lr == Py_None) {
        return had < 0 ? -1 : 0;
    }
    PyObject *limits = scheduler_limits(base->default_min_lr, "min_lr", n);
    if (limits != NULL) {
        Py_XSETREF(base->min_lrs, limits);
    }
    return limits == NULL ? -1 : 0;
}

/* One evaluation, with `before` the groups' rates; all or nothing is changed. */
static int
step_from(PyObject *op, double metric, int64_t epoch, PyObject *before)
{
    ReduceLROnPlateau *self = (ReduceLROnPlateau *)op;
    ct_plateau core = self->core;
    const Py_ssize_t n = PyList_GET_SIZE(before);
    double *rates = PyMem_New(double, 2 * (size_t)n + 1), *least = rates + n;
    int result = -1;
    if (rates == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (fit_limits(&self->base, n) == 0 &&
        scheduler_doubles(before, "lr", rates, n) == 0 &&
        scheduler_doubles(self->base.min_lrs, "min_lrs", least, n) == 0) {
        ct_plateau_step(&core, metric, rates, least, (size_t)n);
        result = MetricScheduler_write(op, rates, before, epoch);
    }
    if (result == 0) {
        self->core = core;
    }
    PyMem_Free(rates);
    return result;
}

PyDoc_STRVAR(
    step_doc,
    "step($self, metrics, epoch=None)\n--\n\n"
    "Take in an evaluation's metric; lower every group's rate where it is due.");

static PyObject *
ReduceLROnPlateau_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return MetricScheduler_step(op, args, kwargs, step_from);
}

PyDoc_STRVAR(state_dict_doc, "state_dict($self, /)\n--\n\n"
                             "Return what torch's class of the same name would.");

static PyObject *
ReduceLROnPlateau_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ReduceLROnPlateau *self = (ReduceLROnPlateau *)op;
    PyObject *shared = self->base.default_min_lr;
    PyObject *state =
        Py_BuildValue("{sNsNsOsd}", "min_lrs", MetricScheduler_copy(self->base.min_lrs),
                      "_last_lr", MetricScheduler_copy(self->base.last_lr),
                      "default_min_lr", shared == NULL ? Py_None : shared, "mode_worse",
                      ct_metric_worst(&self->core.rule));
    if (state != NULL && scheduler_fields_save(fields, self, state) < 0) {
        Py_CLEAR(state);
    }
    return state;
}

/* state["default_min_lr"]; older releases of torch have none, and limits stay. */
static PyObject *
default_limit(PyObject *state)
{
    PyObject *found;
    if (ctpy_item(state, "default_min_lr", &found) == 0) {
        return Py_NewRef(Py_None);
    }
    if (found != NULL && found != Py_None) {
        Py_SETREF(found, PyNumber_Float(found));
    }
    return found;
}

PyDoc_STRVAR(load_state_dict_doc,
             "load_state_dict($self, state_dict, /)\n--\n\n"
             "Load what state_dict() gave, of this type or of torch's.\n\n"
             "Settings come with it; the groups' rates come with the optimizer's own\n"
             "state_dict. Raises KeyError, ValueError or TypeError, nothing changed.");

static PyObject *
ReduceLROnPlateau_load_state_dict(PyObject *op, PyObject *state)
{
    ReduceLROnPlateau *self = (ReduceLROnPlateau *)op, loaded = {.base.min_lrs = NULL};
    MetricScheduler *base = &self->base;
    Py_ssize_t n = base->last_lr == NULL ? 0 : PySequence_Size(base->last_lr);
    PyObject *limits = n < 0 ? NULL : scheduler_state_rates(state, "min_lrs", n);
    PyObject *last =
        limits == NULL ? NULL : scheduler_state_rates(state, "_last_lr", n);
    PyObject *shared = last == NULL ? NULL : default_limit(state);
    ct_error err;
    int result = shared == NULL ? -1 : scheduler_fields_load(fields, &loaded, state);
    if (result == 0 && ct_plateau_check(&loaded.core, &err) != CT_OK) {
        result = ctpy_raise_int(&err);
    }
    if (result < 0) {
        Py_XDECREF(shared);
        Py_XDECREF(last);
        Py_XDECREF(limits);
        return NULL;
    }
    Py_XSETREF(base->min_lrs, limits);
    Py_XSETREF(base->last_lr, last);
    Py_XSETREF(base->default_min_lr, shared);
    base->last_epoch = loaded.base.last_epoch;
    self->core = loaded.core;
    Py_RETURN_NONE;
}

static PyMethodDef ReduceLROnPlateau_methods[] = {
    SCHEDULER_METHOD("step", ReduceLROnPlateau_step, METH_VARARGS | METH_KEYWORDS,
                     step_doc),
    METRIC_SCHEDULER_METHODS,
    SCHEDULER_METHOD("state_dict", ReduceLROnPlateau_state_dict, METH_NOARGS,
                     state_dict_doc),
    SCHEDULER_METHOD("load_state_dict", ReduceLROnPlateau_load_state_dict, METH_O,
                     load_state_dict_doc),
    {NULL, NULL, 0, NULL},
};

#define SEEN(type, name, member)                                                       \
    {name, type, offsetof(ReduceLROnPlateau, member), READONLY, NULL}

static PyMemberDef ReduceLROnPlateau_members[] = {
    SEEN(T_OBJECT_EX, "optimizer", base.optimizer),
    {"min_lrs", T_OBJECT_EX, offsetof(ReduceLROnPlateau, base.min_lrs), 0,
                                                "No group's rate falls below its own."},
    SEEN(T_OBJECT_EX, "_last_lr", base.last_lr),
    {"last_epoch", T_LONGLONG, offsetof(ReduceLROnPlateau, base.last_epoch), 0,
                                                "Evaluations seen."},
    SEEN(T_DOUBLE, "factor", core.factor),
    SEEN(T_DOUBLE, "threshold", core.rule.threshold),
    SEEN(T_DOUBLE, "eps", core.eps),
    SEEN(T_LONGLONG, "patience", core.patience),
    SEEN(T_LONGLONG, "cooldown", core.cooldown),
    SEEN(T_DOUBLE, "best", core.best),
    SEEN(T_LONGLONG, "num_bad_epochs", core.num_bad_epochs),
    SEEN(T_LONGLONG, "cooldown_counter", core.cooldown_counter),
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    ReduceLROnPlateau_doc,
    "ReduceLROnPlateau(optimizer, mode='min', factor=0.1, patience=10,\n"
    "                  threshold=0.0001, threshold_mode='rel', cooldown=0, min_lr=0,\n"
    "                  eps=1e-08)\n--\n\n"
    "Multiply rates by factor when a metric has not improved for patience "
    "evaluations.\n"
    "\n"
    "Arguments, results and state_dict are those of torch's class of the same name.\n"
    "A Trainer steps it with metric_for_best_model after each evaluation. Raises\n"
    "ValueError for a setting out of range.");

static PyType_Slot ReduceLROnPlateau_slots[] = {
    {Py_tp_doc,      (void *)ReduceLROnPlateau_doc},
    {Py_tp_new,      PyType_GenericNew            },
    {Py_tp_init,     ReduceLROnPlateau_init       },
    {Py_tp_traverse, MetricScheduler_traverse     },
    {Py_tp_clear,    MetricScheduler_clear        },
    {Py_tp_dealloc,  MetricScheduler_dealloc      },
    {Py_tp_methods,  ReduceLROnPlateau_methods    },
    {Py_tp_members,  ReduceLROnPlateau_members    },
    {0,              NULL                         },
};

PyType_Spec ReduceLROnPlateau_spec = {
    .name = "ctrainer._C.ReduceLROnPlateau",
    .basicsize = sizeof(ReduceLROnPlateau),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = ReduceLROnPlateau_slots,
};
