#include "core/ct_codec_codes.h"

#include "core/ct_alloc.h"
#include "math/ct_codes_math.h"

/* Of a bucket: what is remembered, and behind it what is sent and what comes. */
typedef struct coded_bucket {
    ct_scratch memory;
    bool ready; /* nothing is remembered before the first pass */
} coded_bucket;

typedef struct codes_codec {
    ct_codec base; /* first: a ct_codec * of ours is a codes_codec * */
    const ct_device *device;
    void *stream;
    size_t n_buckets;
    coded_bucket buckets[];
} codes_codec;

/* Where what lies, in bytes. */
typedef struct layout {
    size_t codes; /* within a part, behind its scales */
    size_t part;
    size_t sent, received, all;
} layout;

enum {
    ALIGN = 8
};

static layout
lay_out(size_t n, int world_size)
{
    layout l = {.codes = ct_codes_blocks(n) * sizeof(float)};
    l.part = (l.codes + n + ALIGN - 1) / ALIGN * ALIGN;
    l.sent = (n * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN;
    l.received = l.sent + l.part;
    l.all = l.received + l.part * (size_t)world_size;
    return l;
}

static ct_status
make_ready(codes_codec *self, coded_bucket *b, size_t bytes, ct_error *err)
{
    if (b->ready) {
        return CT_OK;
    }
    ct_status status = self->device->scratch_grow(&b->memory, bytes + 1, err);
    if (status == CT_OK) {
        const ct_span all = {b->memory.data, bytes, CT_U8};
        status = self->device->zero(self->stream, &all, 1, err);
    }
    b->ready = status == CT_OK;
    return status;
}

static void *
place_in(const coded_bucket *b, size_t bytes)
{
    return (char *)b->memory.data + bytes;
}

static ct_status
codes_start(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_work **work,
            ct_error *err)
{
    codes_codec *self = (codes_codec *)codec;
    coded_bucket *b = &self->buckets[parcel->bucket];
    const layout l = lay_out(parcel->flat.n, comm->world_size);
    ct_status status = make_ready(self, b, l.all, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_encoding encoding = {.values = parcel->flat,
                                  .residual = place_in(b, 0),
                                  .codes = place_in(b, l.sent + l.codes),
                                  .scales = place_in(b, l.sent),
                                  .bits = 8};
    const ct_request gather = {
        .what = CT_ALL_GATHER,
        .in = {place_in(b, l.sent),     l.part,             CT_U8},
        .out = {place_in(b, l.received), l.all - l.received, CT_U8},
    };
    status = self->device->encode(self->stream, &encoding, err);
    return status == CT_OK ? ct_comm_start(comm, &gather, work, err) : status;
}

static ct_status
codes_finish(ct_codec *codec, ct_comm *comm, const ct_parcel *parcel, ct_error *err)
{
    codes_codec *self = (codes_codec *)codec;
    const layout l = lay_out(parcel->flat.n, comm->world_size);
    const coded_bucket *b = &self->buckets[parcel->bucket];
    const ct_decoding decoding = {
        .values = parcel->flat,
        .codes = place_in(b, l.received + l.codes),
        .scales = place_in(b, l.received),
        .parts = (size_t)comm->world_size,
        .part_bytes = l.part,
        .factor = 1.0f / (float)comm->world_size,
        .bits = 8,
    };
    return self->device->decode(self->stream, &decoding, err);
}

static void
codes_free(ct_codec *codec)
{
    codes_codec *self = (codes_codec *)codec;
    for (size_t b = 0; b < self->n_buckets; b++) {
        self->device->scratch_release(&self->buckets[b].memory);
    }
    ct_free(self);
}

static const ct_codec_ops codes_ops = {
    .name = "int8", .start = codes_start, .finish = codes_finish, .free = codes_free};

ct_status
ct_codec_codes_new(ct_codec **codec, const ct_device *device, void *stream,
                   size_t n_buckets, ct_error *err)
{
    codes_codec *made =
        ct_calloc(1, sizeof *made + (n_buckets + 1) * sizeof made->buckets[0]);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to compress %zu buckets", n_buckets);
    }
    made->base.ops = &codes_ops;
    made->device = device;
    made->stream = stream;
    made->n_buckets = n_buckets;
    *codec = &made->base;
    return CT_OK;
}
