/* Nested batches of all ranks, as every rank gets them.
 *
 * A message is a pickle of arrays and of the number of children of each container. The
 * containers do not travel, since the types need not be picklable: each rank rebuilds
 * the values in the containers of its own batch, with as many children. */
#include "binding/comm/communicator.h"
#include "binding/data/accumulator.h"
#include "binding/runtime/buffer.h"

/* Names the rank in the exception of a message that cannot be unpickled. */
static void
name_sender(int rank)
{
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    PyErr_Format(PyExc_ValueError, "the message of rank %d cannot be read: %S", rank,
                 value == NULL ? type : value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* pickle.loads(bytes) of a rank's message; ValueError, naming the rank, for damaged
 * bytes. */
static PyObject *
unpickled(PyObject *bytes, int rank)
{
    PyObject *value = ctpy_call_function("pickle", "loads", "(O)", bytes);
    if (value == NULL) {
        name_sender(rank);
    }
    return value;
}

static int
flatten_leaf(PyObject *list, PyObject *leaf, const ctpy_state *state)
{
    PyObject *array = ctpy_plain_array(leaf, state);
    const int numeric = array == NULL ? -1 : ctpy_is_numeric(array, state);
    const int result = numeric < 0 ? -1 : PyList_Append(list, numeric ? array : leaf);
    Py_XDECREF(array);
    return result;
}

/* Appends the nodes of a nested batch to a list: None, an array for a tensor or a
 * number, another object as it is, and for a container the tuple (number of children,)
 * before the children. bfloat16 becomes float32. 0, or -1 with an exception. */
static int
flatten(PyObject *list, PyObject *value, const ctpy_state *state)
{
    const int kind = ctpy_kind_of(value);
    if (kind < 0 || kind == CTPY_NONE) {
        return kind < 0 ? -1 : PyList_Append(list, value);
    }
    if (kind == CTPY_LEAF) {
        return flatten_leaf(list, value, state);
    }
    if (Py_EnterRecursiveCall(" in a nested batch")) {
        return -1;
    }
    PyObject *children = ctpy_children(value, (ctpy_kind)kind, NULL);
    const Py_ssize_t n = children == NULL ? 0 : PyTuple_GET_SIZE(children);
    PyObject *head = children == NULL ? NULL : Py_BuildValue("(n)", n);
    int result = head == NULL ? -1 : PyList_Append(list, head);
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = flatten(list, PyTuple_GET_ITEM(children, i), state);
    }
    Py_LeaveRecursiveCall();
    Py_XDECREF(head);
    Py_XDECREF(children);
    return result;
}

/* A reader over the nodes of a rank's batch. */
typedef struct node_reader {
    PyObject *list;  /* borrowed */
    Py_ssize_t at;   /* of the next node */
    int rank;        /* of the sender, for messages */
    Py_ssize_t rows; /* of the batch; -1: every row is kept */
    Py_ssize_t kept; /* how many of the first rows are kept */
    int tensors;     /* make tensors if this rank's values are tensors */
} node_reader;

/* The rows of the array that are kept; as a tensor of the dtype and on the device of
 * this rank's, if tensors are wanted. */
static PyObject *
take_leaf(const node_reader *nodes, PyObject *leaf, PyObject *like,
          const ctpy_state *state)
{
    const Py_ssize_t rows = nodes->rows < 0 ? -1 : ctpy_batch_size(leaf, state);
    const int tensor = nodes->tensors ? ctpy_is_tensor(like) : 0;
    if (rows == -2 || tensor < 0) {
        return NULL;
    }
    PyObject *kept = rows < 0 || rows != nodes->rows
                         ? Py_NewRef(leaf)
                         : PySequence_GetSlice(leaf, 0, nodes->kept);
    if (kept != NULL && tensor) {
        Py_SETREF(kept, ctpy_tensor_like(like, kept));
    }
    return kept;
}

/* This rank's children of a container, or NULL with an exception if the sender's
 * container has more or fewer children. */
static PyObject *
own_children(const node_reader *nodes, Py_ssize_t n, PyObject *like, PyObject **keys)
{
    const int kind = ctpy_kind_of(like);
    PyObject *children = kind == CTPY_SEQUENCE || kind == CTPY_MAPPING
                             ? ctpy_children(like, (ctpy_kind)kind, keys)
                             : NULL;
    if (!PyErr_Occurred() && (children == NULL || PyTuple_GET_SIZE(children) != n)) {
        PyErr_Format(PyExc_ValueError,
                     "rank %d has a container of %zd where this rank has a %.100s: all "
                     "ranks must give batches of one structure",
                     nodes->rank, n, Py_TYPE(like)->tp_name);
        Py_CLEAR(children);
    }
    return children;
}

/* The next nested batch, in the containers of `like`, this rank's own. NULL with an
 * exception, a ValueError for differing structures. */
static PyObject *
unflatten(node_reader *nodes, PyObject *like, const ctpy_state *state)
{
    PyObject *node = PyList_GetItem(nodes->list, nodes->at++); /* borrowed */
    if (node == NULL || node == Py_None) {
        return Py_XNewRef(node);
    }
    if (!PyTuple_Check(node)) {
        return take_leaf(nodes, node, like, state);
    }
    PyObject *keys = NULL, *items = NULL, *result = NULL;
    const Py_ssize_t n = PyLong_AsSsize_t(PyTuple_GET_ITEM(node, 0));
    PyObject *children = own_children(nodes, n, like, &keys);
    if (children == NULL || (items = PyTuple_New(n)) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = unflatten(nodes, PyTuple_GET_ITEM(children, i), state);
        if (item == NULL) {
            goto done;
        }
        PyTuple_SET_ITEM(items, i, item);
    }
    result = ctpy_container((PyObject *)Py_TYPE(like), keys, items);
done:
    Py_XDECREF(items);
    Py_XDECREF(keys);
    Py_XDECREF(children);
    return result;
}

static int
append_rows(PyObject *sink, PyObject *bytes, int rank, PyObject *like,
            const ctpy_state *state)
{
    node_reader nodes = {.rank = rank, .rows = -1};
    PyObject *message = unpickled(bytes, rank), *rows = NULL;
    int counts, result = -1;
    if (message != NULL && PyArg_ParseTuple(message, "pO", &counts, &nodes.list)) {
        result = counts ? -1 : 0;
        rows = counts ? unflatten(&nodes, like, state) : NULL;
    }
    if (rows != NULL) {
        PyObject *answer = PyObject_CallMethodOneArg(sink, state->str_append, rows);
        result = answer == NULL ? -1 : 0;
        Py_XDECREF(answer);
        Py_DECREF(rows);
    }
    Py_XDECREF(message);
    return result;
}

/* The arrays as tensors, if this rank's values are tensors. */
static PyObject *
as_given(PyObject *arrays, PyObject *like, const ctpy_state *state)
{
    node_reader nodes = {.list = PyList_New(0), .rows = -1, .tensors = 1};
    PyObject *result = NULL;
    if (nodes.list != NULL && flatten(nodes.list, arrays, state) == 0) {
        result = unflatten(&nodes, like, state);
    }
    Py_XDECREF(nodes.list);
    return result;
}

static PyObject *
join(ctpy_state *state, PyObject *parts, PyObject *like, PyObject *padding_index)
{
    PyObject *arrays = NULL;
    PyObject *sink = PyObject_CallFunction((PyObject *)state->ArrayAccumulator, "OO",
                                           Py_None, padding_index);
    if (sink == NULL) {
        return NULL;
    }
    Py_XSETREF(((ArrayAccumulator *)sink)->name,
               PyUnicode_FromString("gathered values"));
    int result = ((ArrayAccumulator *)sink)->name == NULL ? -1 : 0;
    for (Py_ssize_t r = 0; result == 0 && r < PyList_GET_SIZE(parts); r++) {
        result = append_rows(sink, PyList_GET_ITEM(parts, r), (int)r, like, state);
    }
    if (result == 0) {
        arrays = PyObject_CallMethod(sink, "result", NULL);
    }
    Py_DECREF(sink);
    if (arrays != NULL) {
        Py_SETREF(arrays, as_given(arrays, like, state));
    }
    return arrays;
}

/* counts: are this rank's rows among the result? */
static PyObject *
gather_nested(ctpy_state *state, PyObject *communicator, PyObject *value,
              PyObject *padding_index, int counts)
{
    PyObject *bytes = NULL, *parts = NULL, *result = NULL, *list = PyList_New(0);
    PyObject *message = NULL;
    if (list != NULL && flatten(list, value, state) == 0 &&
        (message = PyTuple_Pack(2, counts ? Py_True : Py_False, list)) != NULL &&
        (bytes = ctpy_call_function("pickle", "dumps", "(Oi)", message, -1)) != NULL &&
        ctpy_comm_borrow(state, communicator) != NULL &&
        (parts = Communicator_gather_bytes(communicator, bytes)) != NULL) {
        result = join(state, parts, value, padding_index);
    }
    Py_XDECREF(parts);
    Py_XDECREF(bytes);
    Py_XDECREF(message);
    Py_XDECREF(list);
    return result;
}

static const char ctpy_nested_gather_doc[] =
    "nested_gather($module, tensors, communicator, padding_index=-100, counts=True,\n"
    "              /)\n--\n\n"
    "Return the rows of all ranks, in rank order, of nested tensors or arrays.\n\n"
    "tensors: of any dtypes, in tuples, lists, mappings and None; of one structure on\n"
    "all ranks. A value without dimensions is one row. Rows that are shorter in the\n"
    "second dimension are filled with padding_index. Tensors come back on their\n"
    "device; the others as NumPy arrays. Every rank has to call it; a rank whose rows\n"
    "are not to be among the result says so by counts.\n\n"
    "Raises TypeError or ValueError where structures, dtypes or other dimensions\n"
    "differ, RuntimeError naming rank and collective when a rank stays away.";

static PyObject *
ctpy_nested_gather(PyObject *module, PyObject *args)
{
    PyObject *value, *communicator, *padding = NULL, *result;
    int counts = 1;
    if (!PyArg_ParseTuple(args, "OO|Op:nested_gather", &value, &communicator, &padding,
                          &counts)) {
        return NULL;
    }
    padding = padding == NULL ? PyLong_FromLong(-100) : Py_NewRef(padding);
    result = padding == NULL ? NULL
                             : gather_nested(PyModule_GetState(module), communicator,
                                             value, padding, counts);
    Py_XDECREF(padding);
    return result;
}

static const char ctpy_nested_flatten_doc[] =
    "nested_flatten($module, tensors, /)\n--\n\n"
    "Return nested tensors or arrays as a list that can be pickled: None, arrays,\n"
    "other objects as they are, and (number of children,) before a container's.";

static PyObject *
ctpy_nested_flatten(PyObject *module, PyObject *value)
{
    PyObject *list = PyList_New(0);
    if (list != NULL && flatten(list, value, PyModule_GetState(module)) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

static const char ctpy_nested_rebuild_doc[] =
    "nested_rebuild($module, nodes, like, rank, rows, kept, as_tensors, /)\n--\n\n"
    "Return what `rank` gave to nested_flatten(), in the containers of `like`, this\n"
    "rank's own: of values of so many rows the first `kept`, and with as_tensors\n"
    "tensors where `like` has some. Raises ValueError for another structure.";

static PyObject *
ctpy_nested_rebuild(PyObject *module, PyObject *args)
{
    node_reader nodes = {0};
    PyObject *like;
    return PyArg_ParseTuple(args, "O!Oinnp:nested_rebuild", &PyList_Type, &nodes.list,
                            &like, &nodes.rank, &nodes.rows, &nodes.kept,
                            &nodes.tensors)
               ? unflatten(&nodes, like, PyModule_GetState(module))
               : NULL;
}

PyMethodDef ctpy_data_gather_functions[] = {
    {"nested_flatten", ctpy_nested_flatten, METH_O,       ctpy_nested_flatten_doc},
    {"nested_gather",  ctpy_nested_gather,  METH_VARARGS, ctpy_nested_gather_doc },
    {"nested_rebuild", ctpy_nested_rebuild, METH_VARARGS, ctpy_nested_rebuild_doc},
    {NULL,             NULL,                0,            NULL                   },
};
