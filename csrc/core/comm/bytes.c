/* Lengths are gathered first; an all_gather has equal parts. */
#include "core/comm/bytes.h"

#include "core/base/alloc.h"

#include <stdint.h>
#include <string.h>

void
ct_gathered_fini(ct_gathered *gathered)
{
    ct_free(gathered->data);
    ct_free(gathered->n);
    *gathered = (ct_gathered){0};
}

static ct_status
gather_lengths(ct_comm *comm, size_t n, ct_gathered *out, ct_error *err)
{
    int64_t mine = (int64_t)n;
    const size_t ranks = (size_t)comm->world_size;
    const ct_span in = {&mine, 1, CT_I64}, all = {out->n, ranks, CT_I64};
    ct_status status = ct_comm_all_gather(comm, &all, &in, err);
    for (size_t r = 0; status == CT_OK && r < ranks; r++) {
        out->stride = (size_t)out->n[r] > out->stride ? (size_t)out->n[r] : out->stride;
    }
    return status;
}

/* Room for every rank's bytes, and behind it for this rank's own, padded. */
static ct_status
gather_padded(ct_comm *comm, const void *data, size_t n, ct_gathered *out,
              ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    out->data = ct_calloc(ranks + 1, out->stride);
    if (out->data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu times %zu bytes", ranks + 1,
                       out->stride);
    }
    unsigned char *own = out->data + ranks * out->stride;
    if (n > 0) {
        memcpy(own, data, n);
    }
    const ct_span in = {own, out->stride, CT_U8};
    const ct_span all = {out->data, ranks * out->stride, CT_U8};
    return ct_comm_all_gather(comm, &all, &in, err);
}

ct_status
ct_comm_gather_bytes(ct_comm *comm, const void *data, size_t n, ct_gathered *out,
                     ct_error *err)
{
    *out = (ct_gathered){.n = ct_calloc((size_t)comm->world_size, sizeof *out->n)};
    ct_status status =
        out->n == NULL
            ? ct_fail(err, CT_ENOMEM, "no memory for %d lengths", comm->world_size)
            : gather_lengths(comm, n, out, err);
    if (status == CT_OK && out->stride > 0) {
        status = gather_padded(comm, data, n, out, err);
    }
    if (status != CT_OK) {
        ct_gathered_fini(out);
    }
    return status;
}
