/* The one place where a core status becomes a Python exception. */
#include "binding/ctpy.h"

static PyObject *
exception_borrow(ct_status code)
{
    switch (code) {
    case CT_EINVAL:
        return PyExc_ValueError;
    case CT_EFLOAT:
        return PyExc_FloatingPointError;
    case CT_EIO:
        return PyExc_OSError;
    case CT_EDEVICE:
    case CT_ECOMM:
        return PyExc_RuntimeError;
    case CT_OK:
    case CT_ENOMEM:
    case CT_EHOST:
        break;
    }
    return PyExc_SystemError;
}

PyObject *
ctpy_raise(const ct_error *err)
{
    if (err->code == CT_EHOST && PyErr_Occurred()) {
        return NULL;
    }
    if (err->code == CT_ENOMEM) {
        return PyErr_NoMemory();
    }
    if (err->code == CT_EIO && err->os_error != 0) {
        PyObject *pair = Py_BuildValue("(is)", err->os_error, err->message);
        PyErr_SetObject(PyExc_OSError, pair);
        Py_XDECREF(pair);
        return NULL;
    }
    PyErr_SetString(exception_borrow(err->code), err->message);
    return NULL;
}

int
ctpy_raise_int(const ct_error *err)
{
    (void)ctpy_raise(err);
    return -1;
}
