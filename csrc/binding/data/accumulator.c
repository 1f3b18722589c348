/* ctrainer._C.ArrayAccumulator: batches of nested tensors into nested NumPy arrays. */
#include "binding/data/accumulator.h"

/* Every Python field, once, so that init, traverse and clear cannot disagree. */
#define ACCUMULATOR_FIELDS(V) V(name) V(padding_index) V(tree) V(leaves) V(folder)

static int
ArrayAccumulator_traverse(PyObject *op, visitproc visit, void *arg)
{
    ArrayAccumulator *self = (ArrayAccumulator *)op;
    Py_VISIT(Py_TYPE(op));
#define V(field) Py_VISIT(self->field);
    ACCUMULATOR_FIELDS(V)
#undef V
    return 0;
}

static int
ArrayAccumulator_clear(PyObject *op)
{
    ArrayAccumulator *self = (ArrayAccumulator *)op;
#define V(field) Py_CLEAR(self->field);
    ACCUMULATOR_FIELDS(V)
#undef V
    return 0;
}

static void
ArrayAccumulator_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)ArrayAccumulator_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

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

/* None is 0; otherwise a number of at least `least`. */
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
        result =
            RowBuffer_reserve(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(arrays, i));
    }
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result =
            RowBuffer_append(PyList_GET_ITEM(leaves, i), PyList_GET_ITEM(arrays, i));
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
    tree = first ? ctpy_tree_new(self, batch, leaves) : Py_NewRef(self->tree);
    if (tree == NULL || (arrays = PyList_New(0)) == NULL ||
        ctpy_tree_flatten(self, tree, batch, NULL, arrays) < 0 ||
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
             "Hand over the arrays, in the structure of the batches; None if there\n"
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
    PyObject *result = ctpy_tree_result(self, self->tree);
    if (result != NULL) {
        Py_CLEAR(self->tree);
    }
    self->busy = false;
    return result;
}

static PyMethodDef ArrayAccumulator_methods[] = {
    {"append", ArrayAccumulator_append, METH_O,      append_doc},
    {"result", ArrayAccumulator_result, METH_NOARGS, result_doc},
    {NULL,     NULL,                    0,           NULL      },
};

PyDoc_STRVAR(ArrayAccumulator_doc,
             "ArrayAccumulator(n_rows_hint=None, padding_index=-100, *, name='batch',\n"
             "                 spill_bytes=None, spill_folder='.')\n--\n\n"
             "Collects batches row by row, in linear time and no more memory than the\n"
             "result takes.\n\n"
             "n_rows_hint is how many rows to make room for. An array that grows\n"
             "beyond spill_bytes moves to an unnamed file in spill_folder.");

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
