/* The scheduler's state_dict, interchangeable with that of torch's LambdaLR. */
#include "binding/schedule/scheduler.h"

#include <string.h>

/* torch keeps None for a function and the attributes of anything else that is called:
 * transformers' constant schedule is a function, and the rest are partial objects. */
static int
is_function(const LRScheduler *self)
{
    return self->schedule.kind != NULL &&
           strcmp(ct_schedule_name(&self->schedule), "constant") == 0;
}

const char LRScheduler_state_dict_doc[] =
    "state_dict($self, /)\n--\n\n"
    "Return what torch's LambdaLR would: counts and rates, not the optimizer.";

PyObject *
LRScheduler_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    LRScheduler *self = (LRScheduler *)op;
    const int constant = is_function(self);
    PyObject *none = PyList_New(0), *lambdas = PyList_New(0), *result = NULL;
    PyObject *base = self->base_lrs == NULL ? none : self->base_lrs;
    PyObject *last = self->last_lr == NULL ? none : self->last_lr;
    Py_ssize_t n = none == NULL || lambdas == NULL ? -1 : PySequence_Size(base);
    for (Py_ssize_t g = 0; g < n; g++) {
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

/* transformers' schedules keep nothing in lr_lambdas: each entry is None or {}. */
static int
refuse_lambdas(PyObject *state)
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

/* state[key] as a new list of floats, one for each of n groups. */
static PyObject *
state_rates(PyObject *state, const char *key, Py_ssize_t n)
{
    PyObject *found = PyMapping_GetItemString(state, key);
    PyObject *rates = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    if (rates != NULL && PyList_GET_SIZE(rates) != n) {
        PyErr_Format(PyExc_ValueError,
                     "state_dict['%s'] has %zd rates; the optimizer has %zd groups",
                     key, PyList_GET_SIZE(rates), n);
        Py_CLEAR(rates);
    }
    for (Py_ssize_t g = 0; rates != NULL && g < n; g++) {
        PyObject *rate = PyNumber_Float(PyList_GET_ITEM(rates, g));
        if (rate == NULL || PyList_SetItem(rates, g, rate) < 0) {
            Py_CLEAR(rates);
        }
    }
    return rates;
}

static int
state_integer(PyObject *state, const char *key, int64_t *value)
{
    PyObject *found = PyMapping_GetItemString(state, key);
    *value = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

const char LRScheduler_load_state_dict_doc[] =
    "load_state_dict($self, state_dict, /)\n--\n\n"
    "Load what state_dict() gave, of this type or of torch's LambdaLR.\n\n"
    "The groups' rates come with the optimizer's own state_dict. Raises\n"
    "KeyError, ValueError or TypeError, nothing changed.";

PyObject *
LRScheduler_load_state_dict(PyObject *op, PyObject *state)
{
    LRScheduler *self = (LRScheduler *)op;
    int64_t last_epoch, step_count;
    Py_ssize_t n = self->last_lr == NULL ? 0 : PySequence_Size(self->last_lr);
    PyObject *base = n < 0 ? NULL : state_rates(state, "base_lrs", n);
    PyObject *last = base == NULL ? NULL : state_rates(state, "_last_lr", n);
    if (last == NULL || refuse_lambdas(state) < 0 ||
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

const char LRScheduler_setstate_doc[] =
    "__setstate__($self, state, /)\n--\n\n"
    "Load a state_dict and write its rates to the groups.";

PyObject *
LRScheduler_setstate(PyObject *op, PyObject *state)
{
    PyObject *loaded = LRScheduler_load_state_dict(op, state);
    if (loaded != NULL && ((LRScheduler *)op)->last_lr != NULL &&
        scheduler_write_rates(ctpy_state_borrow(op), ((LRScheduler *)op)->optimizer,
                              ((LRScheduler *)op)->last_lr) < 0) {
        Py_CLEAR(loaded);
    }
    return loaded;
}

const char LRScheduler_reduce_doc[] =
    "__reduce__($self, /)\n--\n\nHelper for pickle and copy.";

/* Without what the optimizer says, which it is asked for again. */
static PyObject *
own_options(const ct_schedule *schedule)
{
    PyObject *options = ctpy_schedule_options(schedule), *found = NULL;
    if (options != NULL &&
        (ctpy_item(options, "lr_init", &found) < 0 ||
         (found != NULL && PyDict_DelItemString(options, "lr_init") < 0))) {
        Py_CLEAR(options);
    }
    Py_XDECREF(found);
    return options;
}

PyObject *
LRScheduler_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    LRScheduler *self = (LRScheduler *)op;
    if (self->optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "LRScheduler without an optimizer");
        return NULL;
    }
    return Py_BuildValue("O(OsOON)N", Py_TYPE(op), self->optimizer,
                         ct_schedule_name(&self->schedule), Py_None, Py_None,
                         own_options(&self->schedule),
                         LRScheduler_state_dict(op, NULL));
}
