/* Whether all ranks come to the same unit: asked where collectives are compared. */
#include "binding/fsdp.h"

int
fsdp_check_order(FSDPUnit *self, const char *what)
{
    if (!ctpy_comm_wants_comparison()) {
        return 0;
    }
    PyObject *text = PyUnicode_FromString(what);
    PyObject *answer =
        text == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str__check_order, &text, 1);
    Py_XDECREF(answer);
    Py_XDECREF(text);
    return answer == NULL ? -1 : 0;
}
