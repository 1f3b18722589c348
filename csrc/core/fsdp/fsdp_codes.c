#include "core/fsdp/fsdp_codes.h"

#include "core/base/alloc.h"
#include "core/fsdp/fsdp_presence.h"
#include "math/codes.h"

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

/* The sum of `parts` ranks' codes, each part_bytes behind the one before, times factor.
 */
static ct_status
decode(const ct_fsdp_coder *coder, const ct_span *values, const void *from,
       size_t parts, size_t part_bytes, float factor, ct_error *err)
{
    const layout l = lay_out(values->n, coder->bits);
    const ct_decoding decoding = {
        .values = *values,
        .codes = (const int8_t *)from + l.codes,
        .scales = from,
        .parts = parts,
        .part_bytes = part_bytes,
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
        status = decode(coder, &part, r.received + rank * bytes, 1, bytes, 1.0F, err);
    }
    coder->device->scratch_release(&r.memory);
    return status;
}

/* ---- gradients ---------------------------------------------------------------------
 */

/* Between `blank` and the residual, for the parameters that are there or for those that
 * are missing; `from` is where the residual begins in the group. */
typedef struct leftovers {
    const ct_fsdp_presence *presence;
    ct_span residual;
    float *blank;
    size_t from;
} leftovers;

static ct_status
clear_missing(const ct_fsdp_coder *coder, const leftovers *l, ct_error *err)
{
    const ct_span blank = {l->blank, l->residual.n, CT_F32};
    ct_status status = coder->device->copy(coder->stream, &blank, &l->residual, 1, err);
    for (size_t i = 0; status == CT_OK && i < l->presence->n; i++) {
        const ct_fsdp_param *param = &l->presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, l->from, blank.n, &at);
        const ct_span piece = ct_span_part(blank, at, n);
        status = param->there || n == 0
                     ? CT_OK
                     : coder->device->zero(coder->stream, &piece, 1, err);
    }
    return status;
}

static ct_status
keep_there(const ct_fsdp_coder *coder, const leftovers *l, ct_error *err)
{
    const ct_span blank = {l->blank, l->residual.n, CT_F32};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < l->presence->n; i++) {
        const ct_fsdp_param *param = &l->presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, l->from, blank.n, &at);
        const ct_span to = ct_span_part(l->residual, at, n);
        const ct_span piece = ct_span_part(blank, at, n);
        status = !param->there || n == 0
                     ? CT_OK
                     : coder->device->copy(coder->stream, &to, &piece, 1, err);
    }
    return status;
}

/* One rank's part. The residual of what is missing would reach the sum of a parameter
 * that nobody has a gradient of; it waits for the next one. */
static ct_status
encode_part(const ct_fsdp_coder *coder, const room *r, const ct_span *values,
            const leftovers *l, void *to, ct_error *err)
{
    if (l->residual.data == NULL || ct_fsdp_is_complete(l->presence)) {
        return encode(coder, r, values, l->residual.data, to, err);
    }
    ct_status status = clear_missing(coder, l, err);
    if (status == CT_OK) {
        status = encode(coder, r, values, l->blank, to, err);
    }
    return status == CT_OK ? keep_there(coder, l, err) : status;
}

/* Bits behind the codes for every rank; zeros where nothing is missing here. */
static ct_status
send_bits(const ct_fsdp_coder *coder, const ct_fsdp_presence *presence,
          unsigned char *bits, char *to, size_t stride, ct_error *err)
{
    const ct_device *device = coder->device;
    const size_t bytes = ct_fsdp_bits_bytes(presence);
    const bool complete = ct_fsdp_is_complete(presence);
    ct_status status = CT_OK;
    ct_fsdp_put_bits(presence, bits);
    for (int rank = 0; status == CT_OK && rank < coder->comm->world_size; rank++) {
        const ct_span here = {to + (size_t)rank * stride, bytes, CT_U8};
        status = complete
                     ? device->zero(coder->stream, &here, 1, err)
                     : device->transfer(coder->stream, here.data, bits, bytes, err);
    }
    return status;
}

static ct_status
receive_bits(const ct_fsdp_coder *coder, ct_fsdp_presence *presence,
             unsigned char *bits, const char *from, size_t stride, ct_error *err)
{
    ct_status status = CT_OK;
    for (int rank = 0; status == CT_OK && !ct_fsdp_is_complete(presence) &&
                       rank < coder->comm->world_size;
         rank++) {
        status =
            coder->device->transfer(coder->stream, bits, from + (size_t)rank * stride,
                                    ct_fsdp_bits_bytes(presence), err);
        if (status == CT_OK) {
            ct_fsdp_take_bits(presence, bits);
        }
    }
    return status;
}

ct_status
ct_fsdp_reduce_codes(const ct_fsdp_coder *coder, const ct_span *part,
                     const ct_span *whole, float *residual, ct_fsdp_presence *presence,
                     float factor, ct_error *err)
{
    ct_comm *comm = coder->comm;
    const size_t ranks = (size_t)comm->world_size, n = part->n;
    const size_t codes = lay_out(n, coder->bits).bytes;
    const size_t told = presence == NULL ? 0 : ct_fsdp_bits_bytes(presence);
    const size_t bytes = codes + told;
    const bool blank = residual == NULL || !ct_fsdp_is_complete(presence);
    room r;
    unsigned char *bits = ct_alloc(told + 1);
    ct_status status =
        room_open(&r, coder->device, bytes * ranks, bytes * ranks, blank ? n : 0, err);
    if (status == CT_OK && bits == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory for the bits of %zu bytes", told);
    }
    for (size_t rank = 0; status == CT_OK && rank < ranks; rank++) {
        const ct_span values = ct_span_part(*whole, rank * n, n);
        float *missed = residual == NULL ? NULL : residual + rank * n;
        const leftovers l = {
            presence, {missed, n, CT_F32},
             r.blank, rank * n
        };
        status = encode_part(coder, &r, &values, &l, r.sent + rank * bytes, err);
    }
    if (status == CT_OK && presence != NULL) {
        status = send_bits(coder, presence, bits, r.sent + codes, bytes, err);
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
        status = decode(coder, part, r.received, ranks, bytes, factor, err);
    }
    if (status == CT_OK && presence != NULL) {
        status = receive_bits(coder, presence, bits, r.received + codes, bytes, err);
    }
    coder->device->scratch_release(&r.memory);
    ct_free(bits);
    return status;
}
