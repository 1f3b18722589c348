/* Which unit's turn is next, and its gather, which begins while another one computes.
 */
#include "binding/fsdp/unit.h"

/* ---- the order ---------------------------------------------------------------------
 */

void
fsdp_order_begin(fsdp_order *order)
{
    Py_XSETREF(order->before, order->now);
    order->now = NULL;
}

void
fsdp_order_forget(fsdp_order *order)
{
    Py_CLEAR(order->before);
    Py_CLEAR(order->now);
}

static PyObject *
last_borrow(PyObject *list)
{
    const Py_ssize_t n = list == NULL ? 0 : PyList_GET_SIZE(list);
    return n == 0 ? NULL : PyList_GET_ITEM(list, n - 1);
}

int
fsdp_order_reach(FSDPUnit *self, fsdp_order *order)
{
    if (last_borrow(order->now) == (PyObject *)self) {
        return 0;
    }
    if (!self->core.begun) {
        fsdp_drop_prefetches(fsdp_root_borrow(self));
    }
    if (order->now == NULL) {
        order->now = PyList_New(0);
    }
    return order->now == NULL ? -1 : PyList_Append(order->now, (PyObject *)self);
}

/* NULL where the pass before ended here, or was at another unit. */
static FSDPUnit *
next_borrow(const fsdp_order *order)
{
    const Py_ssize_t n = order->now == NULL ? 0 : PyList_GET_SIZE(order->now);
    const bool goes_on =
        n != 0 && order->before != NULL && n < PyList_GET_SIZE(order->before) &&
        PyList_GET_ITEM(order->before, n - 1) == PyList_GET_ITEM(order->now, n - 1);
    return goes_on ? (FSDPUnit *)PyList_GET_ITEM(order->before, n) : NULL;
}

/* ---- gathers that have begun -------------------------------------------------------
 */

/* Codes are no collective that could be begun; without the other ranks there is nothing
 * to wait for. A unit that has gone to another root, or has no shards, is gathered when
 * it is needed, or says then what is wrong. */
static bool
can_begin(FSDPUnit *self, FSDPUnit *root)
{
    const ct_fsdp_config *config = &self->core.config;
    return !self->core.gathered && config->gather_bits == 0 && !config->lone_gather &&
           self->core.n_groups != 0 && self->shards != NULL &&
           fsdp_root_borrow(self) == root;
}

int
fsdp_prefetch(FSDPUnit *self, const fsdp_order *order)
{
    FSDPUnit *root = fsdp_root_borrow(self);
    FSDPUnit *next = next_borrow(order);
    if (next == NULL || root->ledger.begun != 0 || !can_begin(next, root)) {
        return 0;
    }
    Py_INCREF((PyObject *)next);
    const int result = fsdp_begin_gather(next);
    Py_DECREF((PyObject *)next);
    return result;
}

int
fsdp_end_prefetch(FSDPUnit *self)
{
    Communicator *communicator = (Communicator *)self->communicator;
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_fsdp_gather(&self->core, communicator->comm, NULL, &err);
    Py_END_ALLOW_THREADS
    communicator->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

void
fsdp_drop_prefetch(FSDPUnit *self)
{
    Communicator *communicator = (Communicator *)self->communicator;
    PyObject *type, *value, *trace;
    if (!self->core.begun) {
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    Py_BEGIN_ALLOW_THREADS
    ct_fsdp_cancel_gather(&self->core, communicator->comm);
    Py_END_ALLOW_THREADS
    communicator->busy--;
    PyErr_Restore(type, value, trace);
}

void
fsdp_drop_prefetches(FSDPUnit *root)
{
    PyObject *units = root->ledger.begun == 0 ? NULL : Py_XNewRef(root->units);
    const Py_ssize_t n = units == NULL ? 0 : PyList_GET_SIZE(units);
    for (Py_ssize_t i = 0; i < n; i++) {
        fsdp_drop_prefetch((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
}
