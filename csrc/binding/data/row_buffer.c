/* ctrainer._C.RowBuffer: core/data/rows.h as an exporter of the buffer protocol. */
#include "binding/data/row_buffer.h"

/* From here on a copy takes longer than handing the GIL over. */
static const Py_ssize_t release_from_bytes = 1 << 18;

PyObject *
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
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)RowBuffer_clear(op);
    ct_rows_fini(&self->rows);
    Py_CLEAR(self->folder);
    type->tp_free(op);
    Py_DECREF(type);
}

static int
RowBuffer_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    RowBuffer *self = (RowBuffer *)op;
    void *data = self->rows.used_bytes > 0 ? self->rows.region.data : "";
    return PyBuffer_FillInfo(view, op, data, (Py_ssize_t)self->rows.used_bytes, 0,
                             flags);
}

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
    int equal = PyObject_RichCompareBool(dtype, self->dtype, Py_EQ);
    if (equal == 0) {
        PyErr_Format(PyExc_TypeError,
                     "this batch is %S, those before it %S; cast them alike in "
                     "preprocess_logits_for_metrics or prediction_step",
                     dtype, self->dtype);
    }
    return equal == 1 ? 0 : -1;
}

int
RowBuffer_check(PyObject *op, PyObject *array)
{
    RowBuffer *self = (RowBuffer *)op;
    int result = -1;
    Py_buffer view;
    PyObject *dtype = PyObject_GetAttr(array, ctpy_state_borrow(op)->str_dtype);
    if (dtype == NULL || PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        Py_XDECREF(dtype);
        return -1;
    }
    if (view.ndim > CTPY_ROW_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions, at most %d can be kept",
                     view.ndim, CTPY_ROW_MAX_DIMS);
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

static size_t
width_of(const Py_buffer *view)
{
    return view->ndim < 2 ? 1 : (size_t)view->shape[1];
}

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

int
RowBuffer_reserve(PyObject *op, PyObject *array)
{
    RowBuffer *self = (RowBuffer *)op;
    Py_buffer view;
    ct_error err;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    const ct_status status =
        ct_rows_reserve(&self->rows, (size_t)view.shape[0], width_of(&view), &err);
    PyBuffer_Release(&view);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
RowBuffer_append(PyObject *op, PyObject *array)
{
    RowBuffer *self = (RowBuffer *)op;
    Py_buffer view;
    ct_error err;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    const ct_status status = append_view(self, &view, &err);
    PyBuffer_Release(&view);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

size_t
RowBuffer_projected_bytes(PyObject *op, PyObject *array, size_t n_rows)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* the append that follows raises it */
        return 0;
    }
    const size_t row = width_of(&view) * ((RowBuffer *)op)->rows.position_bytes;
    PyBuffer_Release(&view);
    return row != 0 && n_rows > SIZE_MAX / row ? SIZE_MAX : row * n_rows;
}

/* Copies the element that padding_index becomes in this dtype, by the rules of a C
 * cast: -100 is 156 as uint8 and True as bool, as it is in torch. */
static int
fill_item(RowBuffer *self, PyObject *padding_index, char *item)
{
    int result = -1;
    Py_buffer view;
    PyObject *numpy = PyImport_ImportModule("numpy"), *one = NULL, *cast = NULL;
    if (numpy == NULL ||
        (one = PyObject_CallMethod(numpy, "asarray", "(O)", padding_index)) == NULL ||
        (cast = PyObject_CallMethod(one, "astype", "(O)", self->dtype)) == NULL) {
        goto done;
    }
    if (PyObject_GetBuffer(cast, &view, PyBUF_C_CONTIGUOUS) == 0) {
        memcpy(item, view.buf, (size_t)self->item_bytes);
        PyBuffer_Release(&view);
        result = 0;
    }
done:
    Py_XDECREF(cast);
    Py_XDECREF(one);
    Py_XDECREF(numpy);
    return result;
}

static int
spread(RowBuffer *self, PyObject *padding_index)
{
    char item[sizeof(double) * 4] = {0}; /* the largest dtype is complex long double */
    ct_status status;
    ct_error err;
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
    PyObject *shape = PyTuple_New(self->ndim);
    for (int i = 0; shape != NULL && i < self->ndim; i++) {
        const Py_ssize_t n = i == 0   ? (Py_ssize_t)self->rows.n_rows
                             : i == 1 ? (Py_ssize_t)self->rows.width
                                      : self->shape[i];
        PyObject *value = PyLong_FromSsize_t(n);
        if (value == NULL) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SET_ITEM(shape, i, value);
    }
    return shape;
}

PyObject *
RowBuffer_result(PyObject *op, PyObject *padding_index)
{
    RowBuffer *self = (RowBuffer *)op;
    PyObject *numpy = NULL, *shape = NULL, *array = NULL;
    if (spread(self, padding_index) < 0 ||
        (numpy = PyImport_ImportModule("numpy")) == NULL ||
        (shape = shape_tuple(self)) == NULL) {
        goto done;
    }
    array = PyObject_CallMethod(numpy, "ndarray", "OOO", shape, self->dtype, op);
done:
    Py_XDECREF(shape);
    Py_XDECREF(numpy);
    return array;
}

PyDoc_STRVAR(RowBuffer_doc,
             "Memory of an array that ArrayAccumulator has filled; its arrays' base.");

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
