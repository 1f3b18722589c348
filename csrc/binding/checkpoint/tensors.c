/* Named tensors from Python as the entries of a file.
 *
 * Entries borrow names, shapes and data from a list that *tensors owns: all sizes are
 * known before memory for shapes is taken, so that no address changes.
 *
 * The list keeps every name and value alive, and strings keep their UTF-8 form, so the
 * entries are valid until ctpy_tensors_fini, whatever happens to the user's dict
 * meanwhile. */
#include "binding/checkpoint/tensors.h"

#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"

#include <stdio.h>

void
ctpy_tensors_fini(ctpy_tensors *tensors)
{
    /* The count may be set before a failed allocation of the entries. */
    for (size_t i = 0; i < tensors->n && tensors->entries != NULL; i++) {
        ct_free((void *)tensors->entries[i].excerpts);
    }
    ct_free(tensors->extents);
    ct_free(tensors->entries);
    Py_CLEAR(tensors->items);
    *tensors = (ctpy_tensors){0};
}

PyObject *
ctpy_path_from(PyObject *op)
{
    PyObject *bytes = NULL;
    return PyUnicode_FSConverter(op, (void *)&bytes) ? bytes : NULL;
}

/* The second pass over the items relies on these types. */
static int
check_value(PyObject *name, PyObject *value)
{
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "names of tensors must be str, got %.100s",
                     Py_TYPE(name)->tp_name);
        return -1;
    }
    if (PyTuple_Check(value) && (PyTuple_GET_SIZE(value) != 3 ||
                                 !PyUnicode_Check(PyTuple_GET_ITEM(value, 1)))) {
        PyErr_Format(PyExc_TypeError,
                     "tensor '%U': a tuple must be (bytes as uint8, dtype, shape)",
                     name);
        return -1;
    }
    return 0;
}

/* The shape of a value as a tuple; NULL with an exception with the name. */
static PyObject *
shape_of(PyObject *name, PyObject *value)
{
    PyObject *shape = PyTuple_Check(value) ? Py_NewRef(PyTuple_GET_ITEM(value, 2))
                                           : PyObject_GetAttrString(value, "shape");
    if (shape != NULL && PyTuple_Check(shape)) {
        return shape;
    }
    /* Only a missing attribute means a wrong type; other exceptions are the object's
     * own. */
    if (shape != NULL || PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Format(PyExc_TypeError,
                     "tensor '%U': expected a tensor or an array, got %.100s", name,
                     Py_TYPE(value)->tp_name);
    }
    Py_XDECREF(shape);
    return NULL;
}

/* Number of extents of all shapes, so that their memory is taken once. */
static Py_ssize_t
count_extents(PyObject *items)
{
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *pair = PyList_GET_ITEM(items, i), *name = PyTuple_GET_ITEM(pair, 0);
        PyObject *value = PyTuple_GET_ITEM(pair, 1), *shape = NULL;
        if (check_value(name, value) < 0 || (shape = shape_of(name, value)) == NULL) {
            return -1;
        }
        n += PyTuple_GET_SIZE(shape);
        Py_DECREF(shape);
    }
    return n;
}

/* The shape is asked for again: another thread may have changed the tensor since, so
 * `room`, the number of extents that are left, bounds the copy. */
static int
fill_shape(PyObject *pair, uint64_t *extents, size_t room, ct_st_entry *entry)
{
    PyObject *name = PyTuple_GET_ITEM(pair, 0);
    PyObject *shape = shape_of(name, PyTuple_GET_ITEM(pair, 1));
    if (shape == NULL) {
        return -1;
    }
    entry->ndim = (size_t)PyTuple_GET_SIZE(shape);
    entry->shape = extents;
    if (entry->ndim > room) {
        Py_DECREF(shape);
        PyErr_Format(PyExc_RuntimeError, "tensor '%U' changed its shape meanwhile",
                     name);
        return -1;
    }
    /* A negative extent raises OverflowError here, rather than becoming a huge
     * number. */
    for (size_t i = 0; i < entry->ndim && !PyErr_Occurred(); i++) {
        extents[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, (Py_ssize_t)i));
    }
    Py_DECREF(shape);
    return PyErr_Occurred() ? -1 : 0;
}

static int
fill_excerpt(PyObject *item, const char *what, ct_excerpt *excerpt)
{
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3 ||
        !(PyBytes_Check(PyTuple_GET_ITEM(item, 0)) ||
          PyTuple_GET_ITEM(item, 0) == Py_None)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: an excerpt must be (path as bytes or None, offset, n)", what);
        return -1;
    }
    PyObject *path = PyTuple_GET_ITEM(item, 0);
    excerpt->path = path == Py_None ? NULL : PyBytes_AS_STRING(path);
    excerpt->offset = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(item, 1));
    if (!PyErr_Occurred()) {
        excerpt->n = PyLong_AsSize_t(PyTuple_GET_ITEM(item, 2));
    }
    return PyErr_Occurred() ? -1 : 0;
}

ct_excerpt *
ctpy_excerpts_from(PyObject *tuple, const char *what, size_t *n_bytes)
{
    size_t n = (size_t)PyTuple_GET_SIZE(tuple);
    ct_excerpt *excerpts = ct_calloc(n + 1, sizeof *excerpts);
    if (excerpts == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    *n_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
        /* The core compares the sum with the shape: a sum that wraps around could fit.
         */
        if (fill_excerpt(item, what, &excerpts[i]) < 0 ||
            __builtin_add_overflow(*n_bytes, excerpts[i].n, n_bytes)) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_OverflowError, "%s: too many bytes", what);
            }
            ct_free(excerpts);
            return NULL;
        }
    }
    return excerpts;
}

int
ctpy_memory_from(ctpy_state *state, PyObject *op, const char *what, ct_span *span,
                 ct_place *place)
{
    const ctpy_place at = {what, -1, -1};
    ctpy_view view;
    ctpy_target target;
    *place = (ct_place){0};
    if (ctpy_view_anywhere(state, op, &at, &view) < 0) {
        return -1;
    }
    if (view.memory != CTPY_DL_CPU) {
        if (ctpy_target_of(state, op, &at, &view, &target) < 0) {
            return -1;
        }
        *place = (ct_place){target.device, target.ordinal, target.stream};
    }
    return ctpy_span_on(state, op, what, 0, view.memory, span);
}

/* The bytes of a value: memory, or excerpts of files. */
static int
fill_data(ctpy_state *state, PyObject *data, const char *what,
          const ctpy_tensors *tensors, ct_st_entry *entry)
{
    ct_span span;
    if (tensors->may_excerpt && PyTuple_Check(data)) {
        entry->excerpts = ctpy_excerpts_from(data, what, &entry->bytes);
        entry->n_excerpts = (size_t)PyTuple_GET_SIZE(data);
        return entry->excerpts == NULL ? -1 : 0;
    }
    if ((tensors->writable
             ? ctpy_span_from(state, data, what, 1, &span)
             : ctpy_memory_from(state, data, what, &span, &entry->place)) < 0) {
        return -1;
    }
    entry->data = span.data;
    entry->bytes = span.n * ct_dtype_size(span.dtype);
    entry->tag = ct_dtype_tag(span.dtype);
    return 0;
}

static int
fill_entry(ctpy_state *state, PyObject *pair, const ctpy_tensors *tensors,
           uint64_t *extents, size_t room, ct_st_entry *entry)
{
    char what[200];
    Py_ssize_t n;
    PyObject *name = PyTuple_GET_ITEM(pair, 0), *value = PyTuple_GET_ITEM(pair, 1);
    bool raw = PyTuple_Check(value);
    const char *text = PyUnicode_AsUTF8AndSize(name, &n);
    if (text == NULL) {
        return -1;
    }
    (void)snprintf(what, sizeof what, "tensor '%.180s'", text);
    entry->name = (ct_text){text, (size_t)n};
    if (fill_data(state, raw ? PyTuple_GET_ITEM(value, 0) : value, what, tensors,
                  entry) < 0) {
        return -1;
    }
    /* The dtype of the file replaces uint8, the form in which NumPy has such bytes. */
    if (raw) {
        entry->tag = PyUnicode_AsUTF8(PyTuple_GET_ITEM(value, 1));
    }
    return entry->tag == NULL ? -1 : fill_shape(pair, extents, room, entry);
}

static int
fill_entries(ctpy_state *state, ctpy_tensors *tensors)
{
    Py_ssize_t extents = count_extents(tensors->items);
    if (extents < 0) {
        return -1;
    }
    tensors->n = (size_t)PyList_GET_SIZE(tensors->items);
    /* One place more than needed, so that no tensors are no failed allocation; zeroed,
     * so that ctpy_tensors_fini finds NULL in entries that were never filled. */
    tensors->entries = ct_calloc(tensors->n + 1, sizeof *tensors->entries);
    tensors->extents = ct_calloc((size_t)extents + 1, sizeof *tensors->extents);
    if (tensors->entries == NULL || tensors->extents == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    uint64_t *at = tensors->extents;
    size_t room = (size_t)extents;
    for (size_t i = 0; i < tensors->n; i++) {
        PyObject *pair = PyList_GET_ITEM(tensors->items, (Py_ssize_t)i);
        if (fill_entry(state, pair, tensors, at, room, &tensors->entries[i]) < 0) {
            return -1;
        }
        at += tensors->entries[i].ndim;
        room -= tensors->entries[i].ndim;
    }
    return 0;
}

int
ctpy_tensors_from(ctpy_state *state, PyObject *dict, ctpy_tensors *tensors)
{
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "tensors must be a dict, got %.100s",
                     Py_TYPE(dict)->tp_name);
        return -1;
    }
    tensors->items = PyDict_Items(dict);
    if (tensors->items == NULL || fill_entries(state, tensors) < 0) {
        ctpy_tensors_fini(tensors);
        return -1;
    }
    return 0;
}
