/* The one place where a core status becomes a Python exception. */
#include "binding/runtime/ctpy.h"

#include <string.h>

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

/* Sets the exception from the message, in which names of files and what files hold may
 * be no UTF-8, or cut within a character. */
static void
set_error(PyObject *type, int os_error, const char *message)
{
    PyObject *text =
        PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "backslashreplace");
    PyObject *value = text;
    if (text != NULL && os_error != 0) {
        value = Py_BuildValue("(iN)", os_error, text);
    }
    if (value != NULL) {
        PyErr_SetObject(type, value);
        Py_DECREF(value);
    }
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
    set_error(exception_borrow(err->code), err->code == CT_EIO ? err->os_error : 0,
              err->message);
    return NULL;
}

int
ctpy_raise_int(const ct_error *err)
{
    (void)ctpy_raise(err);
    return -1;
}
