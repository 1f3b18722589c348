#include "core/ddp/codec.h"

#include "core/base/alloc.h"

#include <math.h>

typedef struct half_codec {
    ct_codec base; /* first: a ct_codec * of ours is a half_codec * */
    const ct_device *device;
    void *stream;
    ct_dtype dtype;
    size_t n_buckets;
    ct_scratch packs[]; /* by bucket: what travels */
} half_codec;

static bool
is_half_already(const ct_span *flat)
{
    return ct_dtype_size(flat->dtype) <= 2;
}

static ct_span
pack_of(const half_codec *self, const ct_parcel *parcel)
{
    return (ct_span){self->packs[parcel->bucket].data, parcel->flat.n, self->dtype};
}

static ct_status
half_start(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_work **work,
           ct_error *err)
{
    half_codec *self = (half_codec *)codec;
    const ct_device *device = self->device;
    if (is_half_already(&parcel->flat)) {
        return ct_codec_whole.ops->start(&ct_codec_whole, comm, parcel, work, err);
    }
    ct_status status =
        device->scratch_grow(&self->packs[parcel->bucket], 2 * parcel->flat.n + 1, err);
    if (status == CT_OK) {
        status = device->scale(self->stream, 1.0 / comm->world_size, (double)INFINITY,
                               &parcel->flat, 1, err);
    }
    const ct_span pack = pack_of(self, parcel);
    if (status == CT_OK) {
        status = device->copy(self->stream, &pack, &parcel->flat, 1, err);
    }
    const ct_request sum = ct_parcel_request(parcel, &pack, CT_REDUCE_SUM);
    return status == CT_OK ? ct_comm_start(comm, &sum, work, err) : status;
}

static ct_status
half_finish(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_error *err)
{
    half_codec *self = (half_codec *)codec;
    const ct_span pack = pack_of(self, parcel);
    const bool is_owned = parcel->owner != CT_EVERY_RANK;
    ct_status status = CT_OK;
    if (is_half_already(&parcel->flat)) {
        return status;
    }
    if (!is_owned || parcel->owner == comm->rank) {
        status = self->device->copy(self->stream, &parcel->flat, &pack, 1, err);
    }
    if (is_owned) { /* whose gradients leave no memory behind */
        self->device->scratch_release(&self->packs[parcel->bucket]);
    }
    return status;
}

static void
half_free(ct_codec *codec)
{
    half_codec *self = (half_codec *)codec;
    for (size_t b = 0; b < self->n_buckets; b++) {
        self->device->scratch_release(&self->packs[b]);
    }
    ct_free(self);
}

static const ct_codec_ops half_ops = {
    .start = half_start, .finish = half_finish, .free = half_free};

ct_status
ct_codec_half_new(ct_codec **codec, const ct_device *device, void *stream,
                  ct_dtype dtype, size_t n_buckets, ct_error *err)
{
    half_codec *made =
        ct_calloc(1, sizeof *made + (n_buckets + 1) * sizeof made->packs[0]);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to compress %zu buckets", n_buckets);
    }
    made->base.ops = &half_ops;
    made->device = device;
    made->stream = stream;
    made->dtype = dtype;
    made->n_buckets = n_buckets;
    *codec = &made->base;
    return CT_OK;
}
