/* Walks over nested batches, under the names of transformers' functions. */
#include "binding/runtime/nested.h"

static int
has_attribute(PyObject *op, const char *name)
{
    PyObject *found = PyObject_GetAttrString(op, name);
    if (found != NULL) {
        Py_DECREF(found);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

int
ctpy_is_tensor(PyObject *op)
{
    if (PyFloat_CheckExact(op) || PyLong_CheckExact(op) || PyObject_CheckBuffer(op)) {
        return 0;
    }
    return has_attribute(op, "detach");
}

int
ctpy_kind_of(PyObject *op)
{
    if (op == Py_None) {
        return CTPY_NONE;
    }
    if (PyTuple_Check(op) || PyList_Check(op)) {
        return CTPY_SEQUENCE;
    }
    if (PyDict_Check(op)) {
        return CTPY_MAPPING;
    }
    if (!PyMapping_Check(op) || PyObject_CheckBuffer(op)) {
        return CTPY_LEAF;
    }
    int tensor = ctpy_is_tensor(op);
    if (tensor != 0) {
        return tensor < 0 ? -1 : CTPY_LEAF;
    }
    int mapping = has_attribute(op, "keys");
    return mapping < 0 ? -1 : mapping ? CTPY_MAPPING : CTPY_LEAF;
}

PyObject *
ctpy_children(PyObject *op, ctpy_kind kind, PyObject **keys)
{
    PyObject *values, *result, *names = NULL;
    if (keys != NULL) {
        *keys = NULL;
    }
    if (kind == CTPY_SEQUENCE) {
        result = PySequence_Tuple(op);
        if (result != NULL && keys != NULL) {
            *keys = Py_NewRef(Py_None);
        }
        return result;
    }
    if (keys != NULL) {
        if ((names = PyMapping_Keys(op)) == NULL) {
            return NULL;
        }
        *keys = PyList_AsTuple(names);
        Py_DECREF(names);
        if (*keys == NULL) {
            return NULL;
        }
    }
    values = PyMapping_Values(op);
    result = values == NULL ? NULL : PyList_AsTuple(values);
    Py_XDECREF(values);
    if (result == NULL && keys != NULL) {
        Py_CLEAR(*keys);
    }
    return result;
}

static PyObject *
make_mapping(PyObject *type, PyObject *keys, PyObject *items)
{
    PyObject *dict = PyDict_New();
    const Py_ssize_t n = PyTuple_GET_SIZE(items);
    for (Py_ssize_t i = 0; dict != NULL && i < n; i++) {
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(keys, i),
                           PyTuple_GET_ITEM(items, i)) < 0) {
            Py_CLEAR(dict);
        }
    }
    if (dict == NULL || type == (PyObject *)&PyDict_Type) {
        return dict;
    }
    PyObject *result = PyObject_CallOneArg(type, dict);
    Py_DECREF(dict);
    return result;
}

PyObject *
ctpy_container(PyObject *type, PyObject *keys, PyObject *items)
{
    if (keys != Py_None) {
        return make_mapping(type, keys, items);
    }
    if (type == (PyObject *)&PyTuple_Type) {
        return Py_NewRef(items);
    }
    if (type == (PyObject *)&PyList_Type) {
        return PySequence_List(items);
    }
    int named = has_attribute(type, "_make");
    if (named != 0) {
        return named < 0 ? NULL : PyObject_CallMethod(type, "_make", "(O)", items);
    }
    return PyObject_CallOneArg(type, items);
}

static PyObject *
map_children(PyObject *op, ctpy_kind kind, ctpy_map_fn *fn, const ctpy_state *state);

static PyObject *
ctpy_nested_map(PyObject *op, ctpy_map_fn *fn, const ctpy_state *state)
{
    PyObject *result = NULL;
    const int kind = ctpy_kind_of(op);
    if (kind < 0 || Py_EnterRecursiveCall(" in a nested batch")) {
        return NULL;
    }
    if (kind == CTPY_LEAF) {
        result = fn(op, state);
    }
    else if (kind == CTPY_NONE) {
        result = Py_NewRef(op);
    }
    else {
        result = map_children(op, (ctpy_kind)kind, fn, state);
    }
    Py_LeaveRecursiveCall();
    return result;
}

static PyObject *
map_children(PyObject *op, ctpy_kind kind, ctpy_map_fn *fn, const ctpy_state *state)
{
    PyObject *result = NULL, *keys = NULL, *mapped = NULL;
    PyObject *children = ctpy_children(op, kind, &keys);
    if (children == NULL ||
        (mapped = PyTuple_New(PyTuple_GET_SIZE(children))) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); i++) {
        PyObject *item = ctpy_nested_map(PyTuple_GET_ITEM(children, i), fn, state);
        if (item == NULL) {
            goto done;
        }
        PyTuple_SET_ITEM(mapped, i, item);
    }
    result = ctpy_container((PyObject *)Py_TYPE(op), keys, mapped);
done:
    Py_XDECREF(mapped);
    Py_XDECREF(children);
    Py_XDECREF(keys);
    return result;
}

/* The first dimension of a tensor or array; -1 for anything else or no dimension. */
static Py_ssize_t
first_dimension(PyObject *op, const ctpy_state *state)
{
    if (PyFloat_CheckExact(op) || PyLong_CheckExact(op) || PyUnicode_Check(op)) {
        return -1;
    }
    PyObject *shape = PyObject_GetAttr(op, state->str_shape);
    if (shape == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -2;
        }
        PyErr_Clear();
        return -1;
    }
    Py_ssize_t n = -1;
    if (PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) > 0) {
        n = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 0));
        n = n == -1 && PyErr_Occurred() ? -2 : n;
    }
    Py_DECREF(shape);
    return n;
}

PyObject *
ctpy_batch_entry(PyObject *batch, PyObject *key, int *failed)
{
    const int kind = ctpy_kind_of(batch);
    *failed = kind < 0;
    if (kind != CTPY_MAPPING) {
        return NULL;
    }
    PyObject *found = PyObject_GetItem(batch, key);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
    }
    *failed = found == NULL && PyErr_Occurred() != NULL;
    return found;
}

Py_ssize_t
ctpy_batch_size(PyObject *op, const ctpy_state *state)
{
    const int kind = ctpy_kind_of(op);
    if (kind < 0) {
        return -2;
    }
    if (kind == CTPY_LEAF || kind == CTPY_NONE) {
        return kind == CTPY_NONE ? -1 : first_dimension(op, state);
    }
    if (Py_EnterRecursiveCall(" in a nested batch")) {
        return -2;
    }
    Py_ssize_t n = -1;
    PyObject *children = ctpy_children(op, (ctpy_kind)kind, NULL);
    if (children == NULL) {
        n = -2;
    }
    for (Py_ssize_t i = 0; n == -1 && i < PyTuple_GET_SIZE(children); i++) {
        n = ctpy_batch_size(PyTuple_GET_ITEM(children, i), state);
    }
    if (n == -1 && PyList_Check(op) && PyTuple_GET_SIZE(children) > 0) {
        n = PyTuple_GET_SIZE(children); /* rows that no collator has put together */
    }
    Py_XDECREF(children);
    Py_LeaveRecursiveCall();
    return n;
}

static PyObject *
detach_leaf(PyObject *leaf, const ctpy_state *state)
{
    const int tensor = ctpy_is_tensor(leaf);
    if (tensor <= 0) {
        return tensor < 0 ? NULL : Py_NewRef(leaf);
    }
    return PyObject_CallMethodNoArgs(leaf, state->str_detach);
}

PyObject *
ctpy_detach_all(PyObject *op, const ctpy_state *state)
{
    return ctpy_nested_map(op, detach_leaf, state);
}

static int
is_bfloat16(PyObject *tensor, const ctpy_state *state)
{
    PyObject *text = NULL, *dtype = PyObject_GetAttr(tensor, state->str_dtype);
    if (dtype != NULL) {
        text = PyObject_Str(dtype);
        Py_DECREF(dtype);
    }
    if (text == NULL) {
        return -1;
    }
    int result = PyUnicode_CompareWithASCIIString(text, "torch.bfloat16") == 0;
    Py_DECREF(text);
    return result;
}

PyObject *
ctpy_tensor_array(PyObject *tensor, const ctpy_state *state)
{
    PyObject *result = NULL, *host = NULL;
    PyObject *detached = PyObject_CallMethodNoArgs(tensor, state->str_detach);
    if (detached == NULL ||
        (host = PyObject_CallMethodNoArgs(detached, state->str_cpu)) == NULL) {
        goto done;
    }
    const int widen = is_bfloat16(host, state);
    if (widen > 0) {
        Py_SETREF(host, PyObject_CallMethodNoArgs(host, state->str_float));
    }
    if (widen >= 0 && host != NULL) {
        result = PyObject_CallMethodNoArgs(host, state->str_numpy);
    }
done:
    Py_XDECREF(host);
    Py_XDECREF(detached);
    return result;
}

PyObject *
ctpy_tensor_like(PyObject *like, PyObject *array)
{
    return PyObject_CallMethod(like, "new_tensor", "O", array);
}

static PyObject *
numpify_leaf(PyObject *leaf, const ctpy_state *state)
{
    const int tensor = ctpy_is_tensor(leaf);
    if (tensor <= 0) {
        return tensor < 0 ? NULL : Py_NewRef(leaf);
    }
    return ctpy_tensor_array(leaf, state);
}

PyObject *
ctpy_numpify_all(PyObject *op, const ctpy_state *state)
{
    return ctpy_nested_map(op, numpify_leaf, state);
}

/* ---- module functions ------------------------------------------------------------ */

static const char ctpy_nested_detach_doc[] =
    "nested_detach($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, with each one detached.";

static PyObject *
ctpy_nested_detach(PyObject *module, PyObject *tensors)
{
    return ctpy_detach_all(tensors, PyModule_GetState(module));
}

static const char ctpy_nested_numpify_doc[] =
    "nested_numpify($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, as NumPy arrays.\n\n"
    "bfloat16, which NumPy lacks, becomes float32; arrays stay what they are.";

static PyObject *
ctpy_nested_numpify(PyObject *module, PyObject *tensors)
{
    return ctpy_numpify_all(tensors, PyModule_GetState(module));
}

static const char ctpy_find_batch_size_doc[] =
    "find_batch_size($module, tensors, /)\n--\n\n"
    "Return the first dimension of the first tensor or array in a nested batch.\n\n"
    "None where there is none. tensors: dicts, lists and tuples of them.";

static PyObject *
ctpy_find_batch_size(PyObject *module, PyObject *tensors)
{
    const Py_ssize_t n = ctpy_batch_size(tensors, PyModule_GetState(module));
    if (n == -1) {
        Py_RETURN_NONE;
    }
    return n < 0 ? NULL : PyLong_FromSsize_t(n);
}

PyMethodDef ctpy_runtime_nested_functions[] = {
    {"find_batch_size", ctpy_find_batch_size, METH_O, ctpy_find_batch_size_doc},
    {"nested_detach",   ctpy_nested_detach,   METH_O, ctpy_nested_detach_doc  },
    {"nested_numpify",  ctpy_nested_numpify,  METH_O, ctpy_nested_numpify_doc },
    {NULL,              NULL,                 0,      NULL                    },
};
