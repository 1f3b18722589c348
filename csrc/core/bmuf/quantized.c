#include "core/bmuf/quantized.h"

#include "math/quantized.h"

/* The elements are cut into parts of whole blocks, one for each rank, of which the last
 * may be shorter or empty. What travels of a part is its scales, then its codes. */
typedef struct layout {
    size_t n, part; /* elements */
    size_t codes;   /* bytes before a part's codes */
    size_t part_bytes;
} layout;

typedef struct coding {
    ct_bmuf *bmuf;
    ct_comm *comm;
    int bits;
    layout layout;
    ct_span shares;
    float *residual;
    char *sent, *received;
} coding;

static layout
lay_out(size_t n, int bits, int world_size)
{
    const size_t ranks = (size_t)world_size;
    const size_t blocks = (ct_quantized_blocks(n) + ranks - 1) / ranks;
    layout l = {.n = n, .part = blocks * CT_QUANTIZED_BLOCK};
    l.codes = blocks * sizeof(float);
    l.part_bytes = l.codes + ct_quantized_bytes(l.part, bits);
    return l;
}

static ct_status
reserve_wire(coding *c, ct_error *err)
{
    const size_t bytes = c->layout.part_bytes * (size_t)c->comm->world_size;
    ct_status status = c->bmuf->device->scratch_grow(&c->bmuf->wire, 2 * bytes, err);
    c->sent = c->bmuf->wire.data;
    c->received = c->sent + bytes;
    return status;
}

static ct_span
part_of(const coding *c, int rank)
{
    const layout *l = &c->layout;
    const size_t at = (size_t)rank * l->part, begin = at < l->n ? at : l->n;
    const size_t left = l->n - begin;
    return (ct_span){
        .data = (char *)c->shares.data + begin * ct_dtype_size(c->shares.dtype),
        .n = left < l->part ? left : l->part,
        .dtype = c->shares.dtype,
    };
}

/* A part's codes and scales, and what is missed. */
static ct_status
encode_part(const coding *c, int rank, char *to, ct_error *err)
{
    const size_t at = (size_t)rank * c->layout.part;
    const ct_span values = part_of(c, rank);
    void *scales = to;
    const ct_encoding encoding = {
        .values = values,
        .residual = values.n == 0 ? c->residual : c->residual + at,
        .codes = (int8_t *)to + c->layout.codes,
        .scales = scales,
        .bits = c->bits,
    };
    return values.n == 0 ? CT_OK
                         : c->bmuf->device->encode(c->bmuf->stream, &encoding, err);
}

/* The sum of so many parts, one behind the other. */
static ct_status
decode_part(const coding *c, int rank, const char *from, size_t parts, ct_error *err)
{
    const void *scales = from;
    const ct_decoding decoding = {
        .values = part_of(c, rank),
        .codes = (const int8_t *)from + c->layout.codes,
        .scales = scales,
        .parts = parts,
        .part_bytes = c->layout.part_bytes,
        .factor = 1.0f,
        .bits = c->bits,
    };
    return decoding.values.n == 0
               ? CT_OK
               : c->bmuf->device->decode(c->bmuf->stream, &decoding, err);
}

/* Every rank's codes of a part to who adds it up. */
static ct_status
scatter(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->layout.part_bytes;
    const ct_request scatter = {
        .what = CT_ALL_TO_ALL,
        .in = {c->sent,     bytes * (size_t)ranks, CT_U8},
        .out = {c->received, bytes * (size_t)ranks, CT_U8},
    };
    ct_status status = CT_OK;
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = encode_part(c, rank, c->sent + (size_t)rank * bytes, err);
    }
    if (status == CT_OK) {
        status = ct_comm_run(c->comm, &scatter, err);
    }
    return status == CT_OK
               ? decode_part(c, c->comm->rank, c->received, (size_t)ranks, err)
               : status;
}

/* Codes of the sums to all. What this rank's codes have missed of its part is sent
 * along: the memory is the same. */
static ct_status
gather(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->layout.part_bytes;
    const ct_request gather = {
        .what = CT_ALL_GATHER,
        .in = {c->sent,     bytes,                 CT_U8},
        .out = {c->received, bytes * (size_t)ranks, CT_U8},
    };
    ct_status status = encode_part(c, c->comm->rank, c->sent, err);
    if (status == CT_OK) {
        status = ct_comm_run(c->comm, &gather, err);
    }
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = decode_part(c, rank, c->received + (size_t)rank * bytes, 1, err);
    }
    return status;
}

ct_status
ct_bmuf_sum_coded(ct_bmuf *b, const ct_bmuf_config *config, ct_comm *comm,
                  const ct_bmuf_batch *s, ct_error *err)
{
    coding c = {
        .bmuf = b,
        .comm = comm,
        .bits = config->delta_bits,
        .layout = lay_out(s->n, config->delta_bits, comm->world_size),
        .shares = {s->shares, s->n, s->dtype},
        .residual = b->residual.memory[s->dtype].data,
    };
    ct_status status = reserve_wire(&c, err);
    if (status == CT_OK) {
        status = scatter(&c, err);
    }
    return status == CT_OK ? gather(&c, err) : status;
}
