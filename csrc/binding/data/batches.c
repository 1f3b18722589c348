/* Module functions of fairseq's data sets: batches by size, and the check of an index.
 */
#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"
#include "core/base/alloc.h"
#include "core/data/batches.h"
#include "core/data/index.h"

#include <string.h>

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

static int
view_int64(PyObject *module, PyObject *op, const char *name, int ndim, ctpy_view *view)
{
    const ctpy_place place = {.what = name, .group = -1};
    if (ctpy_view_of(PyModule_GetState(module), op, &place, view) < 0) {
        return -1;
    }
    if (view->span.dtype != CT_I64 || view->ndim != ndim || view->strides != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a C-contiguous array of int64 in %d dimension%s", name,
                     ndim, ndim == 1 ? "" : "s");
        return -1;
    }
    return 0;
}

/* *value = fn(*value); -1 with an exception. */
static int
map_int64(PyObject *fn, int64_t *value)
{
    PyObject *index = PyLong_FromLongLong(*value);
    PyObject *count = index == NULL ? NULL : PyObject_CallOneArg(fn, index);
    *value = count == NULL ? -1 : PyLong_AsLongLong(count);
    Py_XDECREF(count);
    Py_XDECREF(index);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* num_tokens(index) for every index, as a block for ct_free. The indices are copied
 * first and replaced one by one: the function may do anything to the array. */
static int64_t *
call_num_tokens(PyObject *fn, const ct_span *indices)
{
    int64_t *tokens = ct_alloc(indices->n * sizeof *tokens);
    if (tokens == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    memcpy(tokens, indices->data, indices->n * sizeof *tokens);
    for (size_t i = 0; i < indices->n; i++) {
        if (map_int64(fn, &tokens[i]) < 0) {
            ct_free(tokens);
            return NULL;
        }
    }
    return tokens;
}

static int
append_slice(PyObject *batches, PyObject *indices, size_t start, size_t end)
{
    PyObject *batch = PySequence_GetSlice(indices, (Py_ssize_t)start, (Py_ssize_t)end);
    if (batch == NULL) {
        return -1;
    }
    const int failed = PyList_Append(batches, batch);
    Py_DECREF(batch);
    return failed;
}

static PyObject *
cut(const ct_batch_rule *rule, PyObject *indices, const int64_t *tokens, size_t n)
{
    ct_error err;
    PyObject *batches = PyList_New(0);
    for (size_t start = 0, end; batches != NULL && start < n; start = end) {
        if (ct_batch_next(rule, tokens, n, start, &end, &err) != CT_OK) {
            Py_DECREF(batches);
            return ctpy_raise(&err);
        }
        if (append_slice(batches, indices, start, end) < 0) {
            Py_CLEAR(batches);
        }
    }
    return batches;
}

/* The batches by a vector of lengths or by a function that gives them. */
static PyObject *
cut_by(PyObject *module, const ct_batch_rule *rule, PyObject *indices, PyObject *tokens)
{
    ctpy_view at, lengths;
    ct_error err;
    if (ct_batch_rule_check(rule, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    if (view_int64(module, indices, "indices", 1, &at) < 0) {
        return NULL;
    }
    if (PyCallable_Check(tokens)) {
        int64_t *made = call_num_tokens(tokens, &at.span);
        PyObject *batches = made == NULL ? NULL : cut(rule, indices, made, at.span.n);
        ct_free(made);
        return batches;
    }
    if (view_int64(module, tokens, "num_tokens", 1, &lengths) < 0) {
        return NULL;
    }
    if (lengths.span.n != at.span.n) {
        return PyErr_Format(PyExc_ValueError,
                            "num_tokens has %zu lengths for %zu indices",
                            lengths.span.n, at.span.n);
    }
    return cut(rule, indices, lengths.span.data, at.span.n);
}

const char ctpy_batch_by_size_doc[] =
    "batch_by_size($module, indices, num_tokens, max_tokens, max_sentences, multiple,\n"
    "              /)\n--\n\n"
    "Return consecutive views of indices, one for each batch.\n\n"
    "indices: int64 array of shape (n,). num_tokens: int64 array of shape (n,), or a\n"
    "function that takes an index. A batch has at most max_sentences samples, and\n"
    "samples times the longest's tokens is at most max_tokens; 0 or less is no limit.\n"
    "One of more than `multiple` samples has a multiple of it.\n\n"
    "Raises ValueError for a sample of more than max_tokens.";

PyObject *
ctpy_batch_by_size(PyObject *module, PyObject *args)
{
    PyObject *indices, *tokens;
    long long max_tokens, max_sentences, multiple;
    if (!PyArg_ParseTuple(args, "OOLLL:batch_by_size", &indices, &tokens, &max_tokens,
                          &max_sentences, &multiple)) {
        return NULL;
    }
    const ct_batch_rule rule = {
        .max_tokens = max_tokens, .max_sentences = max_sentences, .multiple = multiple};
    return cut_by(module, &rule, indices, tokens);
}

const char ctpy_batch_fixed_shapes_doc[] =
    "batch_fixed_shapes($module, indices, num_tokens, shapes, /)\n--\n\n"
    "Return consecutive views of indices, one for each batch.\n\n"
    "As batch_by_size(), with batches that fit a row (samples, tokens) of shapes, an\n"
    "int64 array of shape (m, 2), m > 0. Raises ValueError for a sample that fits "
    "none.";

PyObject *
ctpy_batch_fixed_shapes(PyObject *module, PyObject *args)
{
    PyObject *indices, *tokens, *shapes;
    ctpy_view view;
    if (!PyArg_ParseTuple(args, "OOO:batch_fixed_shapes", &indices, &tokens, &shapes) ||
        view_int64(module, shapes, "fixed_shapes", 2, &view) < 0) {
        return NULL;
    }
    if (view.shape == NULL || view.shape[0] == 0 || view.shape[1] != 2) {
        PyErr_SetString(
            PyExc_ValueError,
            "fixed_shapes must have rows (batch size, tokens), one at least");
        return NULL;
    }
    const ct_batch_rule rule = {
        .multiple = 1, .shapes = view.span.data, .n_shapes = (size_t)view.shape[0]};
    return cut_by(module, &rule, indices, tokens);
}

const char ctpy_check_index_doc[] =
    "check_index($module, sizes, offsets, element_bytes, data_bytes, /)\n--\n\n"
    "Raise ValueError unless every item lies within a data file of data_bytes.\n\n"
    "sizes: n int32, in elements; offsets: n int64, in bytes; both as buffers, at any\n"
    "alignment, little-endian.";

static int
index_matches(const Py_buffer *sizes, const Py_buffer *offsets, Py_ssize_t element)
{
    const Py_ssize_t n = sizes->len / (Py_ssize_t)sizeof(int32_t);
    if (element < 1 || sizes->len % (Py_ssize_t)sizeof(int32_t) != 0 ||
        offsets->len != n * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_Format(PyExc_ValueError,
                     "expected as many int32 sizes as int64 offsets and elements of a "
                     "byte or more, got %zd and %zd bytes and elements of %zd",
                     sizes->len, offsets->len, element);
        return 0;
    }
    return 1;
}

PyObject *
ctpy_check_index(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer sizes, offsets;
    Py_ssize_t element, total;
    ct_error err;
    ct_status status = CT_EHOST;
    if (!PyArg_ParseTuple(args, "y*y*nn:check_index", &sizes, &offsets, &element,
                          &total)) {
        return NULL;
    }
    if (index_matches(&sizes, &offsets, element)) {
        const size_t n = (size_t)sizes.len / sizeof(int32_t);
        Py_BEGIN_ALLOW_THREADS
        status = ct_index_check(sizes.buf, offsets.buf, n, (size_t)element,
                                total < 0 ? 0 : (size_t)total, &err);
        Py_END_ALLOW_THREADS
        if (status != CT_OK) {
            (void)ctpy_raise(&err);
        }
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&sizes);
    return status == CT_OK ? Py_NewRef(Py_None) : NULL;
}
