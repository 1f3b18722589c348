/* One block of the host's memory has the operands and, behind them, the result. */
#include "core/comm/staged.h"

#include "core/base/alloc.h"

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

static ct_status
reserve(ct_staged *s, size_t bytes, ct_error *err)
{
    if (bytes <= s->bytes) {
        return CT_OK;
    }
    ct_staged_fini(s);
    s->host = ct_alloc(bytes);
    if (s->host == NULL) {
        return ct_fail(err, CT_ENOMEM,
                       "no memory for %zu bytes of a collective's operands", bytes);
    }
    s->bytes = bytes;
    return CT_OK;
}

static ct_status
run(ct_comm *comm, const ct_request *request, ct_error *err)
{
    ct_staged *s = (ct_staged *)comm;
    const size_t in = bytes_of(&request->in), out = bytes_of(&request->out);
    const size_t room = (in + 63) / 64 * 64;
    ct_request there = *request;
    ct_status status = reserve(s, room + out, err);
    if (status == CT_OK) {
        status = s->device->transfer(s->stream, s->host, request->in.data, in, err);
    }
    if (status != CT_OK) {
        return status;
    }
    there.in.data = s->host;
    there.out.data = out == 0 ? NULL : s->host + room;
    status = ct_comm_run(s->inner, &there, err);
    if (status != CT_OK) {
        return status;
    }
    return out == 0 ? s->device->transfer(s->stream, request->in.data, s->host, in, err)
                    : s->device->transfer(s->stream, request->out.data, there.out.data,
                                          out, err);
}

static const ct_comm_ops ops = {
    .name = "staged", .run = run, .takes_device_memory = true};

void
ct_staged_init(ct_staged *staged, ct_comm *inner, const ct_device *device, void *stream)
{
    *staged = (ct_staged){
        .base = ct_comm_made(&ops, inner->rank, inner->world_size),
        .inner = inner,
        .device = device,
        .stream = stream,
    };
    staged->base.names = inner->names;
    staged->base.label = inner->label;
}

void
ct_staged_fini(ct_staged *staged)
{
    ct_free(staged->host);
    staged->host = NULL;
    staged->bytes = 0;
}

ct_comm *
ct_comm_of_host(ct_comm *comm)
{
    return comm->ops == &ops        ? ((ct_staged *)comm)->inner
           : comm->owned_by != NULL ? comm->owned_by
                                    : comm;
}
