/* LossScaler: state_dict and load_state_dict, in the layout of each original. */
#include "binding/runtime/copies.h"
#include "binding/engine/loss_scaler.h"

typedef enum field_kind {
    FIELD_DOUBLE,
    FIELD_INT64,
    FIELD_BOOL,
    FIELD_CLEAN_STEPS /* not kept, but told by the counts of steps */
} field_kind;

typedef struct field {
    const char *key; /* NULL ends a layout */
    size_t offset;   /* in ct_scaler */
    field_kind kind;
    bool required; /* else an absent one is as in a new scaler */
} field;

#define AT(member) offsetof(ct_scaler, member)

static const field torch_layout[] = {
    {"scale",           AT(scale),                  FIELD_DOUBLE,      true },
    {"growth_factor",   AT(config.growth_factor),   FIELD_DOUBLE,      true },
    {"backoff_factor",  AT(config.backoff_factor),  FIELD_DOUBLE,      true },
    {"growth_interval", AT(config.growth_interval), FIELD_INT64,       true },
    {"_growth_tracker", 0,                          FIELD_CLEAN_STEPS, true },
    {NULL,              0,                          FIELD_DOUBLE,      false},
};

/* fairseq saves loss_scale alone; the counts keep the names of its attributes. */
static const field fairseq_layout[] = {
    {"loss_scale",               AT(scale),         FIELD_DOUBLE, true },
    {"_iter",                    AT(iter),          FIELD_INT64,  false},
    {"_last_overflow_iter",      AT(last_overflow), FIELD_INT64,  false},
    {"_last_rescale_iter",       AT(last_rescale),  FIELD_INT64,  false},
    {"_overflows_since_rescale", AT(overflows),     FIELD_INT64,  false},
    {NULL,                       0,                 FIELD_DOUBLE, false},
};

/* vars() of DeepSpeed's scaler; its FP16_Optimizer saves the first five. */
static const field deepspeed_layout[] = {
    {"cur_scale",                AT(scale),                   FIELD_DOUBLE, true },
    {"cur_iter",                 AT(iter),                    FIELD_INT64,  false},
    {"last_overflow_iter",       AT(last_overflow),           FIELD_INT64,  false},
    {"scale_factor",             AT(config.growth_factor),    FIELD_DOUBLE, false},
    {"scale_window",             AT(config.growth_interval),  FIELD_INT64,  false},
    {"min_scale",                AT(config.floor),            FIELD_DOUBLE, false},
    {"delayed_shift",            AT(config.hysteresis),       FIELD_INT64,  false},
    {"cur_hysteresis",           AT(hysteresis),              FIELD_INT64,  false},
    {"consecutive_hysteresis",   AT(config.refill_each_step), FIELD_BOOL,   false},
    {"raise_error_at_min_scale", AT(config.stop_at_floor),    FIELD_BOOL,   false},
    {"dynamic",                  AT(config.dynamic),          FIELD_BOOL,   false},
    {NULL,                       0,                           FIELD_DOUBLE, false},
};

/* A copy has every setting. */
static const field whole_layout[] = {
    {"init_scale",        AT(config.init_scale),       FIELD_DOUBLE, true },
    {"growth_factor",     AT(config.growth_factor),    FIELD_DOUBLE, true },
    {"backoff_factor",    AT(config.backoff_factor),   FIELD_DOUBLE, true },
    {"floor",             AT(config.floor),            FIELD_DOUBLE, true },
    {"min_scale",         AT(config.min_scale),        FIELD_DOUBLE, true },
    {"tolerance",         AT(config.tolerance),        FIELD_DOUBLE, true },
    {"growth_interval",   AT(config.growth_interval),  FIELD_INT64,  true },
    {"config_hysteresis", AT(config.hysteresis),       FIELD_INT64,  true },
    {"divides",           AT(config.divides),          FIELD_BOOL,   true },
    {"refill_each_step",  AT(config.refill_each_step), FIELD_BOOL,   true },
    {"stop_at_floor",     AT(config.stop_at_floor),    FIELD_BOOL,   true },
    {"single",            AT(config.single),           FIELD_BOOL,   true },
    {"dynamic",           AT(config.dynamic),          FIELD_BOOL,   true },
    {"enabled",           AT(config.enabled),          FIELD_BOOL,   true },
    {"scale",             AT(scale),                   FIELD_DOUBLE, true },
    {"iter",              AT(iter),                    FIELD_INT64,  true },
    {"last_overflow",     AT(last_overflow),           FIELD_INT64,  true },
    {"last_rescale",      AT(last_rescale),            FIELD_INT64,  true },
    {"overflows",         AT(overflows),               FIELD_INT64,  true },
    {"hysteresis",        AT(hysteresis),              FIELD_INT64,  true },
    {NULL,                0,                           FIELD_DOUBLE, false},
};

static const field *const layouts[CT_SCALER_DIALECT_COUNT] = {
    [CT_SCALER_TORCH] = torch_layout,
    [CT_SCALER_FAIRSEQ] = fairseq_layout,
    [CT_SCALER_DEEPSPEED] = deepspeed_layout,
};

static PyObject *
field_value(const ct_scaler *scaler, const field *f)
{
    const char *at = (const char *)scaler + f->offset;
    double number;
    int64_t whole = ct_scaler_clean_steps(scaler);
    switch (f->kind) {
    case FIELD_DOUBLE:
        memcpy(&number, at, sizeof number);
        return PyFloat_FromDouble(number);
    case FIELD_BOOL:
        return PyBool_FromLong(*(const bool *)at);
    case FIELD_INT64:
        memcpy(&whole, at, sizeof whole);
        break;
    case FIELD_CLEAN_STEPS:
        break;
    }
    return PyLong_FromLongLong(whole);
}

static PyObject *
all_values(const ct_scaler *scaler, const field *layout)
{
    PyObject *state = PyDict_New();
    for (const field *f = layout; state != NULL && f->key != NULL; f++) {
        PyObject *value = field_value(scaler, f);
        if (value == NULL || PyDict_SetItemString(state, f->key, value) < 0) {
            Py_CLEAR(state);
        }
        Py_XDECREF(value);
    }
    return state;
}

const char LossScaler_state_dict_doc[] =
    "state_dict($self, /)\n--\n\n"
    "Return the state as a dict of floats, ints and bools.\n\n"
    "Its keys are those of the original whose preset this is: GradScaler.state_dict()\n"
    "of torch; 'loss_scale' of fairseq's FP16Optimizer, with the counts of its "
    "scaler,\n"
    "which it does not save; the attributes of DeepSpeed's DynamicLossScaler. Empty\n"
    "when not enabled.";

PyObject *
LossScaler_state_dict(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ct_scaler scaler;
    CTPY_LOCK(op);
    scaler = ((LossScaler *)op)->core;
    CTPY_UNLOCK();
    return scaler.config.enabled ? all_values(&scaler, layouts[scaler.config.dialect])
                                 : PyDict_New();
}

/* The steps counted so far become those since the last growth or overflow. */
static int
take_clean_steps(ct_scaler *scaler, long long clean)
{
    if (clean < 0 || clean >= scaler->config.growth_interval) {
        PyErr_Format(PyExc_ValueError,
                     "_growth_tracker must be in [0, growth_interval=%lld), got %lld",
                     (long long)scaler->config.growth_interval, clean);
        return -1;
    }
    scaler->iter = clean;
    return 0;
}

static int
take_value(ct_scaler *scaler, const field *f, PyObject *value)
{
    char *at = (char *)scaler + f->offset;
    if (f->kind == FIELD_DOUBLE) {
        double number = PyFloat_AsDouble(value);
        memcpy(at, &number, sizeof number);
        return number == -1.0 && PyErr_Occurred() ? -1 : 0;
    }
    if (f->kind == FIELD_BOOL) {
        int truth = PyObject_IsTrue(value);
        *(bool *)at = truth > 0;
        return truth < 0 ? -1 : 0;
    }
    int64_t whole = PyLong_AsLongLong(value);
    if (whole == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (f->kind == FIELD_CLEAN_STEPS) {
        return take_clean_steps(scaler, whole);
    }
    memcpy(at, &whole, sizeof whole);
    return 0;
}

/* state[f->key] into *scaler, where it is there. */
static int
take_field(ct_scaler *scaler, const field *f, PyObject *state)
{
    PyObject *value;
    const int found = ctpy_item(state, f->key, &value);
    if (found > 0) {
        int result = take_value(scaler, f, value);
        Py_DECREF(value);
        return result;
    }
    if (found < 0 || !f->required) {
        return found;
    }
    PyObject *keys = PyMapping_Keys(state);
    if (keys != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "the state of this loss scaler has '%s', and the one given has "
                     "only %R: it is of another kind of scaler, or of one that was "
                     "not enabled",
                     f->key, keys);
        Py_DECREF(keys);
    }
    return -1;
}

const char LossScaler_load_state_dict_doc[] =
    "load_state_dict($self, state, /)\n--\n\n"
    "Take over a state_dict() of ours or of the original.\n\n"
    "That of torch and DeepSpeed brings its settings with it. Counts that fairseq has\n"
    "not saved are those of a new scaler. Does nothing when not enabled. Raises\n"
    "ValueError or TypeError, state unchanged, where one is missing or out of range.";

PyObject *
LossScaler_load_state_dict(PyObject *op, PyObject *state)
{
    LossScaler *self = (LossScaler *)op;
    ct_scaler_config config;
    ct_scaler next;
    ct_status status;
    ct_error err;
    CTPY_LOCK(op);
    config = self->core.config;
    CTPY_UNLOCK();
    if (!config.enabled) {
        Py_RETURN_NONE;
    }
    if (ct_scaler_init(&next, &config, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    for (const field *f = layouts[config.dialect]; f->key != NULL; f++) {
        if (take_field(&next, f, state) < 0) {
            return NULL;
        }
    }
    CTPY_LOCK(op);
    status = ct_scaler_restore(&self->core, &next, &err);
    CTPY_UNLOCK();
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}

const char LossScaler___getstate___doc[] =
    "__getstate__($self, /)\n--\n\n"
    "Return what copy and pickle take: attributes, settings and state.";

PyObject *
LossScaler___getstate__(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ct_scaler scaler;
    CTPY_LOCK(op);
    scaler = ((LossScaler *)op)->core;
    CTPY_UNLOCK();
    PyObject *fields = all_values(&scaler, whole_layout);
    PyObject *dialect = PyLong_FromLong((long)scaler.config.dialect);
    if (fields != NULL &&
        (dialect == NULL || PyDict_SetItemString(fields, "dialect", dialect) < 0)) {
        Py_CLEAR(fields);
    }
    Py_XDECREF(dialect);
    return ctpy_copy_state_steal(op, fields);
}

const char LossScaler___setstate___doc[] =
    "__setstate__($self, state, /)\n--\n\n"
    "Take over what __getstate__() returned. Raises ValueError or TypeError, state\n"
    "unchanged, for numbers that cannot come from a run.";

PyObject *
LossScaler___setstate__(PyObject *op, PyObject *state)
{
    ct_scaler next = {0};
    ct_status status;
    ct_error err;
    PyObject *fields = ctpy_take_copy_state_borrow(op, state);
    PyObject *dialect =
        fields == NULL ? NULL : PyMapping_GetItemString(fields, "dialect");
    const long number = dialect == NULL ? -1 : PyLong_AsLong(dialect);
    Py_XDECREF(dialect);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!(number >= 0 && number < CT_SCALER_DIALECT_COUNT)) {
        return PyErr_Format(PyExc_ValueError, "no kind of loss scaler has number %ld",
                            number);
    }
    next.config.dialect = (ct_scaler_dialect)number;
    for (const field *f = whole_layout; f->key != NULL; f++) {
        if (take_field(&next, f, fields) < 0) {
            return NULL;
        }
    }
    CTPY_LOCK(op);
    status = ct_scaler_restore(&((LossScaler *)op)->core, &next, &err);
    CTPY_UNLOCK();
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}
