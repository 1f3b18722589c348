/* ctrainer._C.WeightAverage: averages of a model's tensors over its updates.
 *
 * An optimizer of ctrainer.optim averages its parameters in its own pass and marks
 * them; buffers and other values without a mark are averaged here afterwards.
 *
 * A mark lasts from the optimizer's pass to the end of the same update:
 * ctpy_average_finish averages the rest, counts the update, and clears all marks. */
#include "binding/optim/weight_average.h"
#include "binding/runtime/objects.h"

#include "core/base/alloc.h"
#include "core/engine/average.h"

#include <string.h>

typedef struct WeightAverage {
    PyObject_HEAD
    PyObject *values, *averages; /* tuples of tensors or arrays, one for one */
    ct_average core;
    bool *marked;       /* averaged already, by the optimizer's own pass */
    ct_span *from, *to; /* room for a pass over all of them */
    bool busy;          /* such a pass is under way without the GIL */
} WeightAverage;

/* ---- life ------------------------------------------------------------------------ */

PyDoc_STRVAR(
    WeightAverage_doc,
    "WeightAverage(values, averages, *, kind='ema', decay=0.999, start=0, "
    "every=1)\n--\n\n"
    "Keeps averages[i] an average of values[i], tensors or arrays of one shape.\n\n"
    "kind 'ema': averages * decay + values * (1 - decay), and a copy of the\n"
    "values before update number start; 'swa': all states since start count\n"
    "alike. One update in `every` is averaged. A Trainer whose\n"
    "_weight_average it is does so in the optimizer's own pass.");

static int
check_pairs(const WeightAverage *self)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(self->values);
    if (PyTuple_GET_SIZE(self->averages) == n) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%zd averages for %zd values; expected as many",
                 PyTuple_GET_SIZE(self->averages), n);
    return -1;
}

/* Once: an update allocates nothing. */
static int
make_room(WeightAverage *self)
{
    const size_t n = (size_t)PyTuple_GET_SIZE(self->values) + 1; /* never none */
    self->marked = ct_calloc(n, sizeof *self->marked);
    self->from = ct_calloc(n, sizeof *self->from);
    self->to = ct_calloc(n, sizeof *self->to);
    if (self->marked == NULL || self->from == NULL || self->to == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int
parse_kind(const char *name, ct_average_kind *kind)
{
    if (strcmp(name, "ema") == 0 || strcmp(name, "swa") == 0) {
        *kind = name[0] == 'e' ? CT_AVERAGE_EMA : CT_AVERAGE_SWA;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "kind is '%.100s'; expected 'ema' or 'swa'", name);
    return -1;
}

static int
start(WeightAverage *self, PyObject *values, PyObject *averages, const char *kind,
      ct_average_config config)
{
    ct_error err;
    if (parse_kind(kind, &config.kind) < 0) {
        return -1;
    }
    if (ct_average_init(&self->core, &config, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    return (self->values = PySequence_Tuple(values)) == NULL ||
                   (self->averages = PySequence_Tuple(averages)) == NULL ||
                   check_pairs(self) < 0
               ? -1
               : make_room(self);
}

static PyObject *
WeightAverage_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"values", "averages", "kind", "decay",
                            "start",  "every",    NULL};
    PyObject *values, *averages;
    const char *kind = "ema";
    double decay = 0.999;
    long long first = 0, every = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$sdLL:WeightAverage", names,
                                     &values, &averages, &kind, &decay, &first,
                                     &every)) {
        return NULL;
    }
    PyObject *op = type->tp_alloc(type, 0);
    const ct_average_config config = {.decay = decay, .start = first, .every = every};
    if (op != NULL && start((WeightAverage *)op, values, averages, kind, config) < 0) {
        Py_CLEAR(op);
    }
    return op;
}

#define AVERAGE_OBJECTS(V) V(values) V(averages)
CTPY_TRAVERSE_CLEAR(WeightAverage, AVERAGE_OBJECTS)

static void
WeightAverage_dealloc(PyObject *op)
{
    WeightAverage *self = (WeightAverage *)op;
    PyObject_GC_UnTrack(op);
    (void)WeightAverage_clear(op);
    ct_free(self->to);
    ct_free(self->from);
    ct_free(self->marked);
    ctpy_leaf_dealloc(op);
}

/* ---- for the engine -------------------------------------------------------------- */

bool
ctpy_average_due(PyObject *average, double *decay)
{
    return ct_average_due(&((WeightAverage *)average)->core, decay);
}

Py_ssize_t
ctpy_average_find(PyObject *average, PyObject *value, Py_ssize_t hint)
{
    PyObject *values = ((WeightAverage *)average)->values;
    const Py_ssize_t n = PyTuple_GET_SIZE(values);
    /* From the hint on: an optimizer asks in the order of the values, so the first look
     * mostly finds the place. */
    for (Py_ssize_t i = 0; i < n; i++) {
        const Py_ssize_t at = (hint + i) % n;
        if (PyTuple_GET_ITEM(values, at) == value) {
            return at;
        }
    }
    return -1;
}

/* The average at that place, which must be like `value` but for the dtype. A float32
 * average of bfloat16 values is common: small steps would be rounded away otherwise. */
static int
view_average(PyObject *average, Py_ssize_t place, const ctpy_view *value,
             ctpy_view *view)
{
    WeightAverage *self = (WeightAverage *)average;
    const ctpy_place where = {"an average", -1, -1};
    ctpy_view like = *value;
    if (ctpy_view_anywhere(ctpy_state_borrow(average),
                           PyTuple_GET_ITEM(self->averages, place), &where, view) < 0) {
        return -1;
    }
    if (view->memory != value->memory || view->ordinal != value->ordinal) {
        PyErr_Format(PyExc_ValueError,
                     "averages[%zd] is on another device than values[%zd]: make the "
                     "average when the model is where it trains",
                     place, place);
        return -1;
    }
    if (ct_dtype_is_float(like.span.dtype) && ct_dtype_is_float(view->span.dtype)) {
        like.span.dtype = view->span.dtype;
    }
    if (ctpy_view_matches(&like, view) && !view->readonly) {
        return 0;
    }
    PyErr_Format(
        PyExc_ValueError,
        "averages[%zd] is %s of %zu elements; expected one that can be written, "
        "of the shape and order of values[%zd], which is %s of %zu elements",
        place, ct_dtype_name(view->span.dtype), view->span.n, place,
        ct_dtype_name(value->span.dtype), value->span.n);
    return -1;
}

int
ctpy_average_take(PyObject *average, Py_ssize_t place, const ctpy_view *value,
                  ctpy_view *view)
{
    if (view_average(average, place, value, view) < 0) {
        return -1;
    }
    ((WeightAverage *)average)->marked[place] = true;
    return 0;
}

void
ctpy_average_drop(PyObject *average)
{
    WeightAverage *self = (WeightAverage *)average;
    memset(self->marked, 0,
           (size_t)PyTuple_GET_SIZE(self->values) * sizeof *self->marked);
}

bool
ctpy_average_has_rest(PyObject *average)
{
    const WeightAverage *self = (WeightAverage *)average;
    return memchr(self->marked, false, (size_t)PyTuple_GET_SIZE(self->values)) != NULL;
}

void
ctpy_average_take_back(PyObject *average, bool due)
{
    ct_average_take_back(&((WeightAverage *)average)->core, due);
}

/* ---- averaging ------------------------------------------------------------------- */

/* The pairs without a mark: floats from the front of the object's lists, other dtypes,
 * which are copied, from the back. All are on one device. */
typedef struct pair_list {
    size_t n_floats, n_others;
    ctpy_target target; /* none without pairs */
} pair_list;

/* Chooses the device by the first pair; the others have to be there, too. */
static int
place_pair(PyObject *op, PyObject *value, const ctpy_view *view, pair_list *list)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const ctpy_place where = {"a value", -1, -1};
    if (list->target.device == NULL) {
        return ctpy_target_of(state, value, &where, view, &list->target);
    }
    if (ctpy_target_has(&list->target, view)) {
        return 0;
    }
    PyErr_SetString(PyExc_ValueError,
                    "the averaged values are on more than one device: keep the model "
                    "on one, or train without weight_average");
    return -1;
}

static int
list_pairs(PyObject *op, pair_list *list)
{
    WeightAverage *self = (WeightAverage *)op;
    const size_t n = (size_t)PyTuple_GET_SIZE(self->values);
    *list = (pair_list){.n_floats = 0};
    for (size_t i = 0; i < n; i++) {
        const ctpy_place where = {"a value", -1, -1};
        PyObject *object = PyTuple_GET_ITEM(self->values, (Py_ssize_t)i);
        ctpy_view value, average;
        if (self->marked[i]) {
            continue;
        }
        if (ctpy_view_anywhere(ctpy_state_borrow(op), object, &where, &value) < 0 ||
            place_pair(op, object, &value, list) < 0 ||
            view_average(op, (Py_ssize_t)i, &value, &average) < 0) {
            return -1;
        }
        const size_t at =
            /* Integers, such as counts of batches, have no meaningful average. */
            ct_dtype_is_float(value.span.dtype) ? list->n_floats++
                                                : n - ++list->n_others;
        self->from[at] = value.span;
        self->to[at] = average.span;
    }
    return 0;
}

static ct_status
average_pairs(const WeightAverage *self, const pair_list *list, double decay,
              ct_error *err)
{
    const size_t n = (size_t)PyTuple_GET_SIZE(self->values);
    const size_t others = n - list->n_others;
    const ctpy_target *target = &list->target;
    ct_status status = target->device->average(target->stream, self->to, self->from,
                                               list->n_floats, decay, err);
    return status == CT_OK
               ? target->device->copy(target->stream, self->to + others,
                                      self->from + others, list->n_others, err)
               : status;
}

static int
average_rest(PyObject *op, double decay)
{
    WeightAverage *self = (WeightAverage *)op;
    pair_list list;
    ct_error err, unused;
    if (list_pairs(op, &list) < 0) {
        return -1;
    }
    const ct_device *device = list.target.device;
    if (device == NULL) {
        return 0;
    }
    int ordinal = list.target.ordinal;
    ct_status status = ct_device_switch(device, &ordinal, &err);
    if (status == CT_OK) {
        /* The object's lists: a second update would overwrite them. */
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        status = average_pairs(self, &list, decay, &err);
        Py_END_ALLOW_THREADS
        self->busy = false;
        (void)ct_device_switch(device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_average_finish(PyObject *average, bool due, double decay)
{
    WeightAverage *self = (WeightAverage *)average;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "an update() while another thread is in update() of the same "
                        "average: wait until it has returned");
        return -1;
    }
    int result = due ? average_rest(average, decay) : 0;
    /* On failure too: the marks are of this update alone. */
    ctpy_average_drop(average);
    if (result == 0) {
        ct_average_count(&self->core, due);
    }
    return result;
}

PyDoc_STRVAR(
    update_doc,
    "update($self, /)\n--\n\n"
    "Count an update of the optimizer and average the tensors if that is due;\n"
    "return whether it was. Those that are no floats are copied.");

static PyObject *
WeightAverage_update(PyObject *op, PyObject *Py_UNUSED(arg))
{
    double decay = 0.0;
    const bool due = ctpy_average_due(op, &decay);
    if (ctpy_average_finish(op, due, decay) < 0) {
        return NULL;
    }
    return PyBool_FromLong(due);
}

static PyMemberDef WeightAverage_members[] = {
    {"num_updates", T_LONGLONG, offsetof(WeightAverage, core.num_updates), 0,
     "Updates of the optimizer that were counted."},
    {"n_averaged", T_LONGLONG, offsetof(WeightAverage, core.n_averaged), 0,
     "States that the average is of."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef WeightAverage_methods[] = {
    {"update", WeightAverage_update, METH_NOARGS, update_doc},
    {NULL,     NULL,                 0,           NULL      },
};

static PyType_Slot WeightAverage_slots[] = {
    {Py_tp_doc,      (void *)WeightAverage_doc},
    {Py_tp_new,      WeightAverage_new        },
    {Py_tp_traverse, WeightAverage_traverse   },
    {Py_tp_clear,    WeightAverage_clear      },
    {Py_tp_dealloc,  WeightAverage_dealloc    },
    {Py_tp_methods,  WeightAverage_methods    },
    {Py_tp_members,  WeightAverage_members    },
    {0,              NULL                     },
};

PyType_Spec WeightAverage_spec = {
    .name = "ctrainer._C.WeightAverage",
    .basicsize = sizeof(WeightAverage),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = WeightAverage_slots,
};
