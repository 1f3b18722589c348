/* What every extension type uses: errors, attributes and contexts of Python objects,
 * copies, a watch on objects' memory; and what the process has once: the handlers of
 * signals, threads, the instruction set and the C allocator. */
#include "binding/runtime/ctpy.h"

#include "core/base/arena.h"
#include "core/base/mapping.h"
#include "core/base/owner.h"
#include "core/base/pool.h"
#include "core/device/device.h"

#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* ---- errors ---------------------------------------------------------------------- */

static PyObject *
exception_borrow(ct_status code)
{
    switch (code) {
    case CT_EINVAL:
        return PyExc_ValueError;
    case CT_EFLOAT:
        return PyExc_FloatingPointError;
    case CT_EIO:
        return PyExc_OSError;
    case CT_EDEVICE:
        return PyExc_RuntimeError;
    /* CT_ECOMM and CT_ENOMEM are raised by the caller; the others are no errors of a
     * call. */
    case CT_ECOMM:
    case CT_OK:
    case CT_ENOMEM:
    case CT_EHOST:
        break;
    }
    return PyExc_SystemError;
}

/* Sets the exception from the message; names and contents of files in it may be no
 * UTF-8, or cut within a character. */
static void
set_error(PyObject *type, int os_error, const char *message)
{
    PyObject *text =
        PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "backslashreplace");
    PyObject *value = text;
    /* With two arguments OSError becomes the subclass for errno, such as
     * FileNotFoundError. */
    if (text != NULL && os_error != 0) {
        value = Py_BuildValue("(iN)", os_error, text);
    }
    if (value != NULL) {
        PyErr_SetObject(type, value);
        Py_DECREF(value);
    }
}

/* A class of Python's, by which callers distinguish a lost rank from other
 * RuntimeErrors. */
static void
set_rank_failure(const char *message)
{
    PyObject *module = PyImport_ImportModule("ctrainer.runtime.errors");
    PyObject *type =
        module == NULL ? NULL : PyObject_GetAttrString(module, "RankFailure");
    if (type != NULL) {
        set_error(type, 0, message);
    }
    Py_XDECREF(type);
    Py_XDECREF(module);
}

PyObject *
ctpy_raise(const ct_error *err)
{
    /* The callback's own exception says more than any text of ours. */
    if (err->code == CT_EHOST && PyErr_Occurred()) {
        return NULL;
    }
    if (err->code == CT_ENOMEM) {
        return PyErr_NoMemory();
    }
    if (err->code == CT_ECOMM) {
        set_rank_failure(err->message);
        return NULL;
    }
    set_error(exception_borrow(err->code), err->code == CT_EIO ? err->os_error : 0,
              err->message);
    return NULL;
}

int
ctpy_raise_int(const ct_error *err)
{
    (void)ctpy_raise(err);
    return -1;
}

/* ---- calls ----------------------------------------------------------------------- */

PyObject *
ctpy_call_function(const char *module, const char *name, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *answer = NULL, *args = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *function = args == NULL ? NULL : PyImport_ImportModule(module);
    if (function != NULL) {
        Py_SETREF(function, PyObject_GetAttrString(function, name));
    }
    if (function != NULL) {
        answer = PyObject_CallObject(function, args);
    }
    Py_XDECREF(function);
    Py_XDECREF(args);
    return answer;
}

PyObject *
ctpy_locate_error(const char *place, const char *format, ...)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    va_list values;
    va_start(values, format);
    PyObject *facts = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *answer = facts == NULL
                           ? NULL
                           : ctpy_call_function("ctrainer.runtime.notes", "locate",
                                                "(OsO)", value, place, facts);
    if (answer != NULL || ctpy_forgive()) {
        PyErr_Restore(type, value, trace);
    }
    else { /* out of memory or Ctrl-C */
        Py_XDECREF(trace);
        Py_XDECREF(value);
        Py_XDECREF(type);
    }
    Py_XDECREF(answer);
    Py_XDECREF(facts);
    return NULL;
}

/* ---- lifetime of types without Python objects ------------------------------------ */

int
ctpy_leaf_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    return 0;
}

void
ctpy_leaf_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    type->tp_free(op);
    Py_DECREF(type); /* an instance of a heap type owns a reference to the type */
}

void
ctpy_dealloc(PyObject *op, inquiry clear)
{
    PyObject_GC_UnTrack(op);
    (void)clear(op);
    ctpy_leaf_dealloc(op);
}

/* ---- attributes as C values, and back -------------------------------------------- */

int
ctpy_lookup(PyObject *op, PyObject *name, PyObject **value)
{
#if PY_VERSION_HEX >= 0x030d0000
    return PyObject_GetOptionalAttr(op, name, value);
#else
    return _PyObject_LookupAttr(op, name, value); /* the old name */
#endif
}

int
ctpy_item(PyObject *mapping, const char *name, PyObject **value)
{
    *value = PyMapping_GetItemString(mapping, name);
    /* Any mapping, so a missing key shows as an exception. */
    if (*value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        return 0;
    }
    return *value == NULL ? -1 : 1;
}

/* Out of memory and Ctrl-C must reach the user, whatever a lookup was for. */
bool
ctpy_forgive(void)
{
    if (PyErr_Occurred() && (!PyErr_ExceptionMatches(PyExc_Exception) ||
                             PyErr_ExceptionMatches(PyExc_MemoryError))) {
        return false;
    }
    PyErr_Clear();
    return true;
}

PyObject *
ctpy_take_exception(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(trace);
    Py_XDECREF(type);
    return value;
}

void
ctpy_set_exception_steal(PyObject *value)
{
    PyObject *trace = PyException_GetTraceback(value);
    PyErr_Restore(Py_NewRef(Py_TYPE(value)), value, trace);
}

PyObject *
ctpy_int64_tuple(const int64_t *values, int n)
{
    PyObject *tuple = PyTuple_New(values == NULL ? 0 : n);
    for (int i = 0; tuple != NULL && values != NULL && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
        }
        else {
            PyTuple_SET_ITEM(tuple, i, value);
        }
    }
    return tuple;
}

static int
bool_steal(PyObject *found, int *value)
{
    if (found == NULL) {
        return -1;
    }
    *value = PyObject_IsTrue(found);
    Py_DECREF(found);
    return *value < 0 ? -1 : 0;
}

int
ctpy_double_steal(PyObject *found, double *value)
{
    if (found == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
int64_steal(PyObject *found, int64_t *value)
{
    if (found == NULL) {
        return -1;
    }
    PyObject *index = PyNumber_Long(found); /* a step count may come as a float */
    Py_DECREF(found);
    if (index == NULL) {
        return -1;
    }
    *value = PyLong_AsLongLong(index);
    Py_DECREF(index);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

int
ctpy_get_bool(PyObject *op, PyObject *name, int *value)
{
    return bool_steal(PyObject_GetAttr(op, name), value);
}

int
ctpy_get_double(PyObject *op, PyObject *name, double *value)
{
    return ctpy_double_steal(PyObject_GetAttr(op, name), value);
}

int
ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value)
{
    return int64_steal(PyObject_GetAttr(op, name), value);
}

PyObject *
ctpy_field_object(PyObject *op, PyObject *outer, PyObject *name)
{
    PyObject *holder = PyObject_GetAttr(op, outer);
    if (holder == NULL) {
        return NULL;
    }
    PyObject *found = PyObject_GetAttr(holder, name);
    Py_DECREF(holder);
    return found;
}

int
ctpy_field_bool(PyObject *op, PyObject *outer, PyObject *name, int *value)
{
    return bool_steal(ctpy_field_object(op, outer, name), value);
}

int
ctpy_field_int64(PyObject *op, PyObject *outer, PyObject *name, int64_t *value)
{
    return int64_steal(ctpy_field_object(op, outer, name), value);
}

static int
set_steal(PyObject *op, PyObject *name, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int result = PyObject_SetAttr(op, name, value);
    Py_DECREF(value);
    return result;
}

int
ctpy_set_int64(PyObject *op, PyObject *name, int64_t value)
{
    return set_steal(op, name, PyLong_FromLongLong(value));
}

int
ctpy_set_double(PyObject *op, PyObject *name, double value)
{
    return set_steal(op, name, PyFloat_FromDouble(value));
}

PyObject *
ctpy_get_optional(PyObject *op, PyObject *name, int *failed)
{
    PyObject *found;
    *failed = ctpy_lookup(op, name, &found) < 0;
    return found;
}

int
ctpy_get_flag(PyObject *op, PyObject *name, bool *value)
{
    int failed;
    PyObject *found = ctpy_get_optional(op, name, &failed);
    const int truth = found == NULL ? (failed ? -1 : 0) : PyObject_IsTrue(found);
    Py_XDECREF(found);
    *value = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* The function called name of the last class in the method resolution order that has
 * it: ours, unless a class of the user's follows. Borrowed, or NULL. */
static PyObject *
first_definition_borrow(PyTypeObject *type, PyObject *name)
{
    PyObject *found = NULL;
    for (Py_ssize_t i = PyTuple_GET_SIZE(type->tp_mro); found == NULL && i-- > 0;) {
        PyObject *in = ((PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i))->tp_dict;
        found = in == NULL ? NULL : PyDict_GetItemWithError(in, name);
    }
    return found;
}

/* A function assigned to the instance is an override as well. */
int
ctpy_is_default(PyObject *op, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(op, name);
    if (found == NULL) {
        return -1;
    }
    int native = PyMethod_Check(found)
                     ? PyMethod_GET_SELF(found) == op &&
                           PyMethod_GET_FUNCTION(found) ==
                               first_definition_borrow(Py_TYPE(op), name)
                     : PyCFunction_Check(found) && PyCFunction_GET_SELF(found) == op;
    Py_DECREF(found);
    return native;
}

/* ---- context managers ------------------------------------------------------------ */

/* Calls exit with the current exception; 1 when exit suppressed it. */
static int
leave_with_exception(PyObject *context, PyObject *exit_name)
{
    PyObject *type, *value, *trace, *answer;
    PyErr_Fetch(&type, &value, &trace);
    /* __exit__ expects an instance, with the traceback that `raise` would have set. */
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    PyObject *stack[] = {context, type, value, trace == NULL ? Py_None : trace};
    answer = PyObject_VectorcallMethod(exit_name, stack, 4, NULL);
    int suppressed = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (suppressed == 0) {
        PyErr_Restore(type, value, trace);
        return 0;
    }
    Py_XDECREF(trace);
    Py_XDECREF(value);
    Py_XDECREF(type);
    return suppressed;
}

static int
leave(PyObject *context, PyObject *exit_name)
{
    if (PyErr_Occurred()) {
        /* The values that the body should have made do not exist, so nothing can
         * continue. */
        if (leave_with_exception(context, exit_name) > 0) {
            PyErr_Format(PyExc_RuntimeError,
                         "%.100s swallowed an exception that training cannot continue "
                         "from; let it pass",
                         Py_TYPE(context)->tp_name);
        }
        return -1;
    }
    PyObject *stack[] = {context, Py_None, Py_None, Py_None};
    return ctpy_drop_steal(PyObject_VectorcallMethod(exit_name, stack, 4, NULL));
}

PyObject *
ctpy_enter_context_steal(PyObject *context, PyObject *enter_name)
{
    PyObject *entered =
        context == NULL ? NULL : PyObject_CallMethodNoArgs(context, enter_name);
    if (entered == NULL) {
        Py_CLEAR(context);
    }
    Py_XDECREF(entered);
    return context;
}

PyObject *
ctpy_leave_context_steal(PyObject *context, PyObject *exit_name, PyObject *result)
{
    if (context != NULL && leave(context, exit_name) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(context);
    return result;
}

/* ---- copies, by copy and pickle -------------------------------------------------- */

/* The state has the fields of the struct, and the attributes added by users and
 * subclasses. */

PyObject *
ctpy_copy_state_steal(PyObject *op, PyObject *fields)
{
    PyObject *own = NULL, *state = NULL;
    if (fields != NULL) {
        own = PyObject_GenericGetDict(op, NULL);
        if (own == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            own = Py_NewRef(Py_None); /* a type without a __dict__ */
        }
    }
    if (own != NULL && own != Py_None) {
        /* A copy: the state must not change with the instance. */
        Py_SETREF(own, PyDict_Copy(own));
    }
    if (own != NULL) {
        state = PyTuple_Pack(2, own, fields);
    }
    Py_XDECREF(own);
    Py_XDECREF(fields);
    return state;
}

PyObject *
ctpy_take_copy_state_borrow(PyObject *op, PyObject *state)
{
    if (!PyTuple_Check(state) || PyTuple_GET_SIZE(state) != 2 ||
        !PyDict_Check(PyTuple_GET_ITEM(state, 1)) ||
        !(PyDict_Check(PyTuple_GET_ITEM(state, 0)) ||
          PyTuple_GET_ITEM(state, 0) == Py_None)) {
        PyErr_Format(PyExc_TypeError,
                     "%.100s.__setstate__ takes what __getstate__ returned",
                     Py_TYPE(op)->tp_name);
        return NULL;
    }
    PyObject *name, *value, *own = PyTuple_GET_ITEM(state, 0);
    Py_ssize_t at = 0;
    while (own != Py_None && PyDict_Next(own, &at, &name, &value)) {
        PyObject *mine = PyObject_GenericGetDict(op, NULL);
        const int failed = mine == NULL || PyDict_SetItem(mine, name, value) < 0;
        Py_XDECREF(mine);
        if (failed) {
            return NULL;
        }
    }
    return PyTuple_GET_ITEM(state, 1);
}

typedef struct rejection {
    PyTypeObject *type; /* borrowed from the module's state */
    const char *why;
} rejection;

static const char of_group[] = "it belongs to the ranks of an open group";
static const char of_run[] = "it is a part of a run that is under way";

/* Whether a subclass overrides __reduce__; -1 with an exception. */
static int
has_own_reduce(PyObject *op)
{
    PyObject *own = PyObject_GetAttrString((PyObject *)Py_TYPE(op), "__reduce__");
    PyObject *usual =
        PyObject_GetAttrString((PyObject *)&PyBaseObject_Type, "__reduce__");
    const int result = own == NULL || usual == NULL ? -1 : own != usual;
    Py_XDECREF(own);
    Py_XDECREF(usual);
    return result;
}

static PyObject *
reject(PyObject *op, PyObject *Py_UNUSED(protocol))
{
    ctpy_state *state = ctpy_state_borrow(op);
    const int own = has_own_reduce(op);
    if (own != 0) {
        return own < 0 ? NULL : PyObject_CallMethod(op, "__reduce__", NULL);
    }
    const rejection known[] = {
        {state->CheckpointWriter, "it writes files from a thread of this process"  },
        {state->DiskMemory,       "its file is open in this process alone"         },
        {state->FairseqTrainer,   "it holds a run that is under way"               },
        {state->FSDPUnit,         "its memory is a shard of the group's parameters"},
        {state->GradHook,         of_run                                           },
        {state->MappedMemory,     "it maps memory of this process"                 },
        {state->ObjectWatch,      of_run                                           },
        {state->Run,              of_run                                           },
        {state->RowBuffer,        "it may map a file that this process has opened" },
    };
    const char *why = of_group;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (PyObject_TypeCheck(op, known[i].type)) {
            why = known[i].why;
        }
    }
    PyErr_Format(PyExc_TypeError,
                 "a %.100s cannot be copied or pickled: %s. Copy what holds it before "
                 "training begins, or save a checkpoint and load that",
                 Py_TYPE(op)->tp_name, why);
    return NULL;
}

static PyMethodDef rejecting = {"__reduce_ex__", reject, METH_O,
                                "__reduce_ex__($self, protocol, /)\n--\n\nRaise "
                                "TypeError: there are no copies, but those of a "
                                "subclass's own __reduce__()."};

/* On the types, so that pickle and copy fail at once instead of copying an empty
 * struct. */
int
ctpy_reject_copies(const ctpy_state *state)
{
    PyTypeObject *const types[] = {
        state->BMUF,           state->CheckpointWriter,
        state->CollectiveWork, state->Communicator,
        state->DiskMemory,     state->FSDPUnit,
        state->FairseqTrainer, state->GradHook,
        state->GradReducer,    state->GroupMemory,
        state->MappedMemory,   state->ObjectWatch,
        state->RowBuffer,      state->Run,
    };
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        PyObject *method = PyDescr_NewMethod(types[i], &rejecting);
        const int failed =
            method == NULL ||
            PyObject_SetAttrString((PyObject *)types[i], rejecting.ml_name, method) < 0;
        Py_XDECREF(method);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* ---- ObjectWatch: have objects changed since the last call? ---------------------- */

/* A generator of random numbers returns its state as a new tuple or array of 624 words,
 * in more time than a training step of a small model. For a state within the object, a
 * comparison of the object's memory shows whether an earlier copy still holds. */

typedef struct ObjectWatch {
    PyObject_HEAD
    PyObject *objects; /* a tuple, or NULL before __init__ */
    unsigned char
        *bytes;  /* the objects' bodies at the last call, one after the other */
    size_t size; /* of bytes */
} ObjectWatch;

/* The bytes after the reference count and the type. */
static size_t
body_size(PyObject *object)
{
    return (size_t)Py_TYPE(object)->tp_basicsize - sizeof(PyObject);
}

PyDoc_STRVAR(ObjectWatch_doc,
             "ObjectWatch(objects)\n--\n\n"
             "Looks for changes in the memory of objects, which it keeps alive.\n"
             "\n"
             "objects: an iterable of any that have their state in themselves, as\n"
             "random.Random and NumPy's MT19937 have.");

static int
ObjectWatch_clear(PyObject *op)
{
    ObjectWatch *self = (ObjectWatch *)op;
    Py_CLEAR(self->objects);
    PyMem_Free(self->bytes);
    self->bytes = NULL;
    self->size = 0;
    return 0;
}

static int
ObjectWatch_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"objects", NULL};
    ObjectWatch *self = (ObjectWatch *)op;
    PyObject *given;
    size_t size = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:ObjectWatch", names, &given)) {
        return -1;
    }
    PyObject *objects = PySequence_Tuple(given);
    if (objects == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(objects); i++) {
        size += body_size(PyTuple_GET_ITEM(objects, i));
    }
    /* Zeroed, so that the first call reports a change. */
    unsigned char *bytes = PyMem_Calloc(size, 1);
    if (bytes == NULL) {
        Py_DECREF(objects);
        PyErr_NoMemory();
        return -1;
    }
    (void)ObjectWatch_clear(op);
    self->objects = objects;
    self->bytes = bytes;
    self->size = size;
    return 0;
}

static int
ObjectWatch_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((ObjectWatch *)op)->objects);
    return 0;
}

static void
ObjectWatch_dealloc(PyObject *op)
{
    ctpy_dealloc(op, ObjectWatch_clear);
}

PyDoc_STRVAR(changed_doc,
             "changed($self, /)\n--\n\n"
             "Return whether the memory of any object differs from what it was at the\n"
             "last call, or from zeros at the first.\n"
             "\n"
             "What an object keeps elsewhere, such as its attributes, is not seen.");

static PyObject *
ObjectWatch_changed(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ObjectWatch *self = (ObjectWatch *)op;
    bool changed = false;
    unsigned char *seen = self->bytes;
    CTPY_LOCK(op)
    const Py_ssize_t n = self->objects == NULL ? 0 : PyTuple_GET_SIZE(self->objects);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *object = PyTuple_GET_ITEM(self->objects, i);
        const unsigned char *body = (const unsigned char *)object + sizeof(PyObject);
        const size_t size = body_size(object);
        if (memcmp(seen, body, size) != 0) {
            memcpy(seen, body, size);
            changed = true;
        }
        seen += size;
    }
    CTPY_UNLOCK()
    return PyBool_FromLong(changed);
}

static PyMethodDef ObjectWatch_methods[] = {
    {"changed", ObjectWatch_changed, METH_NOARGS, changed_doc},
    {NULL,      NULL,                0,           NULL       },
};

static PyType_Slot ObjectWatch_slots[] = {
    {Py_tp_doc,      (void *)ObjectWatch_doc},
    {Py_tp_init,     ObjectWatch_init       },
    {Py_tp_traverse, ObjectWatch_traverse   },
    {Py_tp_clear,    ObjectWatch_clear      },
    {Py_tp_dealloc,  ObjectWatch_dealloc    },
    {Py_tp_methods,  ObjectWatch_methods    },
    {0,              NULL                   },
};

PyType_Spec ObjectWatch_spec = {
    .name = "ctrainer._C.ObjectWatch",
    .basicsize = sizeof(ObjectWatch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ObjectWatch_slots,
};

/* ---- Ctrl-C and SIGTERM while training ------------------------------------------- */

/* A process has one disposition per signal, so this is process-wide by nature: the
 * first train() on the main thread installs the handler, the last to leave restores the
 * previous handler. A child forked meanwhile, such as a worker of a data loader, trains
 * nothing: its first signal goes to the previous handler. */
static atomic_int requested;

/* What the first of the runs found. */
static struct {
    ct_owner owner;
    int runs;
    struct sigaction on_int, on_term;
} outermost;

static void
on_signal(int number)
{
    int none = 0;
    /* Only functions that POSIX allows in handlers are called here. */
    if (!ct_owner_is_here(outermost.owner)) {
        (void)sigaction(
            number, number == SIGINT ? &outermost.on_int : &outermost.on_term, NULL);
        (void)raise(number);
    }
    else if (!atomic_compare_exchange_strong(&requested, &none, number)) {
        /* A second signal means now: back to the system's own action. */
        (void)signal(number, SIG_DFL);
        (void)raise(number);
    }
}

int
ctpy_signal_requested(void)
{
    return atomic_load_explicit(&requested, memory_order_relaxed);
}

void
ctpy_signal_request(int number)
{
    int none = 0;
    (void)atomic_compare_exchange_strong(&requested, &none, number);
}

void
ctpy_signals_install(ctpy_signals *saved)
{
    struct sigaction action = {.sa_handler = on_signal};
    (void)sigemptyset(&action.sa_mask);
    /* A child forked during a run trains by itself: the parent's runs are not its
     * own. */
    if (outermost.runs > 0 && !ct_owner_is_here(outermost.owner)) {
        (void)sigaction(SIGINT, &outermost.on_int, NULL);
        (void)sigaction(SIGTERM, &outermost.on_term, NULL);
        outermost.runs = 0;
    }
    if (outermost.runs == 0) {
        outermost.owner = ct_owner_here();
        (void)sigaction(SIGINT, NULL, &outermost.on_int);
        (void)sigaction(SIGTERM, NULL, &outermost.on_term);
    }
    atomic_store(&requested, 0);
    saved->installed = sigaction(SIGINT, &action, &saved->on_int) == 0 &&
                       sigaction(SIGTERM, &action, &saved->on_term) == 0;
    outermost.runs += saved->installed;
}

int
ctpy_signals_restore(ctpy_signals *saved)
{
    /* Cleared with the reading, so that the next run does not stop at once. */
    int number = atomic_exchange(&requested, 0);
    if (saved->installed) {
        (void)sigaction(SIGINT, &saved->on_int, NULL);
        (void)sigaction(SIGTERM, &saved->on_term, NULL);
        saved->installed = false;
        outermost.runs -= outermost.runs > 0;
    }
    return number;
}

/* ---- threads, instruction set and allocator -------------------------------------- */

static const char ctpy_get_num_threads_doc[] =
    "get_num_threads($module, /)\n--\n\n"
    "Return how many threads work on an update, the caller included.";

static PyObject *
ctpy_get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyLong_FromSize_t(ct_pool_threads());
}

static const char ctpy_set_num_threads_doc[] =
    "set_num_threads($module, n, /)\n--\n\n"
    "Let n threads, 1 to 256, work on an update; results do not depend on it.\n\n"
    "The default is the number of processors that the process may use, or\n"
    "CTRAINER_NUM_THREADS, or OMP_NUM_THREADS.";

static PyObject *
ctpy_set_num_threads(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_status status;
    ct_error err;
    Py_ssize_t n = PyNumber_AsSsize_t(arg, PyExc_OverflowError);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    /* Waits for a running job, perhaps of another Python thread. */
    Py_BEGIN_ALLOW_THREADS
    status = ct_pool_set_threads(n < 0 ? 0 : (size_t)n, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}

static const char ctpy_cpu_isa_doc[] =
    "cpu_isa($module, /)\n--\n\n"
    "Return the instruction set of the kernels: 'base', 'v3' (AVX2) or 'v4' (AVX-512).";

static PyObject *
ctpy_cpu_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyUnicode_FromString(ct_cpu_isa());
}

static const char ctpy_set_cpu_isa_doc[] =
    "set_cpu_isa($module, name, /)\n--\n\n"
    "Use the kernels of that instruction set; results are the same bits on each.\n\n"
    "The default is the best that the processor has, or CTRAINER_ISA. Raises\n"
    "ValueError where the processor lacks it. Not while a step is under way.";

static PyObject *
ctpy_set_cpu_isa(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_error err;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL) {
        return NULL;
    }
    if (ct_cpu_set_isa(name, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}

enum {
    INITIAL_KEPT = 128 * 1024, /* of glibc */
    TUNED_KEPT = 1 << 30,
    ENDS_KEPT = 64 /* times as much as of a block, at the end of the heap */
};

static const char ctpy_malloc_tune_doc[] =
    "malloc_tune($module, enable, /)\n--\n\n"
    "Keep freed blocks of up to 1 GiB in the process instead of returning them.\n\n"
    "glibc maps blocks above 128 KiB anew each time and faults their pages in, which\n"
    "costs a training step on the CPU about a sixth of its time. This sets\n"
    "M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of the whole process; False goes back to\n"
    "glibc's initial values, which from then on no longer adapt. Where the user has\n"
    "set MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ nothing is changed. Returns\n"
    "whether the setting was applied: False without glibc.";

static PyObject *
ctpy_malloc_tune(PyObject *Py_UNUSED(module), PyObject *arg)
{
    int enable = PyObject_IsTrue(arg);
    const size_t kept = enable > 0 ? TUNED_KEPT : INITIAL_KEPT;
    return enable < 0 ? NULL : PyBool_FromLong(ct_malloc_keep(kept, kept));
}

static const char ctpy_malloc_keep_doc[] =
    "malloc_keep($module, nbytes, /)\n--\n\n"
    "Keep freed blocks of up to nbytes, return longer ones to the system.\n\n"
    "A middle way between malloc_tune(True) and (False). Whether it was applied; see\n"
    "there. Raises ValueError for nbytes below 1.";

static PyObject *
ctpy_malloc_keep(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const size_t kept = PyLong_AsSize_t(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (kept < 1 || kept > SIZE_MAX / ENDS_KEPT) {
        return PyErr_Format(PyExc_ValueError,
                            "nbytes must be at least 1 and at most %zu, got %zu",
                            SIZE_MAX / ENDS_KEPT, kept);
    }
    return PyBool_FromLong(ct_malloc_keep(kept, kept * ENDS_KEPT));
}

static const char ctpy_malloc_trim_doc[] =
    "malloc_trim($module, /)\n--\n\n"
    "Return malloc's free whole pages to the system, unless there are few.\n\n"
    "Without glibc nothing is done.";

static PyObject *
ctpy_malloc_trim(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    Py_BEGIN_ALLOW_THREADS
    ct_malloc_trim();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static const char ctpy_recycle_blocks_doc[] =
    "recycle_blocks($module, library, /)\n--\n\n"
    "Serve the library's blocks of 128 KiB and more from memory that the units of\n"
    "sharded modules share, for the life of the process.\n\n"
    "library: file name of a loaded library that allocates by posix_memalign() and\n"
    "free(), such as 'libc10.so' of torch. Freed blocks keep their pages for the next\n"
    "ones, of any length. Whether it was applied: False if the library is not loaded\n"
    "or calls other functions, or under a limit of the process's addresses.";

static PyObject *
ctpy_recycle_blocks(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const char *library = PyUnicode_AsUTF8(arg);
    return library == NULL ? NULL : PyBool_FromLong(ct_arena_serve(library));
}

PyMethodDef ctpy_runtime_ctpy_functions[] = {
    {"cpu_isa",         ctpy_cpu_isa,         METH_NOARGS, ctpy_cpu_isa_doc        },
    {"get_num_threads", ctpy_get_num_threads, METH_NOARGS, ctpy_get_num_threads_doc},
    {"malloc_keep",     ctpy_malloc_keep,     METH_O,      ctpy_malloc_keep_doc    },
    {"malloc_trim",     ctpy_malloc_trim,     METH_NOARGS, ctpy_malloc_trim_doc    },
    {"malloc_tune",     ctpy_malloc_tune,     METH_O,      ctpy_malloc_tune_doc    },
    {"recycle_blocks",  ctpy_recycle_blocks,  METH_O,      ctpy_recycle_blocks_doc },
    {"set_cpu_isa",     ctpy_set_cpu_isa,     METH_O,      ctpy_set_cpu_isa_doc    },
    {"set_num_threads", ctpy_set_num_threads, METH_O,      ctpy_set_num_threads_doc},
    {NULL,              NULL,                 0,           NULL                    },
};
