/* Collectives of quantized values, between machines: the all-gather of parameters, and
 * the reduce-scatter of gradients with the bits of missing gradients. */
#include "core/fsdp/internal.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"

#include "math/quantized.h"

#include <string.h>

/* ---- the ranks of machines ------------------------------------------------------- */

static ct_status
run_across(const ct_fsdp *unit, ct_comm *comm, const ct_request *r, ct_error *err)
{
    return ct_comm_ranks_a_machine(comm) == 0
               ? ct_comm_enqueue(comm, r, unit->stream, err)
               : ct_comm_run_level(comm, true, r, err);
}

ct_status
ct_fsdp_run_within(ct_comm *comm, const ct_fsdp_levels *l, ct_collective what,
                   ct_reduce_op op, const ct_span *whole, ct_error *err)
{
    const size_t block = whole->n / l->machines;
    ct_status status = CT_OK;
    for (size_t m = 0; status == CT_OK && l->local > 1 && m < l->machines; m++) {
        const ct_span all = ct_span_part(*whole, m * block, block);
        const ct_span own = ct_fsdp_part_on(l, whole, m);
        const bool gathers = what == CT_ALL_GATHER;
        const ct_request r = {.what = what,
                              .op = op,
                              .in = gathers ? own : all,
                              .out = gathers ? all : own};
        status = ct_comm_run_level(comm, false, &r, err);
    }
    return status;
}

/* ---- quantized values ------------------------------------------------------------
 *
 * Quantized values are sent between machines alone. Gradients are summed within each
 * machine first; each sum is rounded once on its way to its owner, and the owner adds
 * in the machines' order. All ranks decode the same quantized parameters, also of their
 * own shard, so all ranks have equal parameters.
 *
 * Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant
 * Model Training", 2023. */

/* Buffers of one collective, in the ledger's memory; `blank` is the residual where none
 * is kept. */
typedef struct buffers {
    char *sent, *received;
    float *blank;
} buffers;

/* The message for n elements: scales, then values at `values`, in all `bytes`. */
typedef struct layout {
    size_t values, bytes;
} layout;

enum {
    ALIGN = 8
};

static layout
lay_out(size_t n, int bits)
{
    layout l = {.values = ct_quantized_blocks(n) * sizeof(float)};
    l.bytes = (l.values + (n * (size_t)bits + 7) / 8 + ALIGN - 1) / ALIGN * ALIGN;
    return l;
}

/* blank: elements of the blank residual. */
static ct_status
open_buffers(buffers *b, const ct_fsdp *unit, size_t sent, size_t received,
             size_t blank, ct_error *err)
{
    const size_t floats = (blank * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN;
    ct_fsdp_ledger *ledger = unit->ledger;
    ct_scratch *memory = &ledger->messages;
    double unused;
    ct_status status = CT_OK;
    *b = (buffers){.blank = NULL};
    if (memory->data != NULL && ledger->messages_stream != unit->stream) {
        /* Waits for the work on the last stream. */
        status =
            unit->device->read(ledger->messages_stream, memory->data, &unused, err);
    }
    if (status == CT_OK) {
        status = unit->device->scratch_grow(
            memory, floats + sent + received + sizeof unused, err);
    }
    if (status == CT_OK) {
        ledger->messages_stream = unit->stream;
        b->blank = memory->data;
        b->sent = (char *)memory->data + floats;
        b->received = b->sent + sent;
    }
    return status;
}

static void
close_buffers(const ct_fsdp *unit)
{
    if (unit->device == &ct_device_cpu) {
        unit->device->scratch_release(&unit->ledger->messages);
    }
}

/* residual NULL: the rounding error is dropped. */
static ct_status
encode(const ct_fsdp *unit, int bits, const buffers *b, const ct_span *values,
       float *residual, void *to, ct_error *err)
{
    const ct_encoding encoding = {
        .values = *values,
        .residual = residual != NULL ? residual : b->blank,
        .quantized = (int8_t *)to + lay_out(values->n, bits).values,
        .scales = to,
        .bits = bits,
    };
    if (residual == NULL) {
        const ct_span blank = {b->blank, values->n, CT_F32};
        ct_status status = unit->device->zero(unit->stream, &blank, 1, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return unit->device->encode(unit->stream, &encoding, err);
}

/* The sum of `parts` messages, part_bytes apart, times factor. */
static ct_status
decode(const ct_fsdp *unit, int bits, const ct_span *values, const void *from,
       size_t parts, size_t part_bytes, float factor, ct_error *err)
{
    const ct_decoding decoding = {
        .values = *values,
        .quantized = (const int8_t *)from + lay_out(values->n, bits).values,
        .scales = from,
        .parts = parts,
        .part_bytes = part_bytes,
        .factor = factor,
        .bits = bits,
    };
    return unit->device->decode(unit->stream, &decoding, err);
}

ct_status
ct_fsdp_gather_quantized(const ct_fsdp *unit, ct_comm *comm, const ct_span *full,
                         const ct_span *shard, ct_error *err)
{
    const int bits = unit->config.gather_bits;
    const ct_fsdp_levels l = ct_fsdp_levels_of(comm);
    const size_t bytes = lay_out(shard->n, bits).bytes, all = bytes * l.machines;
    buffers b;
    ct_status status = open_buffers(&b, unit, bytes, all, shard->n, err);
    if (status == CT_OK) {
        status = encode(unit, bits, &b, shard, NULL, b.sent, err);
    }
    if (status == CT_OK) {
        const ct_request request = {
            .what = CT_ALL_GATHER,
            .in = {b.sent,     bytes, CT_U8},
            .out = {b.received, all,   CT_U8},
        };
        status = run_across(unit, comm, &request, err);
    }
    for (size_t m = 0; status == CT_OK && m < l.machines; m++) {
        const ct_span part = ct_fsdp_part_on(&l, full, m);
        status = decode(unit, bits, &part, b.received + m * bytes, 1, bytes, 1.0F, err);
    }
    close_buffers(unit);
    return status == CT_OK
               ? ct_fsdp_run_within(comm, &l, CT_ALL_GATHER, CT_REDUCE_SUM, full, err)
               : status;
}

/* ---- missing gradients ----------------------------------------------------------- */

/* Whether this rank has all gradients; true for NULL. */
static bool
is_complete(const ct_fsdp_presence *presence)
{
    bool all = true;
    for (size_t i = 0; presence != NULL && all && i < presence->n; i++) {
        all = presence->params[i].there;
    }
    return all;
}

static size_t
bits_bytes(const ct_fsdp_presence *presence)
{
    return (presence->n + 63) / 64 * sizeof(uint64_t);
}

/* Appends to each of n messages a bit for each parameter, set where its gradient is
 * missing here. Zeros need no transfer, for which the host would wait. */
static ct_status
send_bits(const ct_fsdp *unit, size_t n, const ct_fsdp_presence *presence,
          unsigned char *bits, char *to, size_t stride, ct_error *err)
{
    const size_t bytes = bits_bytes(presence);
    const bool complete = is_complete(presence);
    ct_status status = CT_OK;
    memset(bits, 0, bytes);
    for (size_t i = 0; i < presence->n; i++) {
        bits[i / 8] |= (unsigned char)((unsigned)!presence->params[i].there << i % 8);
    }
    for (size_t m = 0; status == CT_OK && m < n; m++) {
        const ct_span here = {to + m * stride, bytes, CT_U8};
        status = complete ? unit->device->zero(unit->stream, &here, 1, err)
                          : unit->device->transfer(unit->stream, here.data, bits, bytes,
                                                   err);
    }
    return status;
}

static ct_status
receive_bits(const ct_fsdp *unit, size_t n, ct_fsdp_presence *presence,
             unsigned char *bits, const char *from, size_t stride, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t m = 0; status == CT_OK && !is_complete(presence) && m < n; m++) {
        status = unit->device->transfer(unit->stream, bits, from + m * stride,
                                        bits_bytes(presence), err);
        for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
            const bool missing = (bits[i / 8] >> i % 8 & 1) != 0;
            presence->params[i].there = presence->params[i].there || !missing;
        }
    }
    return status;
}

/* ---- quantized gradients --------------------------------------------------------- */

/* The residual of one rank's part, elements of the group from `from` on; residual.data
 * NULL: none is kept. */
typedef struct part_residual {
    const ct_fsdp_presence *presence;
    ct_span residual;
    size_t from;
} part_residual;

/* Copies the residuals of the gradients that this rank has to `blank`, or back. */
static ct_status
copy_there(const ct_fsdp *unit, const part_residual *r, float *blank, bool back,
           ct_error *err)
{
    const ct_span all = {blank, r->residual.n, CT_F32};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < r->presence->n; i++) {
        const ct_fsdp_param *param = &r->presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, r->from, all.n, &at);
        const ct_span kept = ct_span_part(r->residual, at, n);
        const ct_span used = ct_span_part(all, at, n);
        if (param->there && n != 0) {
            status = unit->device->copy(unit->stream, back ? &kept : &used,
                                        back ? &used : &kept, 1, err);
        }
    }
    return status;
}

/* The residual of a missing gradient must not be sent: the sum would then be a gradient
 * of a parameter that no rank has one of. It waits for the next gradient.
 *
 * Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
 * Compression Schemes", 2019 (the residual). */
static ct_status
encode_part(const ct_fsdp *unit, const buffers *b, const ct_span *values,
            const part_residual *r, void *to, ct_error *err)
{
    const int bits = unit->config.reduce_bits;
    if (r->residual.data == NULL || is_complete(r->presence)) {
        return encode(unit, bits, b, values, r->residual.data, to, err);
    }
    const ct_span blank = {b->blank, r->residual.n, CT_F32};
    ct_status status = unit->device->zero(unit->stream, &blank, 1, err);
    if (status == CT_OK) {
        status = copy_there(unit, r, b->blank, false, err);
    }
    if (status == CT_OK) {
        status = encode(unit, bits, b, values, b->blank, to, err);
    }
    return status == CT_OK ? copy_there(unit, r, b->blank, true, err) : status;
}

ct_status
ct_fsdp_exchange_quantized(const ct_fsdp *unit, ct_comm *comm, const ct_span *whole,
                           float *residual, ct_fsdp_presence *presence,
                           const ct_span *part, float factor, ct_error *err)
{
    const int width = unit->config.reduce_bits;
    const ct_fsdp_levels l = ct_fsdp_levels_of(comm);
    const size_t n = part->n, values = lay_out(n, width).bytes;
    const size_t marks = presence == NULL ? 0 : bits_bytes(presence);
    const size_t bytes = values + marks, all = bytes * l.machines;
    const bool blank = residual == NULL || !is_complete(presence);
    buffers b;
    unsigned char *bits = ct_alloc(marks + 1);
    if (bits == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the bits of %zu bytes", marks);
    }
    ct_status status = open_buffers(&b, unit, all, all, blank ? n : 0, err);
    for (size_t m = 0; status == CT_OK && m < l.machines; m++) {
        const size_t from = (m * l.local + l.place) * n;
        const ct_span own = ct_fsdp_part_on(&l, whole, m);
        const part_residual r = {
            .presence = presence,
            .residual = {residual == NULL ? NULL : residual + from, n, CT_F32},
            .from = from
        };
        status = encode_part(unit, &b, &own, &r, b.sent + m * bytes, err);
    }
    if (status == CT_OK && presence != NULL) {
        status =
            send_bits(unit, l.machines, presence, bits, b.sent + values, bytes, err);
    }
    if (status == CT_OK) {
        const ct_request request = {
            .what = CT_ALL_TO_ALL,
            .in = {b.sent,     all, CT_U8},
            .out = {b.received, all, CT_U8},
        };
        status = run_across(unit, comm, &request, err);
    }
    if (status == CT_OK) {
        status = decode(unit, width, part, b.received, l.machines, bytes, factor, err);
    }
    if (status == CT_OK && presence != NULL) {
        status = receive_bits(unit, l.machines, presence, bits, b.received + values,
                              bytes, err);
    }
    close_buffers(unit);
    ct_free(bits);
    return status;
}
