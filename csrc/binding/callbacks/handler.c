/* ctrainer._C.CallbackHandler: the events of a run, fired at every callback. */
#include "binding/callbacks/handler.h"

#include "binding/runtime/ctpy.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* What every event passes by keyword, in this order; attributes of the handler. */
#define CTPY_PASSED(F)                                                                 \
    F(model)                                                                           \
    F(processing_class)                                                                \
    F(optimizer)                                                                       \
    F(lr_scheduler)                                                                    \
    F(train_dataloader)                                                                \
    F(eval_dataloader)

/* `callbacks` is the list that users edit; `plans` maps a function to what
 * runtime.events.wanted said of it; `names` are those of CTPY_PASSED, as a tuple.
 * The last two are never NULL. */
#define CTPY_HANDLER_FIELDS(F) F(callbacks) F(plans) F(names) CTPY_PASSED(F)

typedef struct CallbackHandler {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    CTPY_HANDLER_FIELDS(FIELD)
#undef FIELD
} CallbackHandler;

enum {
    N_POSITIONAL = 3,
    N_PASSED = 6,
};

/* One event on its way through the callbacks. In `stack` are a slot that vectorcall may
 * use, then args, state and control, then the handler's own values, filled in anew for
 * each callback. */
typedef struct event_call {
    PyObject *event;
    PyObject *extras; /* owned dict of the event's own keywords, or NULL */
    PyObject *stack[1 + N_POSITIONAL + N_PASSED];
} event_call;

/* What an event is beside its name, by offsets of names in ctpy_state; 0: none. */
typedef struct event_kind {
    size_t name;
    size_t fourth;     /* keyword that a fourth positional argument goes by */
    size_t lowered[3]; /* flags of the control, set to False before the callbacks */
} event_kind;

PyDoc_STRVAR(CallbackHandler_doc,
             "CallbackHandler(callbacks, model, processing_class, optimizer,\n"
             "                lr_scheduler)\n--\n\n"
             "Fires the events of a run at its callbacks.");

static PyObject *
CallbackHandler_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                    PyObject *Py_UNUSED(kwargs))
{
    CallbackHandler *self = (CallbackHandler *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->callbacks = PyList_New(0);
    self->plans = PyDict_New();
    const ctpy_state *state = ctpy_state_borrow((PyObject *)self);
#define NAME(name) , state->str_##name
    self->names = PyTuple_Pack(N_PASSED CTPY_PASSED(NAME));
#undef NAME
    if (self->callbacks == NULL || self->plans == NULL || self->names == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
CallbackHandler_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    CallbackHandler *self = (CallbackHandler *)op;
    static char *names[] = {"callbacks", "model",        "processing_class",
                            "optimizer", "lr_scheduler", NULL};
    PyObject *callbacks, *model, *processing_class, *optimizer, *lr_scheduler;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:CallbackHandler", names,
                                     &callbacks, &model, &processing_class, &optimizer,
                                     &lr_scheduler)) {
        return -1;
    }
    PyObject *list = PySequence_List(callbacks);
    if (list == NULL) {
        return -1;
    }
    Py_SETREF(self->callbacks, list);
    Py_XSETREF(self->model, Py_NewRef(model));
    Py_XSETREF(self->processing_class, Py_NewRef(processing_class));
    Py_XSETREF(self->optimizer, Py_NewRef(optimizer));
    Py_XSETREF(self->lr_scheduler, Py_NewRef(lr_scheduler));
    Py_CLEAR(self->train_dataloader);
    Py_CLEAR(self->eval_dataloader);
    return 0;
}

static int
CallbackHandler_traverse(PyObject *op, visitproc visit, void *arg)
{
    CallbackHandler *self = (CallbackHandler *)op;
    Py_VISIT(Py_TYPE(op));
#define VISIT(name) Py_VISIT(self->name);
    CTPY_HANDLER_FIELDS(VISIT)
#undef VISIT
    return 0;
}

static int
CallbackHandler_clear(PyObject *op)
{
    CallbackHandler *self = (CallbackHandler *)op;
#define CLEAR(name) Py_CLEAR(self->name);
    CTPY_HANDLER_FIELDS(CLEAR)
#undef CLEAR
    return 0;
}

static void
CallbackHandler_dealloc(PyObject *op)
{
    ctpy_dealloc(op, CallbackHandler_clear);
}

/* ---- one event through the callbacks ----------------------------------------------
 *
 * A step fires four events and most callbacks listen to one of them, so the cost of an
 * event that nobody listens to is what counts. The method is looked up on the instance
 * each time (an attribute set on the instance or the class wins at once); what its body
 * wants is worked out once per function by runtime.events and remembered: nothing at
 * all for an empty body, which is then not called. */

static PyObject *
name_at(const ctpy_state *state, size_t offset)
{
    return *(PyObject *const *)((const char *)state + offset);
}

/* New references to the handler's current values, from *values on. A callback may
 * replace any of them, so they are read anew for each. */
static void
fill_passed(const CallbackHandler *self, PyObject **values)
{
#define VALUE(name) self->name,
    PyObject *const now[] = {CTPY_PASSED(VALUE)};
#undef VALUE
    for (size_t i = 0; i < N_PASSED; i++) {
        values[i] = Py_NewRef(ctpy_or_none(now[i]));
    }
}

/* keywords[name] = value, unless `accepted`, a set or NULL, lacks the name. */
static int
add_keyword(PyObject *keywords, PyObject *accepted, PyObject *name, PyObject *value)
{
    const int takes = accepted == NULL ? 1 : PySet_Contains(accepted, name);
    return takes > 0 ? PyDict_SetItem(keywords, name, value) : takes;
}

/* The keywords that the method takes, as a dict. An extra replaces the handler's own
 * value. A method that names `tokenizer` gets the processing class by that name, as
 * before transformers 4.46. */
static PyObject *
chosen_keywords(CallbackHandler *self, const event_call *call, PyObject *plan)
{
    PyObject *const *values = &call->stack[1 + N_POSITIONAL];
    PyObject *named = plan == Py_True ? NULL : PyTuple_GET_ITEM(plan, 0);
    PyObject *accepted =
        named == NULL || PyTuple_GET_ITEM(plan, 1) == Py_True ? NULL : named;
    PyObject *chosen = PyDict_New(), *name, *value;
    int status = chosen == NULL ? -1 : 0;
    if (status == 0 && named != NULL) {
        status = add_keyword(chosen, named,
                             ctpy_state_borrow((PyObject *)self)->str_tokenizer,
                             ctpy_or_none(self->processing_class));
    }
    for (Py_ssize_t i = 0; status == 0 && i < N_PASSED; i++) {
        status =
            add_keyword(chosen, accepted, PyTuple_GET_ITEM(self->names, i), values[i]);
    }
    for (Py_ssize_t i = 0; status == 0 && call->extras != NULL &&
                           PyDict_Next(call->extras, &i, &name, &value);) {
        status = add_keyword(chosen, accepted, name, value);
    }
    if (status < 0) {
        Py_CLEAR(chosen);
    }
    return chosen;
}

static PyObject *
call_method(CallbackHandler *self, PyObject *method, event_call *call, PyObject *plan)
{
    size_t nargs = N_POSITIONAL | PY_VECTORCALL_ARGUMENTS_OFFSET;
    if (plan == Py_True && call->extras == NULL) {
        return PyObject_Vectorcall(method, &call->stack[1], nargs, self->names);
    }
    PyObject *keywords = chosen_keywords(self, call, plan), *result = NULL;
    if (keywords != NULL) {
        result = PyObject_VectorcallDict(method, &call->stack[1], nargs, keywords);
        Py_DECREF(keywords);
    }
    return result;
}

/* New reference: Py_False (never call), Py_True (every keyword) or (names, others). */
static PyObject *
plan_of(CallbackHandler *self, PyObject *method)
{
    if (PyCFunction_Check(method)) {
        return Py_NewRef(Py_True);
    }
    PyObject *key = PyMethod_Check(method) ? PyMethod_GET_FUNCTION(method) : method;
    PyObject *plan = PyDict_GetItemWithError(self->plans, key);
    if (plan != NULL) {
        return Py_NewRef(plan);
    }
    bool hashable = !PyErr_Occurred();
    plan = ctpy_forgive()
               ? ctpy_call_function("ctrainer.runtime.events", "wanted", "(O)", key)
               : NULL;
    if (plan != NULL && hashable && PyDict_SetItem(self->plans, key, plan) < 0) {
        Py_CLEAR(plan);
    }
    return plan;
}

/* Puts what a callback returned in the control's place, unless it is None. */
static int
take_control(CallbackHandler *self, PyObject *callback, PyObject *event,
             PyObject *result, PyObject **control)
{
    if (result == Py_None || result == *control) {
        return 0;
    }
    PyObject *stops = NULL;
    const ctpy_state *names = ctpy_state_borrow((PyObject *)self);
    const int found = ctpy_lookup(result, names->str_should_training_stop, &stops);
    Py_XDECREF(stops);
    if (found > 0) {
        Py_SETREF(*control, Py_NewRef(result));
    }
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "%s.%U returned %.100s; return the TrainerControl, or None to leave "
                 "it as it is",
                 Py_TYPE(callback)->tp_name, event, Py_TYPE(result)->tp_name);
    return -1;
}

static int
notify(CallbackHandler *self, PyObject *callback, event_call *call, PyObject **control)
{
    PyObject *method = NULL, *plan = NULL, *result = NULL;
    PyObject **passed = &call->stack[1 + N_POSITIONAL];
    int status = ctpy_lookup(callback, call->event, &method);
    if (status <= 0) {
        return status; /* an object without this method does not listen */
    }
    status = -1;
    plan = plan_of(self, method);
    if (plan == NULL || plan == Py_False) {
        status = plan == NULL ? -1 : 0;
        goto done;
    }
    call->stack[N_POSITIONAL] = *control;
    fill_passed(self, passed);
    result = call_method(self, method, call, plan);
    for (size_t i = 0; i < N_PASSED; i++) {
        Py_DECREF(passed[i]);
    }
    if (result != NULL) {
        status = take_control(self, callback, call->event, result, control);
    }
    else {
        (void)ctpy_locate_error("callback", "(OOOO)", callback, call->event,
                                call->stack[1], call->stack[2]);
    }
done:
    Py_XDECREF(result);
    Py_XDECREF(plan);
    Py_DECREF(method);
    return status;
}

/* The list may change under a callback's hands: each position is read when reached. */
static PyObject *
notify_all(CallbackHandler *self, event_call *call)
{
    PyObject *control = Py_NewRef(call->stack[N_POSITIONAL]);
    PyObject *list = Py_XNewRef(self->callbacks);
    if (list == NULL || !PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "callbacks must be a list of callbacks");
        Py_CLEAR(control);
    }
    for (Py_ssize_t i = 0; control != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *callback = Py_NewRef(PyList_GET_ITEM(list, i));
        if (notify(self, callback, call, &control) < 0) {
            Py_CLEAR(control);
        }
        Py_DECREF(callback);
    }
    Py_XDECREF(list);
    return control;
}

/* Makes the extras a dict: one value by the name `fourth`, unless that is NULL, and
 * then one for each of kwnames. */
static int
take_extras(event_call *call, PyObject *fourth, PyObject *const *values,
            PyObject *kwnames)
{
    const Py_ssize_t n = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (fourth == NULL && n == 0) {
        return 0;
    }
    call->extras = PyDict_New();
    int status = call->extras == NULL ? -1 : 0;
    if (status == 0 && fourth != NULL) {
        status = PyDict_SetItem(call->extras, fourth, *values++);
    }
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        status = PyDict_SetItem(call->extras, PyTuple_GET_ITEM(kwnames, i), values[i]);
    }
    return status;
}

/* Fires an event: args are args, state, control and the values of the extras. */
static PyObject *
fire(PyObject *op, PyObject *event, PyObject *const *args, PyObject *fourth,
     PyObject *kwnames)
{
    event_call call = {.event = event};
    for (size_t i = 0; i < N_POSITIONAL; i++) {
        call.stack[1 + i] = args[i];
    }
    PyObject *control = NULL;
    if (take_extras(&call, fourth, &args[N_POSITIONAL], kwnames) == 0) {
        control = notify_all((CallbackHandler *)op, &call);
    }
    Py_XDECREF(call.extras);
    return control;
}

static PyObject *
fire_kind(PyObject *op, const event_kind *kind, PyObject *const *args, Py_ssize_t nargs,
          PyObject *kwnames)
{
    const ctpy_state *state = ctpy_state_borrow(op);
    PyObject *event = name_at(state, kind->name);
    if (nargs < N_POSITIONAL || nargs > N_POSITIONAL + (kind->fourth != 0)) {
        return PyErr_Format(PyExc_TypeError,
                            "%U takes args, state and control by position%s, not %zd "
                            "arguments",
                            event, kind->fourth ? " and one more" : "", nargs);
    }
    for (size_t i = 0; i < 3 && kind->lowered[i] != 0; i++) {
        if (PyObject_SetAttr(args[2], name_at(state, kind->lowered[i]), Py_False) < 0) {
            return NULL;
        }
    }
    return fire(op, event, args,
                nargs == N_POSITIONAL ? NULL : name_at(state, kind->fourth), kwnames);
}

PyDoc_STRVAR(
    call_event_doc,
    "call_event($self, event, args, state, control, /, **kwargs)\n--\n\n"
    "Call the method `event` of every callback and return the control.\n\n"
    "A callback gets the model, optimizer and the rest by keyword, and kwargs;\n"
    "what it returns, unless None, becomes the control. A callback without\n"
    "this method, or with an empty one, is skipped.");

static PyObject *
CallbackHandler_call_event(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    if (nargs != 1 + N_POSITIONAL || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError,
                        "call_event takes the event's name, args, state and control");
        return NULL;
    }
    return fire(op, args[0], &args[1], NULL, kwnames);
}

#define NAME(name) offsetof(ctpy_state, str_##name)
#define CTPY_EVENT(event, fourth, ...)                                                 \
    static PyObject *CallbackHandler_##event(PyObject *op, PyObject *const *args,      \
                                             Py_ssize_t nargs, PyObject *kwnames)      \
    {                                                                                  \
        static const event_kind kind = {NAME(event), fourth, {__VA_ARGS__}};           \
        return fire_kind(op, &kind, args, nargs, kwnames);                             \
    }
#include "binding/callbacks/events.def"
#undef CTPY_EVENT
#undef NAME

PyDoc_STRVAR(getstate_doc,
             "__getstate__($self, /)\n--\n\n"
             "Return what copy and pickle take: attributes, callbacks and what events "
             "pass.");

static PyObject *
CallbackHandler_getstate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    CallbackHandler *self = (CallbackHandler *)op;
    PyObject *fields = PyDict_New();
#define KEEP(name)                                                                     \
    if (fields != NULL && self->name != NULL &&                                        \
        PyDict_SetItemString(fields, #name, self->name) < 0) {                         \
        Py_CLEAR(fields);                                                              \
    }
    KEEP(callbacks)
    CTPY_PASSED(KEEP)
#undef KEEP
    return ctpy_copy_state_steal(op, fields);
}

PyDoc_STRVAR(setstate_doc, "__setstate__($self, state, /)\n--\n\n"
                           "Take over what __getstate__() returned.");

static PyObject *
CallbackHandler_setstate(PyObject *op, PyObject *state)
{
    CallbackHandler *self = (CallbackHandler *)op;
    PyObject *fields = ctpy_take_copy_state_borrow(op, state), *found = NULL;
    if (fields == NULL || ctpy_item(fields, "callbacks", &found) < 0) {
        return NULL;
    }
    if (found == NULL || !PyList_Check(found)) {
        Py_XDECREF(found);
        PyErr_SetString(PyExc_TypeError, "the state has no list of callbacks");
        return NULL;
    }
    Py_SETREF(self->callbacks, found);
#define TAKE(name)                                                                     \
    if (ctpy_item(fields, #name, &found) < 0) {                                        \
        return NULL;                                                                   \
    }                                                                                  \
    Py_XSETREF(self->name, found);
    CTPY_PASSED(TAKE)
#undef TAKE
    Py_RETURN_NONE;
}

/* Does this callback, not one of our own, have a method with a body for the event? */
static int
listens(CallbackHandler *self, PyObject *callback, PyObject *event)
{
    PyObject *method = NULL, *plan = NULL;
    PyObject *module =
        PyObject_GetAttrString((PyObject *)Py_TYPE(callback), "__module__");
    const char *name = module == NULL ? NULL : PyUnicode_AsUTF8(module);
    bool own = name != NULL && strncmp(name, "ctrainer.", 9) == 0;
    Py_XDECREF(module);
    int status = own ? 0 : ctpy_forgive() ? ctpy_lookup(callback, event, &method) : -1;
    if (status > 0) {
        plan = plan_of(self, method);
        status = plan == NULL ? -1 : plan != Py_False;
    }
    Py_XDECREF(plan);
    Py_XDECREF(method);
    return status;
}

int
ctpy_callbacks_listens(const ctpy_state *state, PyObject *handler, PyObject *event)
{
    CallbackHandler *self = (CallbackHandler *)handler;
    if (!PyObject_TypeCheck(handler, state->CallbackHandler) ||
        self->callbacks == NULL || !PyList_Check(self->callbacks)) {
        return 1; /* a handler of the user's own: assume that it does */
    }
    PyObject *list = Py_NewRef(self->callbacks);
    int found = 0;
    for (Py_ssize_t i = 0; found == 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *callback = Py_NewRef(PyList_GET_ITEM(list, i));
        found = listens(self, callback, event);
        Py_DECREF(callback);
    }
    Py_DECREF(list);
    return found;
}

PyDoc_STRVAR(listens_doc,
             "listens($self, event, /)\n--\n\n"
             "Is there a callback, not one of ours, that does something at the event?");

static PyObject *
CallbackHandler_listens(PyObject *op, PyObject *event)
{
    const int found = ctpy_callbacks_listens(ctpy_state_borrow(op), op, event);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

int
ctpy_trainer_fire(PyObject *op, PyObject *event)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *handler = NULL, *args = NULL, *state = NULL, *control = NULL,
             *left = NULL;
    int result = -1;
    if ((handler = PyObject_GetAttr(op, names->str_callback_handler)) == NULL ||
        (args = PyObject_GetAttr(op, names->str_args)) == NULL ||
        (state = PyObject_GetAttr(op, names->str_state)) == NULL ||
        (control = PyObject_GetAttr(op, names->str_control)) == NULL) {
        goto done;
    }
    /* By attribute lookup, so that a replaced handler or a patched event is called. */
    left = ctpy_call_hook(handler, event, (PyObject *const[]){args, state, control}, 3);
    if (left != NULL) {
        result = left == control ? 0 : PyObject_SetAttr(op, names->str_control, left);
    }
done:
    Py_XDECREF(left);
    Py_XDECREF(control);
    Py_XDECREF(state);
    Py_XDECREF(args);
    Py_XDECREF(handler);
    return result;
}

#define METHOD(name)                                                                   \
    {#name, (PyCFunction)(void (*)(void))CallbackHandler_##name,                       \
     METH_FASTCALL | METH_KEYWORDS, name##_doc}
#define CTPY_EVENT(event, ...)                                                         \
    {#event, (PyCFunction)(void (*)(void))CallbackHandler_##event,                     \
     METH_FASTCALL | METH_KEYWORDS,                                                    \
     #event "($self, args, state, control, /, *args_, **kwargs)\n--\n\n"               \
            "Fire the event at every callback; return the control."},
static PyMethodDef CallbackHandler_methods[] = {
    METHOD(call_event),
    {"listens",      CallbackHandler_listens,  METH_O,      listens_doc },
    {"__getstate__", CallbackHandler_getstate, METH_NOARGS, getstate_doc},
    {"__setstate__", CallbackHandler_setstate, METH_O,      setstate_doc},
#include "binding/callbacks/events.def"
    {NULL,           NULL,                     0,           NULL        },
};
#undef CTPY_EVENT

#define MEMBER(name, field) {#name, T_OBJECT, offsetof(CallbackHandler, field), 0, NULL}
static PyMemberDef CallbackHandler_members[] = {
    MEMBER(callbacks, callbacks),
    MEMBER(model, model),
    MEMBER(processing_class, processing_class),
    MEMBER(tokenizer, processing_class), /* its name before transformers 4.46 */
    MEMBER(optimizer, optimizer),
    MEMBER(lr_scheduler, lr_scheduler),
    MEMBER(train_dataloader, train_dataloader),
    MEMBER(eval_dataloader, eval_dataloader),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot CallbackHandler_slots[] = {
    {Py_tp_doc,      (void *)CallbackHandler_doc},
    {Py_tp_new,      CallbackHandler_new        },
    {Py_tp_init,     CallbackHandler_init       },
    {Py_tp_traverse, CallbackHandler_traverse   },
    {Py_tp_clear,    CallbackHandler_clear      },
    {Py_tp_dealloc,  CallbackHandler_dealloc    },
    {Py_tp_methods,  CallbackHandler_methods    },
    {Py_tp_members,  CallbackHandler_members    },
    {0,              NULL                       },
};

PyType_Spec CallbackHandler_spec = {
    .name = "ctrainer._C.CallbackHandler",
    .basicsize = sizeof(CallbackHandler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = CallbackHandler_slots,
};
