/* Module functions over batches of data: fairseq's batches by size, orders by length,
 * rows of padded tokens, the check of an index, and a checksum of a batch.
 *
 * Results are views or plain bytes: batches as slices of the caller's indices cost no
 * copy, and a table of blocks is one object instead of five integers for each block. */
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/base/span.h"
#include "core/data/batches.h"
#include "core/data/order.h"
#include "core/data/rows.h"

#include <string.h>

/* ---- fairseq's batches by size --------------------------------------------------- */

/* A vector of int64 or int32. The core walks the memory by itself, so order and dtype
 * have to be exact. */
static int
view_integers(PyObject *module, PyObject *op, const char *name, ct_dtype dtype,
              ctpy_view *view)
{
    const ctpy_place place = {.what = name, .group = -1};
    if (ctpy_view_of(PyModule_GetState(module), op, &place, view) < 0) {
        return -1;
    }
    if (view->span.dtype != dtype || view->ndim != 1 || view->strides != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a C-contiguous array of %s in 1 dimension", name,
                     dtype == CT_I64 ? "int64" : "int32");
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
 * first and replaced in place: the function may do anything to the array. */
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
        /* With the GIL, as every batch makes a Python object. */
        if (append_slice(batches, indices, start, end) < 0) {
            Py_CLEAR(batches);
        }
    }
    return batches;
}

/* The batches by a vector or a function of lengths. */
static PyObject *
cut_by(PyObject *module, const ct_batch_rule *rule, PyObject *indices, PyObject *tokens)
{
    ctpy_view at, lengths;
    ct_error err;
    if (ct_batch_rule_check(rule, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    if (view_integers(module, indices, "indices", CT_I64, &at) < 0) {
        return NULL;
    }
    if (PyCallable_Check(tokens)) {
        int64_t *made = call_num_tokens(tokens, &at.span);
        PyObject *batches = made == NULL ? NULL : cut(rule, indices, made, at.span.n);
        ct_free(made);
        return batches;
    }
    if (view_integers(module, tokens, "num_tokens", CT_I64, &lengths) < 0) {
        return NULL;
    }
    if (lengths.span.n != at.span.n) {
        return PyErr_Format(PyExc_ValueError,
                            "num_tokens has %zu lengths for %zu indices",
                            lengths.span.n, at.span.n);
    }
    return cut(rule, indices, lengths.span.data, at.span.n);
}

static const char ctpy_batch_by_size_doc[] =
    "batch_by_size($module, indices, num_tokens, max_tokens, max_sentences, multiple,\n"
    "              /)\n--\n\n"
    "Return consecutive views of indices, one for each batch.\n\n"
    "indices: int64 array of shape (n,). num_tokens: int64 array of shape (n,), or a\n"
    "function that takes an index. A batch has at most max_sentences samples, and\n"
    "samples times the longest's tokens is at most max_tokens; 0 or less is no limit.\n"
    "One of more than `multiple` samples has a multiple of it.\n\n"
    "Raises ValueError for a sample of more than max_tokens.";

static PyObject *
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

/* ---- orders by length ------------------------------------------------------------ */

static const char ctpy_order_by_length_doc[] =
    "order_by_length($module, order, lengths, chunk, longest_first, /)\n--\n\n"
    "Sort each chunk of order, in place, by descending length; equal ones stay as\n"
    "they are.\n\n"
    "order: int64 array of shape (n,), indices into lengths, int32 of shape (m,).\n"
    "longest_first: exchange the first index with that of the longest sample.\n\n"
    "Raises ValueError for an index out of range and a chunk below 1.\n"
    "Source: transformers 5.17, get_length_grouped_indices.";

static PyObject *
ctpy_order_by_length(PyObject *module, PyObject *args)
{
    PyObject *order, *lengths;
    Py_ssize_t chunk;
    int longest_first;
    ctpy_view at, by;
    ct_error err;
    ct_status status;
    if (!PyArg_ParseTuple(args, "OOnp:order_by_length", &order, &lengths, &chunk,
                          &longest_first) ||
        view_integers(module, order, "order", CT_I64, &at) < 0 ||
        view_integers(module, lengths, "lengths", CT_I32, &by) < 0) {
        return NULL;
    }
    const size_t each = chunk < 1 ? 0 : (size_t)chunk;
    Py_BEGIN_ALLOW_THREADS
    status = ct_order_by_length(at.span.data, at.span.n, by.span.data, by.span.n, each,
                                &err);
    if (status == CT_OK && longest_first) {
        ct_order_longest_first(at.span.data, at.span.n, by.span.data, each);
    }
    Py_END_ALLOW_THREADS
    return status == CT_OK ? Py_NewRef(Py_None) : ctpy_raise(&err);
}

static const char ctpy_move_rows_doc[] =
    "move_rows($module, array, to, /)\n--\n\n"
    "Move row i of a writable array, of shape (n, ...), to place to[i], in place.\n\n"
    "to: int64 array of shape (n,), a permutation. Raises ValueError for another\n"
    "length, or for a place that is out of range or taken.";

static PyObject *
ctpy_move_rows(PyObject *module, PyObject *args)
{
    PyObject *array, *to;
    Py_buffer rows;
    ctpy_view places;
    ct_error err;
    ct_status status = CT_EHOST; /* stays so if an exception is set already */
    if (!PyArg_ParseTuple(args, "OO:move_rows", &array, &to) ||
        view_integers(module, to, "to", CT_I64, &places) < 0 ||
        PyObject_GetBuffer(array, &rows, PyBUF_CONTIG) < 0) {
        return NULL;
    }
    const size_t n = rows.ndim < 1 ? 0 : (size_t)rows.shape[0];
    if (n != places.span.n) {
        PyErr_Format(PyExc_ValueError, "there are %zu places for %zu rows",
                     places.span.n, n);
    }
    else {
        const size_t row_bytes = n == 0 ? 0 : (size_t)rows.len / n;
        Py_BEGIN_ALLOW_THREADS
        status = ct_rows_move(rows.buf, n, row_bytes, places.span.data, &err);
        Py_END_ALLOW_THREADS
        if (status != CT_OK) {
            (void)ctpy_raise(&err);
        }
    }
    PyBuffer_Release(&rows);
    return status == CT_OK ? Py_NewRef(Py_None) : NULL;
}

static const char ctpy_check_index_doc[] =
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

static PyObject *
ctpy_check_index(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer sizes, offsets;
    Py_ssize_t element, total;
    ct_error err;
    /* Stays so if an exception is set already. */
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

/* Module function of fairseq's language models: a stream of tokens in blocks. */

static int
parse_mode(const char *name, ct_break_mode *mode)
{
    static const char *const names[] = {"none", "complete", "complete_doc", "eos"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            *mode = (ct_break_mode)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "Invalid break_mode: %s; expected none, complete, complete_doc or eos",
                 name);
    return -1;
}

/* The rows of all blocks, counted first, as a new bytearray. */
static PyObject *
blocks_cut(const ct_block_rule *rule, const int64_t *sizes, size_t n)
{
    size_t count;
    Py_BEGIN_ALLOW_THREADS
    /* A first pass counts: the rows of a large data set are allocated once. */
    count = ct_blocks_cut(rule, sizes, n, NULL, 0);
    Py_END_ALLOW_THREADS
    if (count > (size_t)PY_SSIZE_T_MAX / sizeof(ct_block)) {
        return PyErr_NoMemory();
    }
    PyObject *rows =
        PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(ct_block)));
    if (rows != NULL) {
        void *blocks = PyByteArray_AS_STRING(rows);
        Py_BEGIN_ALLOW_THREADS(void)
        ct_blocks_cut(rule, sizes, n, blocks, count);
        Py_END_ALLOW_THREADS
    }
    return rows;
}

static PyObject *
check_and_cut(const ct_block_rule *rule, const Py_buffer *sizes)
{
    const size_t n = (size_t)sizes->len / sizeof(int64_t);
    ct_error err;
    /* int64 is 'l' or 'q', by the system's C types. */
    if (sizes->format == NULL || strchr("lq", *sizes->format) == NULL ||
        sizes->itemsize != (Py_ssize_t)sizeof(int64_t)) {
        return PyErr_Format(PyExc_ValueError,
                            "sizes must be an array of int64, got the format %s",
                            sizes->format == NULL ? "B" : sizes->format);
    }
    if (ct_blocks_check(rule, sizes->buf, n, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    return blocks_cut(rule, sizes->buf, n);
}

static const char ctpy_token_blocks_doc[] =
    "token_blocks($module, sizes, break_mode, block_size, document_sep_len, /)\n--\n\n"
    "Return the blocks of a stream of items as a bytearray: rows of five int64.\n\n"
    "sizes: the items' tokens, int64, of shape (n,). break_mode: none fills blocks of\n"
    "block_size tokens, complete puts whole items into them, complete_doc too and "
    "ends\n"
    "one at an item of document_sep_len tokens, which is left out; eos makes a block "
    "of\n"
    "each item. A row is start and end in the stream, the first item and the position\n"
    "in it, the last item.\n\n"
    "Raises ValueError for another mode, for sizes below 0, and for a block_size "
    "below\n"
    "1 where the mode has one.";

static PyObject *
ctpy_token_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *op;
    Py_buffer sizes;
    const char *name;
    long long block, separator;
    ct_block_rule rule = {.mode = CT_BREAK_NONE};
    if (!PyArg_ParseTuple(args, "OsLL:token_blocks", &op, &name, &block, &separator) ||
        parse_mode(name, &rule.mode) < 0 ||
        PyObject_GetBuffer(op, &sizes, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        return NULL;
    }
    rule.block_tokens = block;
    rule.separator_tokens = separator;
    PyObject *rows = check_and_cut(&rule, &sizes);
    PyBuffer_Release(&sizes);
    return rows;
}

/* Collation: tensors of one dimension into the rows of a padded batch. */

/* 1 and the view of plain memory in the host; 0 for anything else; -1. */
static int
plain_view(ctpy_state *state, PyObject *op, int ndim, ctpy_view *view)
{
    const ctpy_place place = {.what = "a value", .group = -1};
    if (ctpy_view_of(state, op, &place, view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    return view->shape != NULL && view->strides == NULL && view->ndim == ndim;
}

/* 1 when all rows are written, 0 for a value that is no plain memory of out's dtype. */
static int
pad_rows(ctpy_state *state, const ctpy_view *out, PyObject *const *values, size_t n,
         const ct_pad_rule *rule)
{
    unsigned char *row = out->span.data;
    for (size_t i = 0; i < n; i++, row += rule->width * rule->item_bytes) {
        ctpy_view view;
        const int plain = plain_view(state, values[i], 1, &view);
        if (plain <= 0 || view.span.dtype != out->span.dtype) {
            return plain < 0 ? -1 : 0;
        }
        /* A longer value would run into the next row. */
        if (view.span.n > rule->width) {
            PyErr_Format(PyExc_ValueError, "value %zu has %zu items, a row has %zu", i,
                         view.span.n, rule->width);
            return -1;
        }
        ct_pad_row(rule, row, view.span.data, view.span.n);
    }
    return 1;
}

static const char ctpy_pad_rows_doc[] =
    "pad_rows($module, out, values, left, rotate, first, /)\n--\n\n"
    "Copy each of values, of shape (n,), into a row of out, of shape (rows, width).\n\n"
    "left: at its end. rotate: without its last item and with first before it, a "
    "tensor\n"
    "of one item or None, which is the last item itself. The rest of out stays.\n\n"
    "Return False, for another way to be taken, where a tensor is not plain memory in\n"
    "the host, without gaps and all of one dtype; rows may then be written already.\n"
    "Raise ValueError for more values than rows and for one longer than a row.";

static int
parse_rule(ctpy_state *state, PyObject *out, PyObject *first, ctpy_view *view,
           ct_pad_rule *rule)
{
    ctpy_view one;
    int plain = plain_view(state, out, 2, view);
    if (plain <= 0) {
        return plain;
    }
    rule->width = (size_t)view->shape[1];
    rule->item_bytes = ct_dtype_size(view->span.dtype);
    if (first != Py_None) {
        plain = plain_view(state, first, 1, &one);
        if (plain <= 0 || one.span.n != 1 || one.span.dtype != view->span.dtype) {
            return plain < 0 ? -1 : 0;
        }
        rule->first = one.span.data;
    }
    return 1;
}

static PyObject *
ctpy_pad_rows(PyObject *module, PyObject *args)
{
    ctpy_state *state = PyModule_GetState(module);
    PyObject *out, *values, *first;
    int left, rotate;
    if (!PyArg_ParseTuple(args, "OOppO:pad_rows", &out, &values, &left, &rotate,
                          &first)) {
        return NULL;
    }
    ct_pad_rule rule = {.left = left, .rotate = rotate};
    ctpy_view view;
    int done = parse_rule(state, out, first, &view, &rule);
    /* A tuple keeps the values alive, whatever the list's owner does. */
    PyObject *rows = done == 1 ? PySequence_Tuple(values) : NULL;
    if (done == 1 && rows == NULL) {
        return NULL;
    }
    if (done == 1 && PyTuple_GET_SIZE(rows) > view.shape[0]) {
        PyErr_Format(PyExc_ValueError, "there are %zd values for %zd rows",
                     PyTuple_GET_SIZE(rows), (Py_ssize_t)view.shape[0]);
        done = -1;
    }
    if (done == 1) {
        done = pad_rows(state, &view, PySequence_Fast_ITEMS(rows),
                        (size_t)PyTuple_GET_SIZE(rows), &rule);
    }
    Py_XDECREF(rows);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* ---- a checksum of a batch, by which a resumed run recognizes its data ----------- */

/* The checksum is taken of every batch on arrival, since a model or a hook may write
 * into the batch later: so it covers few bytes of few parts, read in place. */

enum {
    MOST_PARTS = 8,
    MOST_BYTES = 1 << 14,
    MOST_DEPTH = 16
};

typedef struct digest {
    ctpy_state *state;
    PyObject *describe; /* borrowed: bytes or parts for a part of another kind */
    uint32_t crc;
    int n_parts;
} digest;

/* The length, then the first bytes: parts cannot run into each other. */
static void
add_bytes(digest *d, const void *data, size_t n)
{
    const uint64_t length = n;
    d->crc = ct_crc32(d->crc, &length, sizeof length);
    d->crc = ct_crc32(d->crc, data, n < MOST_BYTES ? n : MOST_BYTES);
    d->n_parts++;
}

/* 1 when op, a tensor or an array in the host's memory in C order, has been added, 0
 * for anything else, -1 with an exception. */
static int
add_memory(digest *d, PyObject *op)
{
    const ctpy_place place = {.what = "a part", .group = -1};
    ctpy_view view;
    if (ctpy_view_of(d->state, op, &place, &view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    if (view.strides != NULL) {
        return 0;
    }
    add_bytes(d, view.span.data, view.span.n * ct_dtype_size(view.span.dtype));
    return 1;
}

/* 1 when op is a number or a string and has been added, 0, or -1. */
static int
add_value(digest *d, PyObject *op)
{
    if (PyFloat_Check(op)) {
        const double value = PyFloat_AS_DOUBLE(op);
        add_bytes(d, &value, sizeof value);
        return 1;
    }
    if (PyLong_Check(op)) {
        const Py_hash_t value = PyLong_Type.tp_hash(op); /* the same in any process */
        add_bytes(d, &value, sizeof value);
        return 1;
    }
    if (PyUnicode_Check(op)) {
        add_bytes(d, PyUnicode_DATA(op),
                  (size_t)PyUnicode_GET_LENGTH(op) * (size_t)PyUnicode_KIND(op));
        return 1;
    }
    return 0;
}

/* The parts of op, a new list or tuple; NULL for a leaf, which has been added, or with
 * an exception. describe(op) returns bytes, a list of parts, or None. */
static PyObject *
parts_of(digest *d, PyObject *op)
{
    if (PyList_Check(op) || PyTuple_Check(op)) {
        return Py_NewRef(op);
    }
    if (PyDict_Check(op)) {
        return PyDict_Values(op);
    }
    const int added = add_value(d, op);
    if (added != 0 || add_memory(d, op) != 0) {
        return NULL;
    }
    PyObject *described = PyObject_CallOneArg(d->describe, op);
    if (described != NULL && PyBytes_Check(described)) {
        add_bytes(d, PyBytes_AS_STRING(described), (size_t)PyBytes_GET_SIZE(described));
    }
    if (described != NULL && !PyList_Check(described)) {
        Py_CLEAR(described);
    }
    return described;
}

static int
add_part(digest *d, PyObject *op, int depth)
{
    if (depth > MOST_DEPTH || op == Py_None) {
        return 0;
    }
    PyObject *parts = parts_of(d, op);
    if (parts == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int result = 0;
    for (Py_ssize_t i = 0; /* describe() may change a list meanwhile */
         result == 0 && d->n_parts < MOST_PARTS && i < PySequence_Fast_GET_SIZE(parts);
         i++) {
        PyObject *part = Py_NewRef(PySequence_Fast_GET_ITEM(parts, i));
        result = add_part(d, part, depth + 1);
        Py_DECREF(part);
    }
    Py_DECREF(parts);
    return result;
}

static const char ctpy_batch_digest_doc[] =
    "batch_digest($module, batch, describe, /)\n--\n\n"
    "Return a checksum of the first 8 parts of a batch, of each at most 16 KiB.\n\n"
    "batch: dicts, lists and tuples of tensors, arrays, numbers and strings. "
    "describe:\n"
    "is called with a part of another kind, and with a tensor that is not in the\n"
    "host's memory in C order; returns bytes in its place, a list of its own parts,\n"
    "or None.";

static PyObject *
ctpy_batch_digest(PyObject *module, PyObject *args)
{
    digest d = {.state = PyModule_GetState(module)};
    PyObject *batch;
    if (!PyArg_ParseTuple(args, "OO:batch_digest", &batch, &d.describe) ||
        add_part(&d, batch, 0) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(d.crc);
}

PyMethodDef ctpy_data_batches_functions[] = {
    {"batch_digest",    ctpy_batch_digest,    METH_VARARGS, ctpy_batch_digest_doc   },
    {"batch_by_size",   ctpy_batch_by_size,   METH_VARARGS, ctpy_batch_by_size_doc  },
    {"check_index",     ctpy_check_index,     METH_VARARGS, ctpy_check_index_doc    },
    {"move_rows",       ctpy_move_rows,       METH_VARARGS, ctpy_move_rows_doc      },
    {"order_by_length", ctpy_order_by_length, METH_VARARGS, ctpy_order_by_length_doc},
    {"pad_rows",        ctpy_pad_rows,        METH_VARARGS, ctpy_pad_rows_doc       },
    {"token_blocks",    ctpy_token_blocks,    METH_VARARGS, ctpy_token_blocks_doc   },
    {NULL,              NULL,                 0,            NULL                    },
};
