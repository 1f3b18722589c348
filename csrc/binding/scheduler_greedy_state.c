/* GreedyLR's state_dict, interchangeable with that of transformers' class. */
#include "binding/scheduler_greedy.h"

#define FIELD_OF(form, name, member) {name, form, offsetof(GreedyLR, member), NULL}

static const scheduler_field fields[] = {
    FIELD_OF(FIELD_REAL, "factor", core.factor),
    FIELD_OF(FIELD_REAL, "threshold", core.rule.threshold),
    FIELD_OF(FIELD_REAL, "best", core.best),
    FIELD_OF(FIELD_REAL, "eps", core.eps),
    FIELD_OF(FIELD_INTEGER, "patience", core.patience),
    FIELD_OF(FIELD_INTEGER, "cooldown", core.cooldown),
    FIELD_OF(FIELD_INTEGER, "warmup", core.warmup),
    FIELD_OF(FIELD_INTEGER, "cooldown_counter", core.cooldown_counter),
    FIELD_OF(FIELD_INTEGER, "warmup_counter", core.warmup_counter),
    FIELD_OF(FIELD_INTEGER, "num_bad_epochs", core.num_bad_epochs),
    FIELD_OF(FIELD_INTEGER, "num_good_epochs", core.num_good_epochs),
    FIELD_OF(FIELD_INTEGER, "last_epoch", base.last_epoch),
    FIELD_OF(FIELD_INTEGER, "window_size", window_size),
    FIELD_OF(FIELD_INTEGER, "reset_start", core.reset_start),
    FIELD_OF(FIELD_INTEGER, "reset_start_original", core.reset_start_original),
    FIELD_OF(FIELD_FLAG, "verbose", verbose),
    FIELD_OF(FIELD_FLAG, "smooth", core.smooth),
    {"mode", FIELD_WORD, offsetof(GreedyLR, core.rule.maximise), scheduler_modes},
    {"threshold_mode", FIELD_WORD, offsetof(GreedyLR, core.rule.absolute),
                                         scheduler_threshold_modes},
    {NULL, FIELD_REAL, 0, NULL},
};

/* The groups' lists under their names in a state_dict; NULL ends it. */
static const struct {
    const char *name;
    size_t offset;
} lists[] = {
    {"min_lrs",   offsetof(GreedyLR, base.min_lrs) },
    {"max_lrs",   offsetof(GreedyLR, base.max_lrs) },
    {"_init_lrs", offsetof(GreedyLR, base.init_lrs)},
    {"_last_lr",  offsetof(GreedyLR, base.last_lr) },
};
enum {
    N_LISTS = sizeof lists / sizeof *lists
};

static PyObject **
list_at(void *self, int i)
{
    return (PyObject **)((char *)self + lists[i].offset);
}

/* ---- saving ------------------------------------------------------------------------
 */

static PyObject *
window_state(const ct_window *window)
{
    PyObject *values = PyList_New(window->count);
    for (int64_t i = 0; values != NULL && i < window->count; i++) {
        PyObject *value = PyFloat_FromDouble(ct_window_at(window, i));
        if (value == NULL) {
            Py_CLEAR(values);
            break;
        }
        PyList_SET_ITEM(values, (Py_ssize_t)i, value);
    }
    return Py_BuildValue("{sLsNsd}", "window_size", (long long)window->size, "values",
                         values, "sum", window->sum);
}

/* dict[key] = value, which is taken over and may be NULL. */
static int
put_steal(PyObject *dict, const char *key, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return result;
}

const char GreedyLR_state_dict_doc[] =
    "state_dict($self, /)\n--\n\n"
    "Return what transformers' class of the same name would.";

PyObject *
GreedyLR_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    GreedyLR *self = (GreedyLR *)op;
    PyObject *state = PyDict_New();
    int result = state == NULL ? -1 : scheduler_fields_save(fields, self, state);
    for (int i = 0; result == 0 && i < N_LISTS; i++) {
        result =
            put_steal(state, lists[i].name, MetricScheduler_copy(*list_at(self, i)));
    }
    if (result == 0 && self->core.smooth) {
        result = put_steal(state, "_streaming_avg", window_state(&self->core.window));
    }
    if (result < 0) {
        Py_CLEAR(state);
    }
    return state;
}

/* ---- loading -----------------------------------------------------------------------
 */

/* The values, oldest first, and their running sum into a window that is empty. */
static int
fill_window(ct_window *window, PyObject *saved)
{
    PyObject *found = PyMapping_GetItemString(saved, "values");
    PyObject *values = found == NULL ? NULL : PySequence_Tuple(found);
    PyObject *sum = values == NULL ? NULL : PyMapping_GetItemString(saved, "sum");
    const Py_ssize_t n = values == NULL ? 0 : PyTuple_GET_SIZE(values);
    int result = sum == NULL ? -1 : 0;
    if (result == 0 && n > window->size) {
        PyErr_Format(PyExc_ValueError,
                     "state_dict['_streaming_avg'] has %zd values; its window_size is "
                     "%lld",
                     n, (long long)window->size);
        result = -1;
    }
    if (result == 0) {
        result = scheduler_doubles(values, "values", window->values, n);
    }
    if (result == 0) {
        window->sum = PyFloat_AsDouble(sum);
        window->count = n;
        window->next = n % window->size;
        result = window->sum == -1.0 && PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(sum);
    Py_XDECREF(values);
    Py_XDECREF(found);
    return result;
}

static int
load_window(GreedyLR *loaded, PyObject *state)
{
    ct_error err;
    if (!loaded->core.smooth) {
        return 0;
    }
    if (ct_window_init(&loaded->core.window, loaded->window_size, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    PyObject *saved = PyMapping_GetItemString(state, "_streaming_avg");
    int result = saved == NULL ? -1 : fill_window(&loaded->core.window, saved);
    Py_XDECREF(saved);
    return result;
}

static int
load_lists(GreedyLR *loaded, PyObject *state, Py_ssize_t n)
{
    for (int i = 0; i < N_LISTS; i++) {
        *list_at(loaded, i) = scheduler_state_rates(state, lists[i].name, n);
        if (*list_at(loaded, i) == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
load(GreedyLR *loaded, PyObject *state, Py_ssize_t n)
{
    ct_error err;
    if (load_lists(loaded, state, n) < 0 ||
        scheduler_fields_load(fields, loaded, state) < 0) {
        return -1;
    }
    if (ct_greedy_check(&loaded->core, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    return load_window(loaded, state);
}

/* Exchanges what a state_dict holds. */
static void
exchange(GreedyLR *a, GreedyLR *b)
{
    const GreedyLR kept = *a;
    for (int i = 0; i < N_LISTS; i++) {
        PyObject *list = *list_at(a, i);
        *list_at(a, i) = *list_at(b, i);
        *list_at(b, i) = list;
    }
    a->core = b->core;
    a->base.last_epoch = b->base.last_epoch;
    a->window_size = b->window_size;
    a->verbose = b->verbose;
    b->core = kept.core;
}

const char GreedyLR_load_state_dict_doc[] =
    "load_state_dict($self, state_dict, /)\n--\n\n"
    "Load what state_dict() gave, of this type or of transformers'.\n\n"
    "Settings come with it, and the rates are written to the groups. Raises KeyError,\n"
    "ValueError or TypeError, nothing changed.";

PyObject *
GreedyLR_load_state_dict(PyObject *op, PyObject *state)
{
    GreedyLR *self = (GreedyLR *)op;
    GreedyLR loaded = {.core = {.window = {.values = NULL}}};
    Py_ssize_t n = self->base.last_lr == NULL ? 0 : PySequence_Size(self->base.last_lr);
    int result = n < 0 ? -1 : load(&loaded, state, n);
    if (result == 0 && self->base.optimizer != NULL) {
        result = scheduler_write_rates(ctpy_state_borrow(op), self->base.optimizer,
                                       loaded.base.last_lr, NULL);
    }
    if (result == 0) {
        exchange(self, &loaded);
    }
    ct_window_fini(&loaded.core.window);
    for (int i = 0; i < N_LISTS; i++) {
        Py_XDECREF(*list_at(&loaded, i));
    }
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
