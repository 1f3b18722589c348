/* The tensors in what a module takes and returns, and hooks on them. */
#include "binding/runtime/buffer.h"
#include "binding/fsdp/unit.h"

typedef struct visit {
    ctpy_state *state;
    PyObject *hook;
    PyObject *met; /* a set of the ids that have their hook */
    Py_ssize_t n;
} visit;

static int visit_object(visit *v, PyObject *op);

/* A tensor that is returned twice is met once. */
static int
is_new(const visit *v, PyObject *tensor)
{
    PyObject *id = PyLong_FromVoidPtr(tensor);
    int known = id == NULL ? -1 : PySet_Contains(v->met, id);
    if (known == 0 && PySet_Add(v->met, id) < 0) {
        known = -1;
    }
    Py_XDECREF(id);
    return known < 0 ? -1 : !known;
}

static int
visit_tensor(visit *v, PyObject *tensor)
{
    PyObject *wanted = PyObject_GetAttr(tensor, v->state->str_requires_grad);
    if (wanted == NULL) {
        return -1;
    }
    const bool hooked = wanted == Py_True;
    Py_DECREF(wanted);
    const int fresh = hooked ? is_new(v, tensor) : 0;
    if (fresh < 1) {
        return fresh;
    }
    PyObject *handle = ctpy_call_hook(tensor, v->state->str_register_hook, &v->hook, 1);
    Py_XDECREF(handle);
    v->n++;
    return handle == NULL ? -1 : 0;
}

static int
visit_items(visit *v, PyObject *items_steal)
{
    int result = items_steal == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(items_steal);
         i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items_steal, i));
        result = visit_object(v, item);
        Py_DECREF(item);
    }
    Py_XDECREF(items_steal);
    return result;
}

/* The fields of a dataclass; what has none is no container. */
static int
visit_fields(visit *v, PyObject *op)
{
    PyObject *fields, *values;
    int found = ctpy_lookup(op, v->state->str___dataclass_fields__, &fields);
    if (found < 1 || PyType_Check(op)) {
        if (found == 1) {
            Py_DECREF(fields);
        }
        return found < 0 ? -1 : 0;
    }
    Py_DECREF(fields);
    found = ctpy_lookup(op, v->state->str___dict__, &values);
    if (found < 1) {
        return found;
    }
    PyObject *items = PyMapping_Values(values);
    Py_DECREF(values);
    return visit_items(v, items);
}

static int
visit_object(visit *v, PyObject *op)
{
    if (op == Py_None || PyUnicode_CheckExact(op) || PyLong_Check(op) ||
        PyFloat_CheckExact(op)) {
        return 0;
    }
    const int is_tensor = ctpy_is_torch_tensor(v->state, op);
    if (is_tensor != 0) {
        return is_tensor < 0 ? -1 : visit_tensor(v, op);
    }
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
        return -1;
    }
    int result;
    if (PyTuple_Check(op) || PyList_Check(op) || PyAnySet_Check(op)) {
        result = visit_items(v, PySequence_Tuple(op));
    }
    else if (PyDict_Check(op)) {
        result = visit_items(v, PyMapping_Values(op));
    }
    else {
        result = visit_fields(v, op);
    }
    Py_LeaveRecursiveCall();
    return result;
}

Py_ssize_t
fsdp_hook_tensors(ctpy_state *state, PyObject *op, PyObject *hook)
{
    visit v = {.state = state, .hook = hook, .met = PySet_New(NULL)};
    const int result = v.met == NULL ? -1 : visit_object(&v, op);
    Py_XDECREF(v.met);
    return result < 0 ? -1 : v.n;
}
