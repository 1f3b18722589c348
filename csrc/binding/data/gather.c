/* Nested batches of all ranks, as every rank gets them. */
#include "binding/data/gather.h"

#include "binding/comm/communicator.h"
#include "binding/data/accumulator.h"

PyObject *
ctpy_exchange(ctpy_state *state, PyObject *communicator, const ct_packet *packet)
{
    PyObject *view, *list;
    if (ctpy_comm_borrow(state, communicator) == NULL ||
        (view = PyMemoryView_FromMemory(packet->n == 0 ? "" : packet->data,
                                        (Py_ssize_t)packet->n, PyBUF_READ)) == NULL) {
        return NULL;
    }
    list = Communicator_gather_bytes(communicator, view);
    Py_DECREF(view);
    return list;
}

/* One accumulator for the rows of all ranks. */
static PyObject *
accumulator_new(const ctpy_state *state, PyObject *padding_index)
{
    PyObject *none = PyTuple_New(0), *result = NULL;
    PyObject *options = Py_BuildValue("{s:O,s:s}", "padding_index", padding_index,
                                      "name", "gathered values");
    if (none != NULL && options != NULL) {
        result = PyObject_Call((PyObject *)state->ArrayAccumulator, none, options);
    }
    Py_XDECREF(options);
    Py_XDECREF(none);
    return result;
}

ctpy_parcel
ctpy_parcel_open(PyObject *bytes, int rank)
{
    return (ctpy_parcel){
        .reader = {.data = PyBytes_AS_STRING(bytes),
                   .n = (size_t)PyBytes_GET_SIZE(bytes)},
        .bytes = bytes,
        .rank = rank,
    };
}

typedef struct node_head {
    int64_t kind;
    int64_t n; /* bytes that follow, or children of a container */
    int64_t ndim;
    char dtype[16]; /* as NumPy writes it, "<f4" */
    int64_t shape[CTPY_ROW_MAX_DIMS];
} node_head;

static const void *
take(ctpy_parcel *parcel, size_t n)
{
    const void *record = ct_packet_take(&parcel->reader, n);
    if (record == NULL) {
        PyErr_Format(PyExc_ValueError, "the message of rank %d ends too early",
                     parcel->rank);
    }
    return record;
}

enum {
    NODE_NONE,
    NODE_ARRAY,
    NODE_OBJECT,
    NODE_CONTAINER
};

static PyObject *
shape_of(const ctpy_parcel *parcel, const node_head *head)
{
    PyObject *shape = PyTuple_New((Py_ssize_t)head->ndim);
    for (Py_ssize_t i = 0; shape != NULL && i < head->ndim; i++) {
        const bool cut = i == 0 && head->shape[0] == parcel->rows;
        PyObject *n = PyLong_FromSsize_t(cut ? parcel->kept : head->shape[i]);
        if (n == NULL) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SET_ITEM(shape, i, n);
    }
    return shape;
}

static PyObject *
array_over(const ctpy_parcel *parcel, const node_head *head, const char *data)
{
    PyObject *numpy = PyImport_ImportModule("numpy"), *array = NULL;
    PyObject *shape = shape_of(parcel, head);
    if (numpy != NULL && shape != NULL) {
        array = PyObject_CallMethod(
            numpy, "ndarray", "OsOn", shape, head->dtype, parcel->bytes,
            (Py_ssize_t)(data - PyBytes_AS_STRING(parcel->bytes)));
    }
    Py_XDECREF(shape);
    Py_XDECREF(numpy);
    return array;
}

/* The array, or a tensor of the dtype and on the device of this rank's. */
static PyObject *
read_array(const ctpy_parcel *parcel, const node_head *head, const char *data,
           PyObject *like)
{
    PyObject *array = array_over(parcel, head, data);
    const int tensor = parcel->tensors ? ctpy_is_tensor(like) : 0;
    if (array != NULL && tensor != 0) {
        Py_SETREF(array, tensor < 0 ? NULL : ctpy_tensor_like(like, array));
    }
    return array;
}

static PyObject *
read_object(const node_head *head, const char *data)
{
    PyObject *module = PyImport_ImportModule("pickle"), *result = NULL;
    if (module != NULL) {
        result = PyObject_CallMethod(module, "loads", "y#", data, (Py_ssize_t)head->n);
        Py_DECREF(module);
    }
    return result;
}

static const char *const node_names[] = {"None", "an array", "an object",
                                         "a container"};

static PyObject *
differs(const ctpy_parcel *parcel, const node_head *head, PyObject *like)
{
    PyErr_Format(PyExc_ValueError,
                 "rank %d has %s of %lld where this rank has a %.100s: all ranks must "
                 "give batches of one structure",
                 parcel->rank, node_names[head->kind], (long long)head->n,
                 Py_TYPE(like)->tp_name);
    return NULL;
}

static PyObject *as_given(PyObject *arrays, PyObject *like);

static PyObject *
read_children(ctpy_parcel *parcel, const node_head *head, PyObject *like,
              const ctpy_state *state)
{
    PyObject *keys = NULL, *items = NULL, *children = NULL, *result = NULL;
    const int kind = ctpy_kind_of(like);
    if (kind < 0) {
        return NULL;
    }
    if (kind != CTPY_SEQUENCE && kind != CTPY_MAPPING) {
        return differs(parcel, head, like);
    }
    if ((children = ctpy_children(like, (ctpy_kind)kind, &keys)) == NULL) {
        return NULL;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(children);
    if (n != head->n) {
        (void)differs(parcel, head, like);
    }
    else {
        items = PyTuple_New(n);
    }
    for (Py_ssize_t i = 0; items != NULL && i < n; i++) {
        PyObject *item = ctpy_unpack(parcel, PyTuple_GET_ITEM(children, i), state);
        if (item == NULL) {
            Py_CLEAR(items);
            break;
        }
        PyTuple_SET_ITEM(items, i, item);
    }
    if (items != NULL) {
        result = ctpy_container((PyObject *)Py_TYPE(like), keys, items);
    }
    Py_XDECREF(items);
    Py_XDECREF(keys);
    Py_DECREF(children);
    return result;
}

static PyObject *
read_node(ctpy_parcel *parcel, const node_head *head, PyObject *like,
          const ctpy_state *state)
{
    if (head->kind == NODE_NONE) {
        Py_RETURN_NONE;
    }
    if (head->kind == NODE_CONTAINER) {
        return read_children(parcel, head, like, state);
    }
    const char *data = take(parcel, (size_t)head->n);
    if (data == NULL) {
        return NULL;
    }
    return head->kind == NODE_ARRAY ? read_array(parcel, head, data, like)
                                    : read_object(head, data);
}

PyObject *
ctpy_unpack(ctpy_parcel *parcel, PyObject *like, const ctpy_state *state)
{
    const node_head *head = take(parcel, sizeof *head);
    if (head == NULL || Py_EnterRecursiveCall(" in a nested batch")) {
        return NULL;
    }
    PyObject *result = read_node(parcel, head, like, state);
    Py_LeaveRecursiveCall();
    return result;
}

static int
append_rows(PyObject *sink, PyObject *bytes, int rank, PyObject *like,
            const ctpy_state *state)
{
    ctpy_parcel parcel = ctpy_parcel_open(bytes, rank);
    parcel.rows = parcel.kept = -1; /* no row is left out */
    const int64_t *counts = ct_packet_take(&parcel.reader, sizeof *counts);
    if (counts != NULL && *counts == 0) {
        return 0;
    }
    PyObject *rows = ctpy_unpack(&parcel, like, state), *answer = NULL;
    if (rows != NULL) {
        answer = PyObject_CallMethodOneArg(sink, state->str_append, rows);
        Py_DECREF(rows);
    }
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static PyObject *
children_as_given(PyObject *arrays, PyObject *like, ctpy_kind kind)
{
    PyObject *keys = NULL, *result = NULL;
    PyObject *given = ctpy_children(like, kind, &keys);
    PyObject *found = given == NULL ? NULL : ctpy_children(arrays, kind, NULL);
    PyObject *items = found == NULL ? NULL : PyTuple_New(PyTuple_GET_SIZE(given));
    for (Py_ssize_t i = 0; items != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item =
            as_given(PyTuple_GET_ITEM(found, i), PyTuple_GET_ITEM(given, i));
        if (item == NULL) {
            Py_CLEAR(items);
            break;
        }
        PyTuple_SET_ITEM(items, i, item);
    }
    if (items != NULL) {
        result = ctpy_container((PyObject *)Py_TYPE(like), keys, items);
    }
    Py_XDECREF(items);
    Py_XDECREF(found);
    Py_XDECREF(given);
    Py_XDECREF(keys);
    return result;
}

/* The arrays as tensors, where this rank's values are tensors. */
static PyObject *
as_given(PyObject *arrays, PyObject *like)
{
    const int kind = ctpy_kind_of(like);
    if (kind < 0 || kind == CTPY_NONE) {
        return kind < 0 ? NULL : Py_NewRef(arrays);
    }
    if (kind != CTPY_LEAF) {
        return children_as_given(arrays, like, (ctpy_kind)kind);
    }
    const int tensor = ctpy_is_tensor(like);
    return tensor < 0    ? NULL
           : tensor == 0 ? Py_NewRef(arrays)
                         : ctpy_tensor_like(like, arrays);
}

static PyObject *as_given(PyObject *arrays, PyObject *like);

static PyObject *
join(const ctpy_state *state, PyObject *parts, PyObject *like, PyObject *padding_index)
{
    PyObject *sink = accumulator_new(state, padding_index), *arrays = NULL;
    int result = sink == NULL ? -1 : 0;
    for (Py_ssize_t r = 0; result == 0 && r < PyList_GET_SIZE(parts); r++) {
        result = append_rows(sink, PyList_GET_ITEM(parts, r), (int)r, like, state);
    }
    if (result == 0) {
        arrays = PyObject_CallMethod(sink, "result", NULL);
    }
    Py_XDECREF(sink);
    if (arrays != NULL) {
        Py_SETREF(arrays, as_given(arrays, like));
    }
    return arrays;
}

static int
put(ct_packet *packet, const void *data, size_t n)
{
    ct_error err;
    return ct_packet_put(packet, data, n, &err) == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
put_node(ct_packet *packet, const node_head *head, const void *data)
{
    if (put(packet, head, sizeof *head) < 0) {
        return -1;
    }
    return head->n > 0 && data != NULL ? put(packet, data, (size_t)head->n) : 0;
}

static int
read_dtype(PyObject *array, char *text, size_t room, const ctpy_state *state)
{
    int result = -1;
    PyObject *dtype = PyObject_GetAttr(array, state->str_dtype);
    PyObject *name = dtype == NULL ? NULL : PyObject_GetAttrString(dtype, "str");
    const char *utf8 = name == NULL ? NULL : PyUnicode_AsUTF8(name);
    if (utf8 != NULL && strlen(utf8) < room) {
        (void)snprintf(text, room, "%s", utf8);
        result = 0;
    }
    else if (utf8 != NULL) {
        PyErr_Format(PyExc_TypeError, "cannot send an array of dtype %U", name);
    }
    Py_XDECREF(name);
    Py_XDECREF(dtype);
    return result;
}

static int
put_array(ct_packet *packet, PyObject *array, const ctpy_state *state)
{
    node_head head = {.kind = NODE_ARRAY};
    Py_buffer view;
    if (read_dtype(array, head.dtype, sizeof head.dtype, state) < 0 ||
        PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    int result = -1;
    if (view.ndim > CTPY_ROW_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions, at most %d can be sent",
                     view.ndim, CTPY_ROW_MAX_DIMS);
    }
    else {
        head.n = view.len;
        head.ndim = view.ndim;
        for (int i = 0; i < view.ndim; i++) {
            head.shape[i] = view.shape[i];
        }
        result = put_node(packet, &head, view.buf);
    }
    PyBuffer_Release(&view);
    return result;
}

static int
put_object(ct_packet *packet, PyObject *value)
{
    char *data;
    node_head head = {.kind = NODE_OBJECT};
    PyObject *module = PyImport_ImportModule("pickle"), *bytes = NULL;
    Py_ssize_t n;
    int result = -1;
    if (module != NULL) {
        bytes = PyObject_CallMethod(module, "dumps", "O", value);
        Py_DECREF(module);
    }
    if (bytes != NULL && PyBytes_AsStringAndSize(bytes, &data, &n) == 0) {
        head.n = n;
        result = put_node(packet, &head, data);
    }
    Py_XDECREF(bytes);
    return result;
}

static int
put_leaf(ct_packet *packet, PyObject *leaf, const ctpy_state *state)
{
    PyObject *array = ctpy_plain_array(leaf, state);
    if (array == NULL) {
        return -1;
    }
    const int numeric = ctpy_is_numeric(array, state);
    int result = numeric > 0    ? put_array(packet, array, state)
                 : numeric == 0 ? put_object(packet, leaf)
                                : -1;
    Py_DECREF(array);
    return result;
}

static int
put_children(ct_packet *packet, PyObject *value, ctpy_kind kind,
             const ctpy_state *state)
{
    PyObject *children = ctpy_children(value, kind, NULL);
    if (children == NULL) {
        return -1;
    }
    const node_head head = {.kind = NODE_CONTAINER, .n = PyTuple_GET_SIZE(children)};
    int result = put_node(packet, &head, NULL);
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(children); i++) {
        result = ctpy_pack(packet, PyTuple_GET_ITEM(children, i), state);
    }
    Py_DECREF(children);
    return result;
}

int
ctpy_pack(ct_packet *packet, PyObject *value, const ctpy_state *state)
{
    const int kind = ctpy_kind_of(value);
    if (kind < 0 || Py_EnterRecursiveCall(" in a nested batch")) {
        return -1;
    }
    int result;
    if (kind == CTPY_NONE) {
        result = put_node(packet, &(node_head){.kind = NODE_NONE}, NULL);
    }
    else if (kind == CTPY_LEAF) {
        result = put_leaf(packet, value, state);
    }
    else {
        result = put_children(packet, value, (ctpy_kind)kind, state);
    }
    Py_LeaveRecursiveCall();
    return result;
}

PyObject *
ctpy_gather_nested(ctpy_state *state, PyObject *communicator, PyObject *value,
                   PyObject *padding_index, bool counts)
{
    ct_packet packet = {0};
    PyObject *parts = NULL, *result = NULL;
    const int64_t mark = counts;
    ct_error err;
    if (ct_packet_put(&packet, &mark, sizeof mark, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    if (ctpy_pack(&packet, value, state) == 0) {
        parts = ctpy_exchange(state, communicator, &packet);
    }
    ct_packet_fini(&packet);
    if (parts != NULL) {
        result = join(state, parts, value, padding_index);
        Py_DECREF(parts);
    }
    return result;
}

static const char ctpy_nested_gather_doc[] =
    "nested_gather($module, tensors, communicator, padding_index=-100, /)\n--\n\n"
    "Return the rows of all ranks, in rank order, of nested tensors or arrays.\n\n"
    "tensors: of any dtypes, in tuples, lists, mappings and None; of one structure on\n"
    "all ranks. A value without dimensions is one row. Rows that are shorter in the\n"
    "second dimension are filled with padding_index. Tensors come back on their\n"
    "device; the others as NumPy arrays. Every rank has to call it.\n\n"
    "Raises TypeError or ValueError where structures, dtypes or other dimensions\n"
    "differ, RuntimeError naming rank and collective when a rank stays away.";

static PyObject *
ctpy_nested_gather(PyObject *module, PyObject *args)
{
    PyObject *value, *communicator, *padding = NULL, *result;
    if (!PyArg_ParseTuple(args, "OO|O:nested_gather", &value, &communicator,
                          &padding)) {
        return NULL;
    }
    padding = padding == NULL ? PyLong_FromLong(-100) : Py_NewRef(padding);
    result = padding == NULL ? NULL
                             : ctpy_gather_nested(PyModule_GetState(module),
                                                  communicator, value, padding, true);
    Py_XDECREF(padding);
    return result;
}

/* Nested batches as messages to other ranks.
 *
 * Each node of the nest is a head, and what the head announces: an array's bytes, the
 * pickle of an object, or the nodes of a container. */

/* ---- reading -----------------------------------------------------------------------
 */

PyMethodDef ctpy_data_gather_functions[] = {
    {"nested_gather", ctpy_nested_gather, METH_VARARGS, ctpy_nested_gather_doc},
    {NULL,            NULL,               0,            NULL                  },
};
