#include "core/ct_fsdp_codes.h"

#include "math/ct_codes_math.h"

/* What is sent of n elements: scales, then codes, up to a whole number of scales. */
typedef struct layout {
    size_t codes, bytes;
} layout;

/* Where a collective's codes lie, and the zeros that an encoding without memory of
 * earlier ones adds and overwrites. */
typedef struct room {
    ct_scratch memory;
    char *sent, *received;
    float *blank;
} room;

enum {
    ALIGN = 8
};

bool
ct_fsdp_codes_known(int bits)
{
    return bits == 8 || bits == 4;
}

static layout
lay_out(size_t n, int bits)
{
    layout l = {.codes = ct_codes_blocks(n) * sizeof(float)};
    l.bytes = (l.codes + (n * (size_t)bits + 7) / 8 + ALIGN - 1) / ALIGN * ALIGN;
    return l;
}

size_t
ct_fsdp_codes_bytes(size_t n, int bits)
{
    return lay_out(n, bits).bytes;
}

/* blank: elements of it. The memory's end is what collectives send, at their start. */
static ct_status
room_open(room *r, const ct_device *device, size_t sent, size_t received, size_t blank,
          ct_error *err)
{
    const size_t floats = (blank * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN;
    *r = (room){
        .memory = {NULL, 0}
    };
    ct_status status =
        device->scratch_grow(&r->memory, floats + sent + received + 1, err);
    if (status == CT_OK) {
        r->blank = r->memory.data;
        r->sent = (char *)r->memory.data + floats;
        r->received = r->sent + sent;
    }
    return status;
}

/* residual NULL: nothing is added, and what is missed is forgotten. */
static ct_status
encode(const ct_fsdp_coder *coder, const room *r, const ct_span *values,
       float *residual, void *to, ct_error *err)
{
    const ct_encoding encoding = {
        .values = *values,
        .residual = residual != NULL ? residual : r->blank,
        .codes = (int8_t *)to + lay_out(values->n, coder->bits).codes,
        .scales = to,
        .bits = coder->bits,
    };
    if (residual == NULL) {
        const ct_span blank = {r->blank, values->n, CT_F32};
        ct_status status = coder->device->zero(coder->stream, &blank, 1, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return coder->device->encode(coder->stream, &encoding, err);
}

/* The sum of `parts` ranks' codes times factor. */
static ct_status
decode(const ct_fsdp_coder *coder, const ct_span *values, const void *from,
       size_t parts, float factor, ct_error *err)
{
    const layout l = lay_out(values->n, coder->bits);
    const ct_decoding decoding = {
        .values = *values,
        .codes = (const int8_t *)from + l.codes,
        .scales = from,
        .parts = parts,
        .part_bytes = l.bytes,
        .factor = factor,
        .bits = coder->bits,
    };
    return coder->device->decode(coder->stream, &decoding, err);
}

ct_status
ct_fsdp_gather_codes(const ct_fsdp_coder *coder, const ct_span *full,
                     const ct_span *shard, ct_error *err)
{
    ct_comm *comm = coder->comm;
    const size_t ranks = (size_t)comm->world_size;
    const size_t bytes = lay_out(shard->n, coder->bits).bytes;
    room r;
    ct_status status =
        room_open(&r, coder->device, bytes, bytes * ranks, shard->n, err);
    if (status == CT_OK) {
        status = encode(coder, &r, shard, NULL, r.sent, err);
    }
    if (status == CT_OK) {
        status = ct_comm_follow(comm, coder->stream, err);
    }
    if (status == CT_OK) {
        const ct_span in = {r.sent, bytes, CT_U8};
        const ct_span out = {r.received, bytes * ranks, CT_U8};
        status = comm->ops->all_gather(comm, &out, &in, err);
    }
    for (size_t rank = 0; status == CT_OK && rank < ranks; rank++) {
        const ct_span part = ct_span_part(*full, rank * shard->n, shard->n);
        status = decode(coder, &part, r.received + rank * bytes, 1, 1.0F, err);
    }
    coder->device->scratch_release(&r.memory);
    return status;
}

ct_status
ct_fsdp_reduce_codes(const ct_fsdp_coder *coder, const ct_span *part,
                     const ct_span *whole, float *residual, float factor, ct_error *err)
{
    ct_comm *comm = coder->comm;
    const size_t ranks = (size_t)comm->world_size, n = part->n;
    const size_t bytes = lay_out(n, coder->bits).bytes;
    room r;
    ct_status status = room_open(&r, coder->device, bytes * ranks, bytes * ranks,
                                 residual == NULL ? n : 0, err);
    for (size_t rank = 0; status == CT_OK && rank < ranks; rank++) {
        const ct_span values = ct_span_part(*whole, rank * n, n);
        float *missed = residual == NULL ? NULL : residual + rank * n;
        status = encode(coder, &r, &values, missed, r.sent + rank * bytes, err);
    }
    if (status == CT_OK) {
        status = ct_comm_follow(comm, coder->stream, err);
    }
    if (status == CT_OK) {
        const ct_span in = {r.sent, bytes * ranks, CT_U8};
        const ct_span out = {r.received, bytes * ranks, CT_U8};
        status = comm->ops->all_to_all(comm, &out, &in, err);
    }
    if (status == CT_OK) {
        status = decode(coder, part, r.received, ranks, factor, err);
    }
    coder->device->scratch_release(&r.memory);
    return status;
}
