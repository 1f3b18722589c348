/* Nested batches of all ranks, as every rank gets them. */
#include "binding/data/gather.h"

#include "binding/comm/communicator.h"

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

static PyObject *as_given(PyObject *arrays, PyObject *like);

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

const char ctpy_nested_gather_doc[] =
    "nested_gather($module, tensors, communicator, padding_index=-100, /)\n--\n\n"
    "Return the rows of all ranks, in rank order, of nested tensors or arrays.\n\n"
    "tensors: of any dtypes, in tuples, lists, mappings and None; of one structure on\n"
    "all ranks. A value without dimensions is one row. Rows that are shorter in the\n"
    "second dimension are filled with padding_index. Tensors come back on their\n"
    "device; the others as NumPy arrays. Every rank has to call it.\n\n"
    "Raises TypeError or ValueError where structures, dtypes or other dimensions\n"
    "differ, RuntimeError naming rank and collective when a rank stays away.";

PyObject *
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
