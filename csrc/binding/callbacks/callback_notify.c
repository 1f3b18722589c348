/* One event through the callbacks of a handler.
 *
 * A step fires four events and most callbacks listen to one of them, so the cost of an
 * event that nobody listens to is what counts. The method is looked up on the instance
 * each time (an attribute set on the instance or the class wins at once); what its body
 * wants is worked out once per function by runtime.events and remembered: nothing at
 * all for an empty body, which is then not called. */
#include "binding/callbacks/handler.h"
#include "binding/callbacks/ctpy_callbacks.h"

#include <stdbool.h>
#include <string.h>

/* New references to the handler's current values, from *values on. A callback may
 * replace any of them, so they are read anew for each. */
static size_t
fill_passed(CallbackHandler *self, const event_call *call, PyObject **values)
{
#define VALUE(name) self->name,
    PyObject *const now[] = {CTPY_PASSED(VALUE)};
#undef VALUE
    size_t n = 0;
    for (size_t i = 0; i < N_PASSED; i++) {
        if ((call->shadowed >> i & 1u) == 0) {
            values[n++] = Py_NewRef(now[i] == NULL ? Py_None : now[i]);
        }
    }
    return n;
}

/* The keywords as a dict, less those that `accepted` lacks unless `others` too are
 * taken. A method that names `tokenizer` gets the processing class by that name, as
 * before transformers 4.46. */
static PyObject *
chosen_keywords(CallbackHandler *self, const event_call *call, PyObject *accepted,
                bool others)
{
    PyObject *tokenizer = ctpy_state_borrow((PyObject *)self)->str_tokenizer;
    PyObject *const *values = &call->stack[1 + N_POSITIONAL];
    PyObject *chosen = PyDict_New();
    Py_ssize_t n = PyTuple_GET_SIZE(call->names);
    int wants = PySet_Contains(accepted, tokenizer);
    if (chosen == NULL || wants < 0) {
        goto fail;
    }
    PyObject *processing = self->processing_class;
    if (wants && PyDict_SetItem(chosen, tokenizer,
                                processing == NULL ? Py_None : processing) < 0) {
        goto fail;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(call->names, i);
        int take = others ? 1 : PySet_Contains(accepted, name);
        if (take < 0 || (take && PyDict_SetItem(chosen, name, values[i]) < 0)) {
            goto fail;
        }
    }
    return chosen;
fail:
    Py_XDECREF(chosen);
    return NULL;
}

static PyObject *
call_method(CallbackHandler *self, PyObject *method, event_call *call, PyObject *plan)
{
    size_t nargs = N_POSITIONAL | PY_VECTORCALL_ARGUMENTS_OFFSET;
    if (plan == Py_True) {
        return PyObject_Vectorcall(method, &call->stack[1], nargs, call->names);
    }
    PyObject *keywords = chosen_keywords(self, call, PyTuple_GET_ITEM(plan, 0),
                                         PyTuple_GET_ITEM(plan, 1) == Py_True);
    if (keywords == NULL) {
        return NULL;
    }
    PyObject *result =
        PyObject_VectorcallDict(method, &call->stack[1], nargs, keywords);
    Py_DECREF(keywords);
    return result;
}

/* New reference: what ctrainer.runtime.events.wanted says of the callable. */
static PyObject *
make_plan(PyObject *function)
{
    PyObject *module = PyImport_ImportModule("ctrainer.runtime.events");
    if (module == NULL) {
        return NULL;
    }
    PyObject *plan = PyObject_CallMethod(module, "wanted", "O", function);
    Py_DECREF(module);
    return plan;
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
    plan = ctpy_forgive() ? make_plan(key) : NULL;
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
    size_t n = fill_passed(self, call, passed);
    result = call_method(self, method, call, plan);
    for (size_t i = 0; i < n; i++) {
        Py_DECREF(passed[i]);
    }
    if (result != NULL) {
        status = take_control(self, callback, call->event, result, control);
    }
done:
    Py_XDECREF(result);
    Py_XDECREF(plan);
    Py_DECREF(method);
    return status;
}

/* The list may change under a callback's hands: each position is read when reached. */
PyObject *
ctpy_notify_all(CallbackHandler *self, event_call *call)
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
