/* A NumPy array's memory, read in place through the structure that NumPy's ABI fixes:
 * that takes none of its functions, hence no import of its table. */
#include "binding/runtime/buffer.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarraytypes.h>

static ct_dtype
dtype_from_numpy(PyArrayObject *array)
{
    if (PyArray_DESCR(array)->byteorder == NPY_OPPBYTE) {
        return CT_DTYPE_COUNT;
    }
    switch (PyArray_TYPE(array)) {
    case NPY_FLOAT:
        return CT_F32;
    case NPY_DOUBLE:
        return CT_F64;
    case NPY_HALF:
        return CT_F16;
    case NPY_BYTE:
        return CT_I8;
    case NPY_SHORT:
        return CT_I16;
    case NPY_INT:
        return CT_I32;
    case NPY_LONG:
        return sizeof(long) == 8 ? CT_I64 : CT_I32;
    case NPY_LONGLONG:
        return CT_I64;
    case NPY_UBYTE:
        return CT_U8;
    case NPY_BOOL:
        return CT_BOOL;
    default:
        return CT_DTYPE_COUNT;
    }
}

ctpy_problem
ctpy_view_array(PyObject *op, ctpy_view *view)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "shapes are read in place");
    PyArrayObject *array = (PyArrayObject *)op;
    size_t n = 1;
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        n *= (size_t)PyArray_DIM(array, i);
    }
    *view = (ctpy_view){
        .span = {PyArray_DATA(array), n, dtype_from_numpy(array)},
        .ndim = PyArray_NDIM(array),
        .shape = (const int64_t *)PyArray_DIMS(array),
        .readonly = !PyArray_CHKFLAGS(array, NPY_ARRAY_WRITEABLE),
    };
    return ctpy_span_check(&view->span,
                           PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS));
}
