/* ctrainer._C.ArrayAccumulator: batches of nested tensors into nested NumPy arrays.
 *
 * Rows are copied once, into memory that becomes the result without another copy, so
 * that the peak is the result and a batch. A batch is checked, and room is made in
 * every array, before the first row is written: a failed append adds nothing. */
#include "binding/data/accumulator.h"

#include "binding/runtime/buffer.h"
#include "binding/runtime/objects.h"

#include "core/data/rows.h"

/* ---- RowBuffer: core/data/rows.h as an exporter of the buffer protocol ----------- */

enum {
    MAX_DIMS = 32
};

/* The rows of an array, and the owner of the memory behind the resulting NumPy array.
 */
typedef struct RowBuffer {
    PyObject_HEAD
    ct_rows rows;
    PyObject *dtype;            /* NumPy's, of every batch; NULL before the first */
    PyObject *folder;           /* bytes: owner of rows.spill_folder, or NULL */
    int ndim;                   /* >= 1 once dtype is set */
    Py_ssize_t shape[MAX_DIMS]; /* beyond the first two: equal in all batches */
    Py_ssize_t item_bytes;
} RowBuffer;

PyDoc_STRVAR(RowBuffer_doc,
             "Memory of an array that ArrayAccumulator has filled; its arrays' base.");

/* A new, empty buffer. spill_folder (bytes) is kept when spill_bytes > 0. */
static PyObject *
RowBuffer_make(ctpy_state *state, size_t expected_rows, size_t spill_bytes,
               PyObject *spill_folder)
{
    PyTypeObject *type = state->RowBuffer;
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        RowBuffer *self = (RowBuffer *)op;
        self->rows.expected_rows = expected_rows;
        if (spill_bytes > 0) {
            self->rows.spill_bytes = spill_bytes;
            self->folder = Py_NewRef(spill_folder);
            self->rows.spill_folder = PyBytes_AS_STRING(spill_folder);
        }
    }
    return op;
}

static int
RowBuffer_traverse(PyObject *op, visitproc visit, void *arg)
{
    RowBuffer *self = (RowBuffer *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dtype);
    Py_VISIT(self->folder);
    return 0;
}

/* Not the folder: the rows may still spill into it until dealloc. */
static int
RowBuffer_clear(PyObject *op)
{
    RowBuffer *self = (RowBuffer *)op;
    Py_CLEAR(self->dtype);
    return 0;
}

static void
RowBuffer_dealloc(PyObject *op)
{
    RowBuffer *self = (RowBuffer *)op;
    PyObject_GC_UnTrack(op);
    (void)RowBuffer_clear(op);
    ct_rows_fini(&self->rows);
    Py_CLEAR(self->folder);
    ctpy_leaf_dealloc(op);
}

static int
RowBuffer_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    RowBuffer *self = (RowBuffer *)op;
    /* A valid address for no rows, too. */
    void *data = self->rows.used_bytes > 0 ? self->rows.region.data : "";
    return PyBuffer_FillInfo(view, op, data, (Py_ssize_t)self->rows.used_bytes, 0,
                             flags);
}

static size_t
width_of(const Py_buffer *view)
{
    return view->ndim < 2 ? 1 : (size_t)view->shape[1];
}

/* The bytes of `n_rows` rows like `array`'s. */
static size_t
RowBuffer_projected_bytes(PyObject *op, PyObject *array, size_t n_rows)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* the append that follows raises the error */
        return 0;
    }
    const size_t row = width_of(&view) * ((RowBuffer *)op)->rows.position_bytes;
    PyBuffer_Release(&view);
    return row != 0 && n_rows > SIZE_MAX / row ? SIZE_MAX : row * n_rows;
}

/* The first two dimensions are rows and width, which may differ between batches. */
static void
start(RowBuffer *self, PyObject *dtype, const Py_buffer *view)
{
    size_t position_bytes = (size_t)view->itemsize;
    self->dtype = Py_NewRef(dtype);
    self->ndim = view->ndim;
    self->item_bytes = view->itemsize;
    for (int i = 2; i < view->ndim; i++) {
        self->shape[i] = view->shape[i];
        position_bytes *= (size_t)view->shape[i];
    }
    self->rows.position_bytes = position_bytes;
}

static int
check_shape(const RowBuffer *self, const Py_buffer *view)
{
    if (view->ndim != self->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "this batch has %d dimensions, those before it %d", view->ndim,
                     self->ndim);
        return -1;
    }
    for (int i = 2; i < view->ndim; i++) {
        if (view->shape[i] != self->shape[i]) {
            PyErr_Format(PyExc_ValueError,
                         "dimension %d is %zd in this batch and %zd in those before it;"
                         " only dimension 1 may differ, it is padded",
                         i, view->shape[i], self->shape[i]);
            return -1;
        }
    }
    return 0;
}

static int
check_dtype(const RowBuffer *self, PyObject *dtype)
{
    /* Equality rather than identity: NumPy makes new objects for structured dtypes and
     * byte orders. */
    int equal = PyObject_RichCompareBool(dtype, self->dtype, Py_EQ);
    if (equal == 0) {
        PyErr_Format(PyExc_TypeError,
                     "this batch is %S, those before it %S; cast them alike in "
                     "preprocess_logits_for_metrics or prediction_step",
                     dtype, self->dtype);
    }
    return equal == 1 ? 0 : -1;
}

/* Checks that a contiguous ndarray may be appended; the first ndarray decides dtype and
 * shape. Returns 0, or -1 with a TypeError or ValueError, for a text after "name: ". */
static int
RowBuffer_check(PyObject *op, PyObject *array)
{
    RowBuffer *self = (RowBuffer *)op;
    int result = -1;
    Py_buffer view;
    PyObject *dtype = PyObject_GetAttr(array, ctpy_state_borrow(op)->str_dtype);
    /* Contiguous memory was made by ctpy_plain_array, so only odd arrays fail here. */
    if (dtype == NULL || PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        Py_XDECREF(dtype);
        return -1;
    }
    if (view.ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions, at most %d can be kept",
                     view.ndim, MAX_DIMS);
    }
    else if (self->dtype == NULL) {
        start(self, dtype, &view);
        result = 0;
    }
    else if (check_dtype(self, dtype) == 0) {
        result = check_shape(self, &view);
    }
    PyBuffer_Release(&view);
    Py_DECREF(dtype);
    return result;
}

/* The GIL is released around copies that take longer than a release. */
static const Py_ssize_t release_from_bytes = 1 << 18;

static ct_status
append_view(RowBuffer *self, const Py_buffer *view, ct_error *err)
{
    ct_status status;
    const size_t n = (size_t)view->shape[0];
    if (view->len < release_from_bytes) {
        return ct_rows_append(&self->rows, view->buf, n, width_of(view), err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_rows_append(&self->rows, view->buf, n, width_of(view), err);
    Py_END_ALLOW_THREADS
    return status;
}

/* Makes room for the rows of an array that RowBuffer_check has passed, or copies the
 * rows, which cannot fail after that. Returns 0, or -1 with nothing added. */
static int
RowBuffer_add(PyObject *op, PyObject *array, bool copies)
{
    RowBuffer *self = (RowBuffer *)op;
    Py_buffer view;
    ct_error err;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    const ct_status status = copies
                                 ? append_view(self, &view, &err)
                                 : ct_rows_reserve(&self->rows, (size_t)view.shape[0],
                                                   width_of(&view), &err);
    PyBuffer_Release(&view);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Copies the element that padding_index becomes in this dtype, by the rules of a C
 * cast: -100 is 156 as uint8 and True as bool, as in torch. */
static int
fill_item(RowBuffer *self, PyObject *padding_index, char *item)
{
    int result = -1;
    Py_buffer view;
    PyObject *one = ctpy_call_function("numpy", "asarray", "(O)", padding_index);
    PyObject *cast =
        one == NULL ? NULL : PyObject_CallMethod(one, "astype", "(O)", self->dtype);
    if (cast != NULL && PyObject_GetBuffer(cast, &view, PyBUF_C_CONTIGUOUS) == 0) {
        memcpy(item, view.buf, (size_t)self->item_bytes);
        PyBuffer_Release(&view);
        result = 0;
    }
    Py_XDECREF(cast);
    Py_XDECREF(one);
    return result;
}

static int
spread(RowBuffer *self, PyObject *padding_index)
{
    char item[sizeof(double) * 4] = {0}; /* the largest dtype is complex long double */
    ct_status status;
    ct_error err;
    /* Rows of one width have no gaps, so the padding need not fit their dtype. */
    if (self->rows.n_runs > 1 && fill_item(self, padding_index, item) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_rows_spread(&self->rows, item, (size_t)self->item_bytes, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static PyObject *
shape_tuple(const RowBuffer *self)
{
    int64_t shape[MAX_DIMS] = {(int64_t)self->rows.n_rows, (int64_t)self->rows.width};
    for (int i = 2; i < self->ndim; i++) {
        shape[i] = self->shape[i];
    }
    return ctpy_int64_tuple(shape, self->ndim);
}

/* All rows as one array over this buffer's memory, gaps filled with padding_index.
 * Nothing may be appended afterwards. */
static PyObject *
RowBuffer_result(PyObject *op, PyObject *padding_index)
{
    RowBuffer *self = (RowBuffer *)op;
    PyObject *shape = spread(self, padding_index) < 0 ? NULL : shape_tuple(self);
    /* The array's base is this buffer, which lives as long as the array. */
    return shape == NULL ? NULL
                         : ctpy_call_function("numpy", "ndarray", "(NOO)", shape,
                                              self->dtype, op);
}

static PyType_Slot RowBuffer_slots[] = {
    {Py_tp_doc,       (void *)RowBuffer_doc},
    {Py_tp_traverse,  RowBuffer_traverse   },
    {Py_tp_clear,     RowBuffer_clear      },
    {Py_tp_dealloc,   RowBuffer_dealloc    },
    {Py_bf_getbuffer, RowBuffer_getbuffer  },
    {0,               NULL                 },
};

PyType_Spec RowBuffer_spec = {
    .name = "ctrainer._C.RowBuffer",
    .basicsize = sizeof(RowBuffer),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = RowBuffer_slots,
};

/* ---- the structure of the batches --------------------------------------------------
 *
 * A node is a RowBuffer for a leaf, None, or a tuple (type, keys, nodes) for a
 * container, keys being None for a sequence. */

/* The path of a leaf, from the leaf upwards; formatted only for an error. */
typedef struct leaf_path {
    const struct leaf_path *up; /* NULL at the root */
    PyObject *key;              /* borrowed; NULL for a position */
    Py_ssize_t position;
} leaf_path;

static PyObject *
path_text(PyObject *name, const leaf_path *path)
{
    if (path == NULL) {
        return Py_NewRef(name);
    }
    PyObject *before = path_text(name, path->up), *text = NULL;
    if (before != NULL && path->key != NULL) {
        text = PyUnicode_FromFormat("%U[%R]", before, path->key);
    }
    else if (before != NULL) {
        text = PyUnicode_FromFormat("%U[%zd]", before, path->position);
    }
    Py_XDECREF(before);
    return text;
}

/* Puts the leaf's name before the text of the TypeError or ValueError that is set. */
static void
name_leaf_error(const ArrayAccumulator *self, const leaf_path *path)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = path_text(self->name, path);
    if (text != NULL) {
        PyErr_Format(type, "%U: %S", text, value);
        Py_DECREF(text);
    }
    Py_XDECREF(traceback);
    Py_XDECREF(value);
    Py_XDECREF(type);
}

int
ctpy_is_numeric(PyObject *array, const ctpy_state *state)
{
    int result = -1;
    PyObject *kind = NULL, *dtype = PyObject_GetAttr(array, state->str_dtype);
    if (dtype != NULL && (kind = PyObject_GetAttrString(dtype, "kind")) != NULL) {
        const Py_UCS4 code = PyUnicode_READ_CHAR(kind, 0);
        result = code < 128 && strchr("biufc", (int)code) != NULL;
    }
    Py_XDECREF(kind);
    Py_XDECREF(dtype);
    return result;
}

static int
check_numeric(PyObject *array, PyObject *value, const ctpy_state *state)
{
    const int numeric = ctpy_is_numeric(array, state);
    if (numeric == 0) {
        PyErr_Format(PyExc_TypeError,
                     "expected a tensor, an array or a number, got %s; name its key in "
                     "ignore_keys, or drop it in preprocess_logits_for_metrics",
                     Py_TYPE(value)->tp_name);
    }
    return numeric > 0 ? 0 : -1;
}

PyObject *
ctpy_plain_array(PyObject *value, const ctpy_state *state)
{
    const int tensor = ctpy_is_tensor(value);
    PyObject *source = tensor < 0 ? NULL
                       : tensor   ? ctpy_tensor_array(value, state)
                                  : Py_NewRef(value);
    return source == NULL
               ? NULL
               : ctpy_call_function("numpy", "ascontiguousarray", "(N)", source);
}

/* The leaf's values as a contiguous array that fits the rows before. */
static PyObject *
leaf_array(RowBuffer *leaf, PyObject *value)
{
    const ctpy_state *state = ctpy_state_borrow((PyObject *)leaf);
    PyObject *array = ctpy_plain_array(value, state);
    if (array != NULL && (check_numeric(array, value, state) < 0 ||
                          RowBuffer_check((PyObject *)leaf, array) < 0)) {
        Py_CLEAR(array);
    }
    return array;
}

/* The values of a container in the order of the first batch; a container of another
 * type, length or with other keys is an error. */
static PyObject *
matching_children(PyObject *node, PyObject *value)
{
    PyObject *type = PyTuple_GET_ITEM(node, 0), *keys = PyTuple_GET_ITEM(node, 1);
    const Py_ssize_t n = PyTuple_GET_SIZE(PyTuple_GET_ITEM(node, 2));
    /* The exact type, because the result is made by the first batch's. */
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
flatten_leaf(ArrayAccumulator *self, PyObject *node, PyObject *value,
             const leaf_path *path, PyObject *arrays)
{
    /* A part without values stays None in the result. */
    if (node == Py_None && value == Py_None) {
        return 0;
    }
    PyObject *array = NULL;
    if (node != Py_None && value != Py_None) {
        array = leaf_array((RowBuffer *)node, value);
    }
    else {
        PyErr_Format(PyExc_TypeError, "None in %s batch, not in %s",
                     node == Py_None ? "an earlier" : "this",
                     node == Py_None ? "this" : "those before it");
    }
    if (array == NULL) {
        name_leaf_error(self, path);
        return -1;
    }
    const int result = PyList_Append(arrays, array);
    Py_DECREF(array);
    return result;
}

/* Appends the array of each leaf of the tree, in order, to the list `arrays`; path is
 * NULL at the root. */
static int
tree_flatten(ArrayAccumulator *self, PyObject *node, PyObject *value,
             const leaf_path *path, PyObject *arrays)
{
    if (!PyTuple_Check(node)) {
        return flatten_leaf(self, node, value, path, arrays);
    }
    PyObject *keys = PyTuple_GET_ITEM(node, 1), *nodes = PyTuple_GET_ITEM(node, 2);
    PyObject *children = matching_children(node, value);
    if (children == NULL) {
        name_leaf_error(self, path);
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(nodes); i++) {
        PyObject *key = keys == Py_None ? NULL : PyTuple_GET_ITEM(keys, i);
        const leaf_path below = {.up = path, .key = key, .position = i};
        result = tree_flatten(self, PyTuple_GET_ITEM(nodes, i),
                              PyTuple_GET_ITEM(children, i), &below, arrays);
    }
    Py_DECREF(children);
    return result;
}

/* The structure of the first batch, with an empty RowBuffer for each leaf. The
 * RowBuffers are added to `leaves` too. */
static PyObject *
tree_new(ArrayAccumulator *self, PyObject *value, PyObject *leaves)
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
    /* A container may contain itself. */
    if (Py_EnterRecursiveCall(" in a nested batch")) {
        return NULL;
    }
    if ((children = ctpy_children(value, (ctpy_kind)kind, &keys)) == NULL ||
        (nodes = PyTuple_New(PyTuple_GET_SIZE(children))) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); i++) {
        PyObject *node = tree_new(self, PyTuple_GET_ITEM(children, i), leaves);
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

/* The tree with arrays in place of the buffers. */
static PyObject *
tree_result(const ArrayAccumulator *self, PyObject *node)
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
        PyObject *item = tree_result(self, PyTuple_GET_ITEM(nodes, i));
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

/* ---- ArrayAccumulator ------------------------------------------------------------ */

#define ACCUMULATOR_OBJECTS(V) V(name) V(padding_index) V(tree) V(leaves) V(folder)
CTPY_LIFETIME(ArrayAccumulator, ACCUMULATOR_OBJECTS)

static PyObject *
ArrayAccumulator_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                     PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    ArrayAccumulator *self = (ArrayAccumulator *)op;
    if (op != NULL && ((self->name = PyUnicode_FromString("batch")) == NULL ||
                       (self->padding_index = PyLong_FromLong(-100)) == NULL ||
                       (self->folder = PyBytes_FromString(".")) == NULL ||
                       (self->leaves = PyList_New(0)) == NULL)) {
        Py_CLEAR(op);
    }
    return op;
}

/* A number of at least `least`; None is 0. */
static int
parse_count(PyObject *value, const char *name, Py_ssize_t least, size_t *count)
{
    *count = 0;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    const Py_ssize_t n = PyNumber_AsSsize_t(value, PyExc_OverflowError);
    if (n == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (n < least) {
        PyErr_Format(PyExc_ValueError, "%s must be at least %zd or None, got %zd", name,
                     least, n);
        return -1;
    }
    *count = (size_t)n;
    return 0;
}

static int
ArrayAccumulator_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n_rows_hint", "padding_index", "name",
                            "spill_bytes", "spill_folder",  NULL};
    ArrayAccumulator *self = (ArrayAccumulator *)op;
    PyObject *hint = NULL, *padding = NULL, *name = NULL, *spill = NULL, *folder = NULL;
    size_t expected_rows, spill_bytes;
    int result = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO$UOO&:ArrayAccumulator", names,
                                     &hint, &padding, &name, &spill,
                                     PyUnicode_FSConverter, &folder) ||
        parse_count(hint, "n_rows_hint", 0, &expected_rows) < 0 ||
        parse_count(spill, "spill_bytes", 1, &spill_bytes) < 0) {
        goto done;
    }
    if (padding != NULL && !PyNumber_Check(padding)) {
        PyErr_Format(PyExc_TypeError, "padding_index must be a number, got %R",
                     padding);
        goto done;
    }
    self->expected_rows = expected_rows;
    self->spill_bytes = spill_bytes;
    Py_XSETREF(self->padding_index, Py_NewRef(padding ? padding : self->padding_index));
    Py_XSETREF(self->name, Py_NewRef(name ? name : self->name));
    Py_XSETREF(self->folder, Py_NewRef(folder ? folder : self->folder));
    result = 0;
done:
    Py_XDECREF(folder);
    return result;
}

static double
mebibytes(size_t bytes)
{
    return (double)bytes / (1024.0 * 1024.0);
}

/* Before the first copy: will all the rows fit into memory? */
static int
warn_if_too_large(const ArrayAccumulator *self, PyObject *leaves, PyObject *arrays)
{
    const size_t available = ct_memory_available();
    size_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); i++) {
        const size_t bytes =
            RowBuffer_projected_bytes(PyList_GET_ITEM(leaves, i),
                                      PyList_GET_ITEM(arrays, i), self->expected_rows);
        total = bytes > SIZE_MAX - total ? SIZE_MAX : total + bytes;
    }
    if (available == 0 || total <= available || self->spill_bytes > 0) {
        return 0;
    }
    char text[200];
    (void)snprintf(text, sizeof text, "%zu rows will take %.0f MiB; %.0f MiB are free",
                   self->expected_rows, mebibytes(total), mebibytes(available));
    return PyErr_WarnFormat(PyExc_UserWarning, 1,
                            "%U: %s. Keep less of each row "
                            "(preprocess_logits_for_metrics, ignore_keys), or let it "
                            "go to a file (spill_bytes)",
                            self->name, text);
}

/* All or nothing: room is made in every array before the first is written. */
static int
copy_rows(PyObject *leaves, PyObject *arrays)
{
    const Py_ssize_t n = PyList_GET_SIZE(leaves);
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = RowBuffer_add(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(arrays, i),
                               false);
    }
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result =
            RowBuffer_add(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(arrays, i), true);
    }
    return result;
}

static int
enter(ArrayAccumulator *self)
{
    if (self->busy) {
        PyErr_Format(PyExc_RuntimeError, "%U: another thread is using these arrays",
                     self->name);
        return -1;
    }
    self->busy = true;
    return 0;
}

static PyObject *
append_batch(ArrayAccumulator *self, PyObject *batch)
{
    const bool first = self->tree == NULL;
    PyObject *leaves = first ? PyList_New(0) : Py_NewRef(self->leaves);
    PyObject *tree = NULL, *arrays = NULL, *result = NULL;
    if (leaves == NULL) {
        goto done;
    }
    tree = first ? tree_new(self, batch, leaves) : Py_NewRef(self->tree);
    if (tree == NULL || (arrays = PyList_New(0)) == NULL ||
        tree_flatten(self, tree, batch, NULL, arrays) < 0 ||
        (first && warn_if_too_large(self, leaves, arrays) < 0) ||
        copy_rows(leaves, arrays) < 0) {
        goto done;
    }
    if (first) {
        Py_XSETREF(self->tree, Py_NewRef(tree));
        Py_XSETREF(self->leaves, Py_NewRef(leaves));
    }
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(arrays);
    Py_XDECREF(tree);
    Py_XDECREF(leaves);
    return result;
}

PyDoc_STRVAR(append_doc,
             "append($self, batch, /)\n--\n\n"
             "Add the rows of a batch: a tensor, a NumPy array, a number, or these in\n"
             "tuples, lists and mappings.\n\n"
             "A value without dimensions is one row; bfloat16 becomes float32. Raises\n"
             "TypeError or ValueError that name the leaf when structure, dtype or a\n"
             "dimension beyond the second differs from the batches before; nothing is\n"
             "added then. Warns at the first batch when n_rows_hint such rows will\n"
             "not fit into the memory that is free.");

static PyObject *
ArrayAccumulator_append(PyObject *op, PyObject *batch)
{
    ArrayAccumulator *self = (ArrayAccumulator *)op;
    if (enter(self) < 0) {
        return NULL;
    }
    PyObject *result = append_batch(self, batch);
    self->busy = false;
    return result;
}

PyDoc_STRVAR(result_doc,
             "result($self, /)\n--\n\n"
             "Return the arrays, in the structure of the batches; None if there\n"
             "were none.\n\n"
             "Rows shorter than the longest are filled with padding_index on the\n"
             "right, in the second dimension. Nothing is copied: the accumulator is\n"
             "empty afterwards.");

static PyObject *
ArrayAccumulator_result(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ArrayAccumulator *self = (ArrayAccumulator *)op;
    if (self->tree == NULL) {
        Py_RETURN_NONE;
    }
    if (enter(self) < 0) {
        return NULL;
    }
    PyObject *result = tree_result(self, self->tree);
    if (result != NULL) {
        Py_CLEAR(self->tree);
    }
    self->busy = false;
    return result;
}

PyDoc_STRVAR(ArrayAccumulator_doc,
             "ArrayAccumulator(n_rows_hint=None, padding_index=-100, *, name='batch',\n"
             "                 spill_bytes=None, spill_folder='.')\n--\n\n"
             "Collects batches row by row, in linear time and no more memory than the\n"
             "result takes.\n\n"
             "n_rows_hint is how many rows to make room for. An array that grows\n"
             "beyond spill_bytes moves to an unnamed file in spill_folder.");

static PyMethodDef ArrayAccumulator_methods[] = {
    {"append", ArrayAccumulator_append, METH_O,      append_doc},
    {"result", ArrayAccumulator_result, METH_NOARGS, result_doc},
    {NULL,     NULL,                    0,           NULL      },
};

static PyType_Slot ArrayAccumulator_slots[] = {
    {Py_tp_doc,      (void *)ArrayAccumulator_doc},
    {Py_tp_new,      ArrayAccumulator_new        },
    {Py_tp_init,     ArrayAccumulator_init       },
    {Py_tp_traverse, ArrayAccumulator_traverse   },
    {Py_tp_clear,    ArrayAccumulator_clear      },
    {Py_tp_dealloc,  ArrayAccumulator_dealloc    },
    {Py_tp_methods,  ArrayAccumulator_methods    },
    {0,              NULL                        },
};

PyType_Spec ArrayAccumulator_spec = {
    .name = "ctrainer._C.ArrayAccumulator",
    .basicsize = sizeof(ArrayAccumulator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = ArrayAccumulator_slots,
};
