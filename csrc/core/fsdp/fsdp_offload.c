#include "core/fsdp/fsdp_offload.h"

#include "core/base/alloc.h"

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

ct_status
ct_fsdp_place(ct_fsdp *unit, const ct_span *shard, ct_span *here, ct_error *err)
{
    ct_scratch *staging = &unit->ledger->staging;
    ct_status status = CT_OK;
    *here = *shard;
    if (unit->config.offload) {
        status = unit->device->scratch_grow(staging, bytes_of(shard), err);
        here->data = staging->data;
    }
    return status;
}

ct_status
ct_fsdp_bring_up(ct_fsdp *unit, const ct_span *shard, ct_span *here, ct_error *err)
{
    const ct_status status = ct_fsdp_place(unit, shard, here, err);
    return status != CT_OK || !unit->config.offload
               ? status
               : unit->device->transfer(unit->stream, here->data, shard->data,
                                        bytes_of(shard), err);
}

static ct_status
add_down(const ct_fsdp *unit, const ct_span *shard, const ct_span *here, ct_error *err)
{
    const size_t bytes = bytes_of(shard);
    const ct_span down = {ct_alloc(bytes + 1), shard->n, shard->dtype};
    if (down.data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a gradient of %zu bytes", bytes);
    }
    ct_status status =
        unit->device->transfer(unit->stream, down.data, here->data, bytes, err);
    if (status == CT_OK) {
        status = ct_device_cpu.add(NULL, shard, &down, 1, 1.0, err);
    }
    ct_free(down.data);
    return status;
}

ct_status
ct_fsdp_bring_down(ct_fsdp *unit, const ct_span *shard, const ct_span *here, bool add,
                   ct_error *err)
{
    if (!unit->config.offload) {
        return CT_OK;
    }
    return add ? add_down(unit, shard, here, err)
               : unit->device->transfer(unit->stream, shard->data, here->data,
                                        bytes_of(shard), err);
}

void
ct_fsdp_ledger_close(ct_fsdp_ledger *ledger, const ct_device *device)
{
    ct_spares_close(&ledger->spares);
    device->scratch_release(&ledger->staging);
    device->scratch_release(&ledger->zero);
}
