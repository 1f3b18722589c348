/* A torch tensor's memory: through the exchange table that torch publishes from 2.10
 * on, at about 50 ns a gradient, or through its Python methods, at a microsecond. */
#include "binding/runtime/buffer.h"
#include "binding/runtime/dlpack_abi.h"

#include <stdint.h>

const ctpy_dlpack_api *
ctpy_exchange_table(PyObject *tensor_type)
{
    const ctpy_dlpack_api *api = NULL;
    PyObject *capsule =
        PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule != NULL) {
        api = PyCapsule_GetPointer(capsule, CTPY_DLPACK_CAPSULE);
        Py_DECREF(capsule);
    }
    if (api == NULL) {
        (void)ctpy_forgive(); /* an older torch: addresses come from data_ptr() */
    }
    while (api != NULL && api->major != CTPY_DLPACK_MAJOR) {
        api = api->older;
    }
    return api != NULL && api->tensor_from_object != NULL ? api : NULL;
}

static ct_dtype
dtype_from_dlpack(const ctpy_dl_tensor *t)
{
    if (t->type_lanes != 1) {
        return CT_DTYPE_COUNT;
    }
    switch (t->type_code << 8 | t->type_bits) {
    case CTPY_DL_FLOAT << 8 | 32:
        return CT_F32;
    case CTPY_DL_FLOAT << 8 | 64:
        return CT_F64;
    case CTPY_DL_BFLOAT << 8 | 16:
        return CT_BF16;
    case CTPY_DL_FLOAT << 8 | 16:
        return CT_F16;
    case CTPY_DL_INT << 8 | 64:
        return CT_I64;
    case CTPY_DL_INT << 8 | 32:
        return CT_I32;
    case CTPY_DL_INT << 8 | 16:
        return CT_I16;
    case CTPY_DL_INT << 8 | 8:
        return CT_I8;
    case CTPY_DL_UINT << 8 | 8:
        return CT_U8;
    case CTPY_DL_BOOL << 8 | 8:
        return CT_BOOL;
    default:
        return CT_DTYPE_COUNT;
    }
}

/* Walks the dimensions from the last; n is the number of elements even if the answer
 * is no. A dimension of 1 may have any stride, and so may all of an empty tensor. */
static int
is_contiguous(int ndim, const int64_t *shape, const int64_t *strides, size_t *n)
{
    int64_t expected = 1;
    int contiguous = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        if (strides != NULL && shape[i] != 1 && strides[i] != expected) {
            contiguous = 0;
        }
        expected *= shape[i];
    }
    *n = (size_t)expected;
    return contiguous || expected == 0;
}

/* Do the n elements fill their memory without gaps or overlaps, in whatever order? */
static int
is_dense(int ndim, const int64_t *shape, const int64_t *strides, size_t n)
{
    int64_t expected = 1;
    while ((size_t)expected < n) {
        int i = 0;
        while (i < ndim && (shape[i] == 1 || strides[i] != expected)) {
            i++;
        }
        if (i == ndim) {
            return 0;
        }
        expected *= shape[i];
    }
    return (size_t)expected == n;
}

ctpy_problem
ctpy_view_exchange(const ctpy_dlpack_api *api, PyObject *op, ctpy_view *view)
{
    ctpy_dl_tensor t;
    if (api->tensor_from_object(op, &t) != 0) {
        return CTPY_PROBLEM_ADDRESS;
    }
    const bool on_cuda = t.device_type == CTPY_DL_CUDA;
    if (t.device_type != CTPY_DL_CPU && t.device_type != CTPY_DL_CUDA_HOST &&
        !on_cuda) {
        return CTPY_PROBLEM_DEVICE;
    }
    size_t n;
    int contiguous = is_contiguous(t.ndim, t.shape, t.strides, &n);
    *view = (ctpy_view){
        .span = {(char *)t.data + t.byte_offset, n, dtype_from_dlpack(&t)},
        .ndim = t.ndim,
        .shape = t.shape,
        .strides = contiguous ? NULL : t.strides,
        .on_cuda = on_cuda,
    };
    return ctpy_span_check(&view->span,
                           contiguous || is_dense(t.ndim, t.shape, t.strides, n));
}

/* 1 when str(op.name) is expected, 0 when not, -1 with an exception. */
static int
attribute_is(PyObject *op, const char *name, const char *expected)
{
    int answer = -1;
    PyObject *value = PyObject_GetAttrString(op, name);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    if (text != NULL) {
        answer = PyUnicode_CompareWithASCIIString(text, expected) == 0;
    }
    Py_XDECREF(text);
    Py_XDECREF(value);
    return answer;
}

/* Calls op.name() and reads an integer; -1 with an exception on failure. */
static int64_t
call_integer(PyObject *op, const char *name)
{
    PyObject *value = PyObject_CallMethod(op, name, NULL);
    int64_t n = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    return n;
}

static ct_dtype
dtype_from_torch(PyObject *op)
{
    for (int d = 0; d < CT_DTYPE_COUNT; d++) {
        char name[32];
        PyOS_snprintf(name, sizeof name, "torch.%s", ct_dtype_name((ct_dtype)d));
        int same = attribute_is(op, "dtype", name);
        if (same != 0) {
            return same < 0 ? CT_DTYPE_COUNT : (ct_dtype)d;
        }
    }
    return CT_DTYPE_COUNT;
}

ctpy_problem
ctpy_view_methods(PyObject *op, ctpy_view *view)
{
    int on_cpu = attribute_is(op, "device", "cpu");
    int strided = on_cpu < 1 ? on_cpu : attribute_is(op, "layout", "torch.strided");
    if (on_cpu < 0 || strided < 0) {
        return CTPY_PROBLEM_ADDRESS;
    }
    if (!on_cpu || !strided) {
        return on_cpu ? CTPY_PROBLEM_ADDRESS : CTPY_PROBLEM_DEVICE;
    }
    int64_t contiguous = call_integer(op, "is_contiguous");
    int64_t n = contiguous < 0 ? -1 : call_integer(op, "numel");
    int64_t ndim = n < 0 ? -1 : call_integer(op, "dim");
    PyObject *address = ndim < 0 ? NULL : PyObject_CallMethod(op, "data_ptr", NULL);
    void *data = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    if (PyErr_Occurred()) {
        return CTPY_PROBLEM_ADDRESS;
    }
    *view = (ctpy_view){
        .span = {data, (size_t)n, dtype_from_torch(op)},
          .ndim = (int)ndim
    };
    return PyErr_Occurred() ? CTPY_PROBLEM_ADDRESS
                            : ctpy_span_check(&view->span, contiguous == 1);
}
