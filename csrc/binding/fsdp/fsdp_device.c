/* What a unit does on its device: memory there, tensors of it, and torch's stream. */
#include "binding/runtime/buffer.h"
#include "binding/optim/grads.h"
#include "binding/runtime/dlpack_abi.h"
#include "binding/fsdp/unit.h"
#include "binding/comm/memory.h"

static bool
is_on_cuda(const FSDPUnit *self)
{
    return self->core.device->dlpack == CTPY_DL_CUDA;
}

int
fsdp_span_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
               ct_span *span)
{
    return ctpy_span_on(fsdp_state_borrow(self), op, what, writable, is_on_cuda(self),
                        span);
}

int
fsdp_shard_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
                ct_span *span)
{
    return ctpy_span_on(fsdp_state_borrow(self), op, what, writable,
                        is_on_cuda(self) && !self->core.config.offload, span);
}

int
fsdp_use_stream(FSDPUnit *self)
{
    const ctpy_dlpack_api *api = fsdp_state_borrow(self)->dlpack;
    if (!is_on_cuda(self)) {
        return 0;
    }
    if (api == NULL || api->current_work_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this torch does not tell its current stream: sharding on a "
                        "GPU needs torch 2.10 or newer");
        return -1;
    }
    const int ordinal = ((MappedMemory *)self->full)->pages.ordinal;
    return api->current_work_stream(CTPY_DL_CUDA, ordinal, &self->core.stream);
}

PyObject *
fsdp_new_memory(FSDPUnit *self, PyObject *plugin, size_t bytes, int watched)
{
    const ctpy_state *state = fsdp_state_borrow(self);
    PyObject *args = Py_BuildValue("(n)", (Py_ssize_t)bytes);
    PyObject *kwargs = Py_BuildValue("{s:i,s:O}", "watched", watched, "plugin", plugin);
    PyObject *memory =
        args == NULL || kwargs == NULL
            ? NULL
            : PyObject_Call((PyObject *)state->MappedMemory, args, kwargs);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return memory;
}

/* New memory of the host is zeros; a device's is what it was. */
static ct_status
clear(FSDPUnit *self, ct_mapping *pages, ct_error *err)
{
    const ct_span all = {pages->data, pages->bytes, CT_U8};
    pages->stream = self->core.stream;
    const ct_status status = ct_mapping_obtain(pages, pages->bytes, NULL, err);
    return status != CT_OK || pages->ops == NULL
               ? status
               : self->core.device->zero(self->core.stream, &all, 1, err);
}

PyObject *
fsdp_new_zeros(FSDPUnit *self, PyObject *plugin, size_t bytes)
{
    ct_error err;
    PyObject *memory = fsdp_new_memory(self, plugin, bytes, 0);
    if (memory == NULL || fsdp_use_stream(self) < 0) {
        Py_XDECREF(memory);
        return NULL;
    }
    if (clear(self, &((MappedMemory *)memory)->pages, &err) != CT_OK) {
        Py_DECREF(memory);
        return ctpy_raise(&err);
    }
    return memory;
}

void
fsdp_discard_spares(FSDPUnit *root)
{
    Py_BEGIN_ALLOW_THREADS
    ct_spares_discard(&root->ledger.spares);
    Py_END_ALLOW_THREADS
}
