/* Module functions on nested batches, by the names that transformers gives them. */
#include "binding/runtime/nested.h"

const char ctpy_nested_detach_doc[] =
    "nested_detach($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, with each one detached.";

PyObject *
ctpy_nested_detach(PyObject *module, PyObject *tensors)
{
    return ctpy_detach_all(tensors, PyModule_GetState(module));
}

const char ctpy_nested_numpify_doc[] =
    "nested_numpify($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, as NumPy arrays.\n\n"
    "bfloat16, which NumPy lacks, becomes float32; arrays stay what they are.";

PyObject *
ctpy_nested_numpify(PyObject *module, PyObject *tensors)
{
    return ctpy_numpify_all(tensors, PyModule_GetState(module));
}

const char ctpy_find_batch_size_doc[] =
    "find_batch_size($module, tensors, /)\n--\n\n"
    "Return the first dimension of the first tensor or array in a nested batch.\n\n"
    "None where there is none.";

PyObject *
ctpy_find_batch_size(PyObject *module, PyObject *tensors)
{
    const Py_ssize_t n = ctpy_batch_size(tensors, PyModule_GetState(module));
    if (n == -1) {
        Py_RETURN_NONE;
    }
    return n < 0 ? NULL : PyLong_FromSsize_t(n);
}
