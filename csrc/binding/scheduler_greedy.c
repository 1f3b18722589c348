/* ctrainer._C.GreedyLR: core/ct_greedy.h with the protocol of transformers' GreedyLR.
 */
#include "binding/scheduler_greedy.h"

static void
GreedyLR_dealloc(PyObject *op)
{
    ct_window_fini(&((GreedyLR *)op)->core.window);
    MetricScheduler_dealloc(op);
}

/* ---- making ------------------------------------------------------------------------
 */

/* Takes `made`, its window included, over with limits and rates of its own; or changes
 * nothing and the window stays the caller's. */
static int
start(PyObject *op, const GreedyLR *made, PyObject *optimizer, PyObject *min_lr,
      PyObject *max_lr)
{
    GreedyLR *self = (GreedyLR *)op;
    PyObject *rates = scheduler_rates(ctpy_state_borrow(op), optimizer), *least = NULL,
             *most = NULL;
    PyObject *initial = NULL;
    if (rates != NULL) {
        const Py_ssize_t n = PyList_GET_SIZE(rates);
        least = scheduler_limits(min_lr, "min_lr", n);
        most = least == NULL ? NULL : scheduler_limits(max_lr, "max_lr", n);
        initial = most == NULL ? NULL : PySequence_List(rates);
    }
    if (initial == NULL) {
        Py_XDECREF(most);
        Py_XDECREF(least);
        Py_XDECREF(rates);
        return -1;
    }
    Py_XSETREF(self->base.optimizer, Py_NewRef(optimizer));
    Py_XSETREF(self->base.min_lrs, least);
    Py_XSETREF(self->base.max_lrs, most);
    Py_XSETREF(self->base.init_lrs, initial);
    Py_XSETREF(self->base.last_lr, rates);
    self->base.last_epoch = 0;
    ct_window_fini(&self->core.window);
    self->core = made->core;
    self->window_size = made->window_size;
    self->verbose = made->verbose;
    return 0;
}

/* The settings among the arguments: all but the optimizer and the limits. */
static int
parse(PyObject *args, PyObject *kwargs, GreedyLR *made, PyObject *objects[3])
{
    static char *names[] = {"optimizer", "mode",           "factor",      "patience",
                            "threshold", "threshold_mode", "cooldown",    "warmup",
                            "min_lr",    "max_lr",         "eps",         "verbose",
                            "smooth",    "window_size",    "reset_start", NULL};
    ct_greedy *c = &made->core;
    const char *mode = "min", *threshold_mode = "abs";
    long long patience = c->patience, cooldown = 0, warmup = 0, window_size = 50;
    long long reset_start = c->reset_start;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O|sdLdsLLOOdppLL:GreedyLR", names, &objects[0], &mode,
            &c->factor, &patience, &c->rule.threshold, &threshold_mode, &cooldown,
            &warmup, &objects[1], &objects[2], &c->eps, &made->verbose, &c->smooth,
            &window_size, &reset_start) ||
        scheduler_rule(mode, threshold_mode, &c->rule) < 0) {
        return -1;
    }
    c->patience = patience;
    c->cooldown = cooldown;
    c->warmup = warmup;
    c->reset_start = c->reset_start_original = reset_start;
    c->best = ct_metric_worst(&c->rule);
    made->window_size = window_size;
    return 0;
}

static int
GreedyLR_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    GreedyLR made = {.core = ct_greedy_defaults()};
    PyObject *least = PyFloat_FromDouble(1e-3), *most = PyFloat_FromDouble(1.0);
    PyObject *objects[3] = {NULL, least, most};
    ct_error err;
    int result = -1;
    if (least == NULL || most == NULL || parse(args, kwargs, &made, objects) < 0) {
        goto done;
    }
    if (ct_greedy_check(&made.core, &err) != CT_OK ||
        (made.core.smooth &&
         ct_window_init(&made.core.window, made.window_size, &err) != CT_OK)) {
        (void)ctpy_raise(&err);
        goto done;
    }
    result = start(op, &made, objects[0], objects[1], objects[2]);
    if (result < 0) {
        ct_window_fini(&made.core.window);
    }
done:
    Py_XDECREF(most);
    Py_XDECREF(least);
    return result;
}

/* ---- stepping ----------------------------------------------------------------------
 */

/* Tells on sys.stdout which rates have changed. */
static void
tell(const GreedyLR *self, PyObject *before, const double *rates, int has_reset)
{
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(before); g++) {
        char text[120];
        if (rates[g] != PyFloat_AS_DOUBLE(PyList_GET_ITEM(before, g))) {
            PyOS_snprintf(text, sizeof text,
                          "evaluation %lld: group %zd at lr %.4e%s\n",
                          (long long)self->base.last_epoch, g, rates[g],
                          has_reset ? ", started anew" : "");
            PySys_FormatStdout("%s", text);
        }
    }
}

/* One evaluation of rates->now; self->core is as before where the groups refuse it. */
static int
judge(PyObject *op, double metric, int64_t epoch, PyObject *before,
      const ct_greedy_rates *rates)
{
    GreedyLR *self = (GreedyLR *)op;
    const ct_greedy kept = self->core;
    double *slot = kept.smooth ? &kept.window.values[kept.window.next] : NULL;
    const double oldest = slot == NULL ? 0.0 : *slot;
    int has_reset = ct_greedy_step(&self->core, metric, rates);
    if (MetricScheduler_write(op, rates->now, before, epoch) < 0) {
        self->core = kept;
        if (slot != NULL) {
            *slot = oldest;
        }
        return -1;
    }
    if (self->verbose) {
        tell(self, before, rates->now, has_reset);
    }
    return 0;
}

static int
step_from(PyObject *op, double metric, int64_t epoch, PyObject *before)
{
    const MetricScheduler *base = (MetricScheduler *)op;
    const Py_ssize_t n = PyList_GET_SIZE(before);
    double *now = PyMem_New(double, 4 * (size_t)n + 1);
    double *least = now + n, *most = least + n, *initial = most + n;
    int result = -1;
    if (now == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (scheduler_doubles(before, "lr", now, n) == 0 &&
        scheduler_doubles(base->min_lrs, "min_lrs", least, n) == 0 &&
        scheduler_doubles(base->max_lrs, "max_lrs", most, n) == 0 &&
        scheduler_doubles(base->init_lrs, "_init_lrs", initial, n) == 0) {
        const ct_greedy_rates rates = {now, least, most, initial, (size_t)n};
        result = judge(op, metric, epoch, before, &rates);
    }
    PyMem_Free(now);
    return result;
}

PyDoc_STRVAR(
    step_doc,
    "step($self, metrics, epoch=None)\n--\n\n"
    "Take in an evaluation's metric; raise or lower the rates where it is due.");

static PyObject *
GreedyLR_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return MetricScheduler_step(op, args, kwargs, step_from);
}

/* ---- the type ----------------------------------------------------------------------
 */

static PyMethodDef GreedyLR_methods[] = {
    SCHEDULER_METHOD("step", GreedyLR_step, METH_VARARGS | METH_KEYWORDS, step_doc),
    METRIC_SCHEDULER_METHODS,
    SCHEDULER_METHOD("state_dict", GreedyLR_state_dict, METH_NOARGS,
                     GreedyLR_state_dict_doc),
    SCHEDULER_METHOD("load_state_dict", GreedyLR_load_state_dict, METH_O,
                     GreedyLR_load_state_dict_doc),
    {NULL, NULL, 0, NULL},
};

#define SEEN(type, name, member)                                                       \
    {name, type, offsetof(GreedyLR, member), READONLY, NULL}

static PyMemberDef GreedyLR_members[] = {
    SEEN(T_OBJECT_EX, "optimizer", base.optimizer),
    {"min_lrs", T_OBJECT_EX, offsetof(GreedyLR, base.min_lrs), 0,
                                                "No group's rate falls below its own."},
    {"max_lrs", T_OBJECT_EX, offsetof(GreedyLR, base.max_lrs), 0,
                                                "No group's rate rises above its own."},
    SEEN(T_OBJECT_EX, "_init_lrs", base.init_lrs),
    SEEN(T_OBJECT_EX, "_last_lr", base.last_lr),
    {"last_epoch", T_LONGLONG, offsetof(GreedyLR, base.last_epoch), 0,
                                                "Evaluations seen."},
    SEEN(T_DOUBLE, "factor", core.factor),
    SEEN(T_LONGLONG, "patience", core.patience),
    SEEN(T_DOUBLE, "best", core.best),
    SEEN(T_LONGLONG, "num_bad_epochs", core.num_bad_epochs),
    SEEN(T_LONGLONG, "num_good_epochs", core.num_good_epochs),
    SEEN(T_LONGLONG, "cooldown_counter", core.cooldown_counter),
    SEEN(T_LONGLONG, "warmup_counter", core.warmup_counter),
    SEEN(T_LONGLONG, "reset_start", core.reset_start),
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    GreedyLR_doc,
    "GreedyLR(optimizer, mode='min', factor=0.95, patience=10, threshold=1e-06,\n"
    "         threshold_mode='abs', cooldown=0, warmup=0, min_lr=0.001, max_lr=1.0,\n"
    "         eps=1e-08, verbose=False, smooth=False, window_size=50,\n"
    "         reset_start=500)\n--\n\n"
    "Divide rates by factor while a metric improves, multiply by it while it does "
    "not.\n"
    "\n"
    "Arguments, results and state_dict are those of transformers' class of the same\n"
    "name. A Trainer steps it with metric_for_best_model after each evaluation. "
    "Raises\n"
    "ValueError for a setting out of range.\n\n"
    "Source: 'GreedyLR: A Novel Adaptive Learning Rate Scheduler', arXiv 2512.14527.");

static PyType_Slot GreedyLR_slots[] = {
    {Py_tp_doc,      (void *)GreedyLR_doc    },
    {Py_tp_new,      PyType_GenericNew       },
    {Py_tp_init,     GreedyLR_init           },
    {Py_tp_traverse, MetricScheduler_traverse},
    {Py_tp_clear,    MetricScheduler_clear   },
    {Py_tp_dealloc,  GreedyLR_dealloc        },
    {Py_tp_methods,  GreedyLR_methods        },
    {Py_tp_members,  GreedyLR_members        },
    {0,              NULL                    },
};

PyType_Spec GreedyLR_spec = {
    .name = "ctrainer._C.GreedyLR",
    .basicsize = sizeof(GreedyLR),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = GreedyLR_slots,
};
