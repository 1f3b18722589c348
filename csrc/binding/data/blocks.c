/* Module function of fairseq's language models: a stream of tokens in blocks. */
#include "binding/runtime/ctpy.h"
#include "core/data/blocks.h"

#include <string.h>

#define CTPY_FUNCTION(name, flags)                                                     \
    PyObject *ctpy_##name(PyObject *module, PyObject *args);                           \
    extern const char ctpy_##name##_doc[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTION

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
cut(const ct_block_rule *rule, const int64_t *sizes, size_t n)
{
    size_t count;
    Py_BEGIN_ALLOW_THREADS
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
    if (sizes->format == NULL || strchr("lq", *sizes->format) == NULL ||
        sizes->itemsize != (Py_ssize_t)sizeof(int64_t)) {
        return PyErr_Format(PyExc_ValueError,
                            "sizes must be an array of int64, got the format %s",
                            sizes->format == NULL ? "B" : sizes->format);
    }
    if (ct_blocks_check(rule, sizes->buf, n, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    return cut(rule, sizes->buf, n);
}

const char ctpy_token_blocks_doc[] =
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

PyObject *
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
