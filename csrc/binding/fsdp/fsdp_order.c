/* Whether all ranks come to the same unit: asked where collectives are compared, and
 * the backend, NCCL, does not do so itself. */
#include "binding/fsdp/unit.h"

int
fsdp_check_order(FSDPUnit *self, const char *what)
{
    const ct_comm *comm = ((const Communicator *)self->communicator)->comm;
    const int compares = comm != NULL && comm->ops->takes_device_memory
                             ? ctpy_comm_wants_comparison()
                             : 0;
    if (compares < 1) {
        return compares;
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
