/* One memory serves both passes of a part: the residual of this rank's quantized terms
 * is added to the sum before quantization, and then holds the error of both.
 */
#include "core/bmuf/quantized.h"

#include "math/quantized.h"

/* The elements are divided into parts of whole quantization blocks, a part for each
 * rank; the last parts may be shorter or empty. A part is sent as scales, then
 * quantized values. */
typedef struct coding {
    ct_bmuf *bmuf;
    ct_comm *comm;
    int bits;
    size_t part;         /* elements */
    size_t values_begin; /* bytes before a part's quantized values */
    size_t part_bytes;
    ct_span terms;
    float *residual;
    char *sent, *received;
} coding;

static ct_status
lay_out(coding *c, ct_error *err)
{
    const size_t ranks = (size_t)c->comm->world_size;
    const size_t blocks = (ct_quantized_blocks(c->terms.n) + ranks - 1) / ranks;
    c->part = blocks * CT_QUANTIZED_BLOCK;
    c->values_begin = blocks * sizeof(float);
    c->part_bytes = c->values_begin + ct_quantized_bytes(c->part, c->bits);
    const size_t bytes = c->part_bytes * ranks;
    ct_status status = c->bmuf->device->scratch_grow(&c->bmuf->wire, 2 * bytes, err);
    c->sent = c->bmuf->wire.data;
    c->received = c->sent + bytes;
    return status;
}

static ct_span
part_of(const coding *c, int rank)
{
    const size_t n = c->terms.n, at = (size_t)rank * c->part, begin = at < n ? at : n;
    const size_t left = n - begin;
    return (ct_span){
        .data = (char *)c->terms.data + begin * ct_dtype_size(c->terms.dtype),
        .n = left < c->part ? left : c->part,
        .dtype = c->terms.dtype,
    };
}

/* Quantizes a part, and updates the residual. */
static ct_status
encode_part(const coding *c, int rank, char *to, ct_error *err)
{
    const size_t at = (size_t)rank * c->part;
    const ct_span values = part_of(c, rank);
    void *scales = to;
    const ct_encoding encoding = {
        .values = values,
        .residual = values.n == 0 ? c->residual : c->residual + at,
        .quantized = (int8_t *)to + c->values_begin,
        .scales = scales,
        .bits = c->bits,
    };
    return values.n == 0 ? CT_OK
                         : c->bmuf->device->encode(c->bmuf->stream, &encoding, err);
}

/* Sums `parts` quantized parts, one behind the other, into the terms. */
static ct_status
decode_part(const coding *c, int rank, const char *from, size_t parts, ct_error *err)
{
    const void *scales = from;
    const ct_decoding decoding = {
        .values = part_of(c, rank),
        .quantized = (const int8_t *)from + c->values_begin,
        .scales = scales,
        .parts = parts,
        .part_bytes = c->part_bytes,
        .factor = 1.0f,
        .bits = c->bits,
    };
    return decoding.values.n == 0
               ? CT_OK
               : c->bmuf->device->decode(c->bmuf->stream, &decoding, err);
}

/* Sends every part to the summing rank. */
static ct_status
scatter(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->part_bytes;
    const ct_span in = {c->sent, bytes * (size_t)ranks, CT_U8};
    const ct_span out = {c->received, in.n, CT_U8};
    ct_status status = CT_OK;
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = encode_part(c, rank, c->sent + (size_t)rank * bytes, err);
    }
    if (status == CT_OK) {
        status = ct_comm_all_to_all(c->comm, &out, &in, err);
    }
    return status == CT_OK
               ? decode_part(c, c->comm->rank, c->received, (size_t)ranks, err)
               : status;
}

/* Sends the quantized sums to all ranks. */
static ct_status
gather(const coding *c, ct_error *err)
{
    const int ranks = c->comm->world_size;
    const size_t bytes = c->part_bytes;
    const ct_span in = {c->sent, bytes, CT_U8};
    const ct_span out = {c->received, bytes * (size_t)ranks, CT_U8};
    ct_status status = encode_part(c, c->comm->rank, c->sent, err);
    if (status == CT_OK) {
        status = ct_comm_all_gather(c->comm, &out, &in, err);
    }
    for (int rank = 0; status == CT_OK && rank < ranks; rank++) {
        status = decode_part(c, rank, c->received + (size_t)rank * bytes, 1, err);
    }
    return status;
}

ct_status
ct_bmuf_sum_quantized(ct_bmuf *b, ct_comm *comm, const ct_span *terms, ct_error *err)
{
    coding c = {
        .bmuf = b,
        .comm = comm,
        .bits = b->config.delta_bits,
        .terms = *terms,
        .residual = b->residual.memory[terms->dtype].data,
    };
    ct_status status = lay_out(&c, err);
    if (status == CT_OK) {
        status = scatter(&c, err);
    }
    return status == CT_OK ? gather(&c, err) : status;
}
