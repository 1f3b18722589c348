/* The structure of an accumulator's batches.
 *
 * A node is a RowBuffer for a leaf, None, or a tuple (type, keys, nodes) for a
 * container, keys being None for a sequence. */
#include "binding/data/accumulator.h"

PyObject *
ctpy_tree_new(ArrayAccumulator *self, PyObject *value, PyObject *leaves)
{
    PyObject *result = NULL, *keys = NULL, *nodes = NULL, *children = NULL;
    const int kind = ctpy_kind_of(value);
    if (kind < 0 || kind == CTPY_NONE) {
        return kind < 0 ? NULL : Py_NewRef(value);
    }
    if (kind == CTPY_LEAF) {
        result = RowBuffer_make(ctpy_state_borrow((PyObject *)self),
                                self->expected_rows, self->spill_bytes, self->folder);
        if (result != NULL && PyList_Append(leaves, result) < 0) {
            Py_CLEAR(result);
        }
        return result;
    }
    if (Py_EnterRecursiveCall(" in a nested batch")) {
        return NULL;
    }
    if ((children = ctpy_children(value, (ctpy_kind)kind, &keys)) == NULL ||
        (nodes = PyTuple_New(PyTuple_GET_SIZE(children))) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); i++) {
        PyObject *node = ctpy_tree_new(self, PyTuple_GET_ITEM(children, i), leaves);
        if (node == NULL) {
            goto done;
        }
        PyTuple_SET_ITEM(nodes, i, node);
    }
    result = PyTuple_Pack(3, Py_TYPE(value), keys, nodes);
done:
    Py_LeaveRecursiveCall();
    Py_XDECREF(nodes);
    Py_XDECREF(children);
    Py_XDECREF(keys);
    return result;
}

/* The values of a container in the order of the first batch; a container of another
 * type, length or with other keys is an error. */
static PyObject *
matching_children(PyObject *node, PyObject *value)
{
    PyObject *type = PyTuple_GET_ITEM(node, 0), *keys = PyTuple_GET_ITEM(node, 1);
    const Py_ssize_t n = PyTuple_GET_SIZE(PyTuple_GET_ITEM(node, 2));
    if ((PyObject *)Py_TYPE(value) != type || PyObject_Length(value) != n) {
        PyErr_Format(PyExc_TypeError,
                     "this batch has a %s where those before it had a %s of %zd",
                     Py_TYPE(value)->tp_name, ((PyTypeObject *)type)->tp_name, n);
        return NULL;
    }
    if (keys == Py_None) {
        return PySequence_Tuple(value);
    }
    PyObject *children = PyTuple_New(n);
    for (Py_ssize_t i = 0; children != NULL && i < n; i++) {
        PyObject *item = PyObject_GetItem(value, PyTuple_GET_ITEM(keys, i));
        if (item == NULL) {
            PyErr_Format(PyExc_ValueError,
                         "this batch lacks the key %R that those before it had",
                         PyTuple_GET_ITEM(keys, i));
            Py_CLEAR(children);
            break;
        }
        PyTuple_SET_ITEM(children, i, item);
    }
    return children;
}

static int
flatten_children(ArrayAccumulator *self, PyObject *node, PyObject *value,
                 const leaf_path *path, PyObject *arrays)
{
    PyObject *keys = PyTuple_GET_ITEM(node, 1), *nodes = PyTuple_GET_ITEM(node, 2);
    PyObject *children = matching_children(node, value);
    if (children == NULL) {
        ctpy_name_leaf_error(self, path);
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(nodes); i++) {
        PyObject *key = keys == Py_None ? NULL : PyTuple_GET_ITEM(keys, i);
        const leaf_path below = {.up = path, .key = key, .position = i};
        result = ctpy_tree_flatten(self, PyTuple_GET_ITEM(nodes, i),
                                   PyTuple_GET_ITEM(children, i), &below, arrays);
    }
    Py_DECREF(children);
    return result;
}

int
ctpy_tree_flatten(ArrayAccumulator *self, PyObject *node, PyObject *value,
                  const leaf_path *path, PyObject *arrays)
{
    if (PyTuple_Check(node)) {
        return flatten_children(self, node, value, path, arrays);
    }
    if ((node == Py_None) != (value == Py_None)) {
        PyErr_Format(PyExc_TypeError, "None in %s batch, not in %s",
                     node == Py_None ? "an earlier" : "this",
                     node == Py_None ? "this" : "those before it");
        ctpy_name_leaf_error(self, path);
        return -1;
    }
    if (node == Py_None) {
        return 0;
    }
    PyObject *array = ctpy_leaf_array((RowBuffer *)node, value);
    if (array == NULL) {
        ctpy_name_leaf_error(self, path);
        return -1;
    }
    const int result = PyList_Append(arrays, array);
    Py_DECREF(array);
    return result;
}

PyObject *
ctpy_tree_result(const ArrayAccumulator *self, PyObject *node)
{
    if (node == Py_None) {
        return Py_NewRef(node);
    }
    if (!PyTuple_Check(node)) {
        return RowBuffer_result(node, self->padding_index);
    }
    PyObject *nodes = PyTuple_GET_ITEM(node, 2), *result = NULL;
    PyObject *items = PyTuple_New(PyTuple_GET_SIZE(nodes));
    for (Py_ssize_t i = 0; items != NULL && i < PyTuple_GET_SIZE(nodes); i++) {
        PyObject *item = ctpy_tree_result(self, PyTuple_GET_ITEM(nodes, i));
        if (item == NULL) {
            Py_CLEAR(items);
            break;
        }
        PyTuple_SET_ITEM(items, i, item);
    }
    if (items != NULL) {
        result =
            ctpy_container(PyTuple_GET_ITEM(node, 0), PyTuple_GET_ITEM(node, 1), items);
        Py_DECREF(items);
    }
    return result;
}
