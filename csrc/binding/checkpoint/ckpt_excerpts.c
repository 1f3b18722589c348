/* Excerpts of files, as Python gives them. */
#include "binding/checkpoint/tensors.h"
#include "core/base/alloc.h"

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
