/* One sharded unit: gathering its parameters, releasing them, reducing its gradients;
 * whole or as quantized values, with shards on the device or in host memory.
 *
 * Parameters lie at addresses that never change; pages come and go. */
#include "core/fsdp/unit.h"

#include "core/base/alloc.h"
#include "core/comm/history.h"

#include "math/quantized.h"

#include <math.h>
#include <string.h>

/* How a gather that has begun ends. */

/* Shards in the host's memory of a unit that works on a device.
 *
 * They pass through one block of the device's memory, a shard at a time: all units of a
 * ledger have it together. */

/* Which parameters of a group have a gradient on any rank, told without a message of
 * its own.
 *
 * It travels in the signs of zeros: a sum of -0 alone is -0. A parameter without a
 * gradient is -0 throughout, and one that has a gradient begins with something else in
 * every rank's part. A sum can only be mistaken where all that is looked at of it
 * underflows to -0. Codes have no -0: their senders add a bit for each parameter. */

enum {
    ALIGNED_ELEMS = 32 /* a group begins on a cache line whatever the dtype */
};

/* ---- layout ------------------------------------------------------------------------
 */

static size_t
padded(size_t n)
{
    return (n + ALIGNED_ELEMS - 1) / ALIGNED_ELEMS * ALIGNED_ELEMS;
}

ct_status
ct_fsdp_init(ct_fsdp *unit, const ct_device *device, const size_t *sizes,
             const bool *trainable, size_t n_groups, int world_size, ct_error *err)
{
    *unit = (ct_fsdp){.device = device};
    for (size_t i = 0; i < n_groups; i++) {
        if (sizes[i] % (size_t)world_size != 0) {
            return ct_fail(err, CT_EINVAL,
                           "group %zu has %zu elements; expected a multiple of the %d "
                           "ranks that share it",
                           i, sizes[i], world_size);
        }
    }
    ct_fsdp_group *groups = ct_calloc(n_groups + 1, sizeof *groups);
    if (groups == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a unit of %zu groups", n_groups);
    }
    size_t at = 0, grad_at = 0;
    for (size_t i = 0; i < n_groups; i++) {
        groups[i] = (ct_fsdp_group){sizes[i], at, grad_at, trainable[i], NULL};
        at += padded(sizes[i]);
        grad_at += trainable[i] ? padded(sizes[i]) : 0;
    }
    groups[n_groups] =
        (ct_fsdp_group){0, at, grad_at, false, NULL}; /* where the last end */
    unit->groups = groups;
    unit->n_groups = n_groups;
    return CT_OK;
}

void
ct_fsdp_fini(ct_fsdp *unit)
{
    ct_free(unit->groups);
    *unit = (ct_fsdp){.groups = NULL};
}

size_t
ct_fsdp_full_bytes(const ct_fsdp *unit, ct_dtype compute)
{
    return unit->groups[unit->n_groups].at * ct_dtype_size(compute);
}

size_t
ct_fsdp_grad_bytes(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(CT_F32);
}

/* ---- the account -------------------------------------------------------------------
 */

static size_t
grad_live(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(unit->grad_dtype);
}

static size_t
live(const ct_fsdp *unit)
{
    return (unit->gathered || unit->begun ? unit->full->bytes : 0) +
           (unit->holds_grads ? grad_live(unit) : 0);
}

static void
enter(ct_fsdp_ledger *ledger, size_t bytes)
{
    ledger->live += bytes;
    if (ledger->live > ledger->peak) {
        ledger->peak = ledger->live;
    }
}

void
ct_fsdp_move_account(ct_fsdp *unit, ct_fsdp_ledger *ledger)
{
    const size_t bytes = live(unit);
    unit->ledger->live -= bytes;
    unit->ledger->begun -= unit->begun;
    unit->ledger = ledger;
    unit->ledger->begun += unit->begun;
    enter(ledger, bytes);
}

/* ---- gathering ---------------------------------------------------------------------
 */

static ct_span
full_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->full->data, 0, unit->config.compute};
    return ct_span_part(all, g->at, g->n);
}

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

/* *here becomes where `shard` is on the device: itself, or where it is offloaded the
 * block, which holds nothing of it yet, or all of it. The next call overwrites it.
 * CT_EDEVICE and what the device says of memory. */
static ct_status
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

static ct_status
ct_fsdp_bring_up(ct_fsdp *unit, const ct_span *shard, ct_span *here, ct_error *err)
{
    const ct_status status = ct_fsdp_place(unit, shard, here, err);
    return status != CT_OK || !unit->config.offload
               ? status
               : unit->device->transfer(unit->stream, here->data, shard->data,
                                        bytes_of(shard), err);
}

/* Where a collective's codes lie, and the zeros that an encoding without memory of
 * earlier ones adds and overwrites. */
typedef struct room {
    ct_scratch memory;
    char *sent, *received;
    float *blank;
} room;

/* What is sent of n elements: scales, then codes, up to a whole number of scales. */
typedef struct layout {
    size_t codes, bytes;
} layout;

enum {
    ALIGN = 8
};

static layout
lay_out(size_t n, int bits)
{
    layout l = {.codes = ct_quantized_blocks(n) * sizeof(float)};
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
ct_fsdp_gather_quantized(const ct_fsdp_coder *coder, const ct_span *full,
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

/* This rank's part is put in its place, then the others' come around it: that begins
 * only, where the unit's gather does. */
static ct_status
gather_group(ct_fsdp *unit, ct_comm *comm, ct_fsdp_group *g, const ct_span *shard,
             ct_error *err)
{
    const size_t n = g->n / (size_t)comm->world_size;
    const ct_span full = full_of(unit, g);
    const ct_span own = ct_span_part(full, (size_t)comm->rank * n, n);
    if (shard->n != n || shard->dtype != CT_F32) {
        return ct_fail(err, CT_EINVAL,
                       "a shard has %zu elements of %s; expected %zu of float32: it "
                       "must not be cast or resized",
                       shard->n, ct_dtype_name(shard->dtype), n);
    }
    ct_span here;
    ct_status status = ct_fsdp_bring_up(unit, shard, &here, err);
    if (status != CT_OK) {
        return status;
    }
    if (unit->config.gather_bits != 0 && !unit->config.lone_gather) {
        const ct_fsdp_coder coder = {unit->device, unit->stream, comm,
                                     unit->config.gather_bits};
        return ct_fsdp_gather_quantized(&coder, &full, &here, err);
    }
    const ct_request request = {.what = CT_ALL_GATHER, .in = own, .out = full};
    status = unit->device->copy(unit->stream, &own, &here, 1, err);
    if (status != CT_OK || unit->config.lone_gather) {
        return status;
    }
    status = ct_comm_follow(comm, unit->stream, err);
    if (status != CT_OK) {
        return status;
    }
    return unit->begun ? ct_comm_start(comm, &request, &g->work, err)
                       : ct_comm_run(comm, &request, err);
}

static ct_status
gather_groups(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    unit->full->stream = unit->stream;
    ct_status status =
        ct_mapping_obtain(unit->full, unit->full->bytes, &unit->ledger->cache, err);
    ct_comm_label(comm, &unit->label, CT_ALL_GATHER);
    for (size_t i = 0; status == CT_OK && i < unit->n_groups; i++) {
        status = gather_group(unit, comm, &unit->groups[i], &shards[i], err);
    }
    ct_comm_unlabel(comm);
    unit->label.call += status == CT_OK;
    return status;
}

/* Each work has to be waited for, whatever became of those before it; the first failure
 * is the one that tells why. */
static ct_status
wait_for_groups(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    ct_error later;
    for (size_t i = 0; i < unit->n_groups; i++) {
        ct_work *work = unit->groups[i].work;
        unit->groups[i].work = NULL;
        const ct_status ended =
            ct_comm_wait(comm, work, status == CT_OK ? err : &later);
        status = status == CT_OK ? ended : status;
    }
    return status;
}

static void
let_go(ct_fsdp *unit)
{
    ct_mapping_release(unit->full, &unit->ledger->cache);
    unit->ledger->live -= unit->full->bytes;
}

/* Waits for the collectives of a unit that is `begun`, all of them on failure too: it
 * is gathered then, or released. */
static ct_status
ct_fsdp_end_gather(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const ct_status status = wait_for_groups(unit, comm, err);
    unit->begun = false;
    unit->ledger->begun--;
    unit->gathered = status == CT_OK;
    if (!unit->gathered) {
        let_go(unit);
    }
    return status;
}

ct_status
ct_fsdp_gather(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    if (unit->gathered) {
        return CT_OK;
    }
    if (unit->begun) {
        return ct_fsdp_end_gather(unit, comm, err);
    }
    const ct_status status = gather_groups(unit, comm, shards, err);
    if (status != CT_OK) {
        ct_mapping_release(unit->full, &unit->ledger->cache);
        return status;
    }
    unit->gathered = true;
    enter(unit->ledger, unit->full->bytes);
    return CT_OK;
}

void
ct_fsdp_release(ct_fsdp *unit)
{
    if (unit->gathered) {
        ct_mapping_release(unit->full, &unit->ledger->cache);
        unit->gathered = false;
        unit->ledger->live -= unit->full->bytes;
    }
}

void
ct_fsdp_cancel_gather(ct_fsdp *unit, ct_comm *comm)
{
    ct_error unused;
    if (unit->begun && ct_fsdp_end_gather(unit, comm, &unused) == CT_OK) {
        ct_fsdp_release(unit);
    }
}

ct_status
ct_fsdp_begin_gather(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    if (unit->gathered || unit->begun) {
        return CT_OK;
    }
    if (unit->config.gather_bits != 0) {
        return ct_fail(err, CT_EINVAL,
                       "a unit whose parameters travel quantized to %d bits cannot be "
                       "gathered ahead; gather it when it is needed",
                       unit->config.gather_bits);
    }
    unit->begun = true;
    unit->ledger->begun++;
    enter(unit->ledger, unit->full->bytes);
    const ct_status status = gather_groups(unit, comm, shards, err);
    if (status != CT_OK) {
        ct_fsdp_cancel_gather(unit, comm);
    }
    return status;
}

/* ---- gradients ---------------------------------------------------------------------
 */

static ct_span
grads_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->grads->data, 0, unit->grad_dtype};
    return ct_span_part(all, g->grad_at, g->n);
}

static ct_status
hold_grads(ct_fsdp *unit, ct_dtype dtype, ct_error *err)
{
    if (unit->holds_grads) {
        return CT_OK;
    }
    unit->grad_dtype = dtype;
    unit->grads->stream = unit->stream;
    const ct_status status =
        ct_mapping_obtain(unit->grads, grad_live(unit), &unit->ledger->cache, err);
    if (status == CT_OK) {
        unit->holds_grads = true;
        enter(unit->ledger, grad_live(unit));
    }
    return status;
}

ct_status
ct_fsdp_take_grad(ct_fsdp *unit, size_t group, size_t at, const ct_span *grad, bool add,
                  bool wide, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    if (at > g->n || grad->n > g->n - at) {
        return ct_fail(err, CT_EINVAL,
                       "a gradient of %zu elements does not fit at %zu of a group of "
                       "%zu",
                       grad->n, at, g->n);
    }
    ct_status status = hold_grads(unit, wide ? CT_F32 : unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_device *device = unit->device;
    const ct_span place = ct_span_part(grads_of(unit, g), at, grad->n);
    return add ? device->add(unit->stream, &place, grad, 1, 1.0, err)
               : device->copy(unit->stream, &place, grad, 1, err);
}

enum {
    AT_ONCE = 32,  /* spans that the device is given together, from the stack */
    LOOKED_AT = 64 /* elements of a parameter */
};

/* What elements [from, from + n) have of a parameter: how many, and *at, where in
 * them they begin. */
static size_t
ct_fsdp_overlap(const ct_fsdp_param *param, size_t from, size_t n, size_t *at)
{
    const size_t begin = param->at > from ? param->at : from;
    const size_t own = param->at + param->n, all = from + n;
    const size_t end = own < all ? own : all;
    *at = begin - from;
    return end > begin ? end - begin : 0;
}

typedef struct batch {
    ct_span spans[AT_ONCE];
    size_t n;
} batch;

static ct_status
make_missing(const ct_fsdp *unit, batch *b, ct_error *err)
{
    const ct_device *device = unit->device;
    ct_status status = device->zero(unit->stream, b->spans, b->n, err);
    if (status == CT_OK) {
        status =
            device->scale(unit->stream, -1.0, (double)INFINITY, b->spans, b->n, err);
    }
    b->n = 0;
    return status;
}

/* A zero of the device's, made once: -0 + 0 is 0, and all else stays as it is. */
static ct_status
find_zero(ct_fsdp *unit, ct_span *zero, ct_error *err)
{
    ct_scratch *scratch = &unit->ledger->zero;
    const bool made = scratch->data != NULL;
    ct_status status = unit->device->scratch_grow(scratch, sizeof(float), err);
    *zero = (ct_span){scratch->data, 1, CT_F32};
    return status != CT_OK || made ? status
                                   : unit->device->zero(unit->stream, zero, 1, err);
}

static ct_status
make_there(ct_fsdp *unit, batch *b, ct_error *err)
{
    ct_span zeros[AT_ONCE];
    ct_status status = find_zero(unit, &zeros[0], err);
    for (size_t i = 1; i < b->n; i++) {
        zeros[i] = zeros[0];
    }
    if (status == CT_OK) {
        status = unit->device->add(unit->stream, b->spans, zeros, b->n, 1.0, err);
    }
    b->n = 0;
    return status;
}

/* Marks `row`, elements from `from` on of a group in parts of `part` elements. What is
 * missing is overwritten. CT_ENOMEM and what the device says. */
static ct_status
ct_fsdp_mark(ct_fsdp *unit, const ct_fsdp_presence *presence, const ct_span *row,
             size_t from, size_t part, ct_error *err)
{
    batch missing = {.n = 0}, there = {.n = 0};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        const ct_fsdp_param *param = &presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, from, row->n, &at);
        if (!param->there && n != 0) {
            missing.spans[missing.n++] = ct_span_part(*row, at, n);
        }
        for (size_t end = at + n; status == CT_OK && param->there && at < end;
             at += part - at % part) { /* to the next rank's part */
            there.spans[there.n++] = ct_span_part(*row, at, 1);
            status = there.n < AT_ONCE ? CT_OK : make_there(unit, &there, err);
        }
        if (status == CT_OK && missing.n == AT_ONCE) {
            status = make_missing(unit, &missing, err);
        }
    }
    if (status == CT_OK && missing.n != 0) {
        status = make_missing(unit, &missing, err);
    }
    return status != CT_OK || there.n == 0 ? status : make_there(unit, &there, err);
}

/* Whether nothing is missing on this rank; also of NULL, where nothing is told. */
static bool
ct_fsdp_is_complete(const ct_fsdp_presence *presence)
{
    bool all = true;
    for (size_t i = 0; presence != NULL && all && i < presence->n; i++) {
        all = presence->params[i].there;
    }
    return all;
}

/* A bit for each parameter, set where it is missing: n_params of them take so many
 * bytes. */
/* What such bits of some rank have is there. */
static size_t
ct_fsdp_bits_bytes(const ct_fsdp_presence *presence)
{
    return (presence->n + 63) / 64 * sizeof(uint64_t);
}

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

static void
ct_fsdp_put_bits(const ct_fsdp_presence *presence, unsigned char *bits)
{
    memset(bits, 0, ct_fsdp_bits_bytes(presence));
    for (size_t i = 0; i < presence->n; i++) {
        bits[i / 8] |= (unsigned char)((unsigned)!presence->params[i].there << i % 8);
    }
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

static void
ct_fsdp_take_bits(ct_fsdp_presence *presence, const unsigned char *bits)
{
    for (size_t i = 0; i < presence->n; i++) {
        const bool missing = (bits[i / 8] >> i % 8 & 1) != 0;
        presence->params[i].there = presence->params[i].there || !missing;
    }
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
ct_fsdp_reduce_quantized(const ct_fsdp_coder *coder, const ct_span *part,
                         const ct_span *whole, float *residual,
                         ct_fsdp_presence *presence, float factor, ct_error *err)
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

static ct_status
reduce_quantized(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
                 ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
                 ct_error *err)
{
    const ct_fsdp_coder coder = {unit->device, unit->stream, comm,
                                 unit->config.reduce_bits};
    const ct_span whole = grads_of(unit, g);
    float *residual = unit->residual == NULL ? NULL : unit->residual + g->grad_at;
    const float factor = op == CT_REDUCE_MEAN ? 1.0F / (float)comm->world_size : 1.0F;
    const ct_status status =
        ct_fsdp_reduce_quantized(&coder, part, &whole, residual, presence, factor, err);
    return status != CT_OK || presence == NULL
               ? status
               : ct_fsdp_mark(unit, presence, part, (size_t)comm->rank * part->n,
                              part->n, err);
}

/* The sum of all ranks' parts of a group; of the replicas' sums the average. */
static ct_status
sum_over_ranks(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
               ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
               ct_error *err)
{
    const ct_span whole = grads_of(unit, g);
    if (unit->config.lone_reduce) {
        return CT_OK;
    }
    ct_status status = ct_comm_follow(comm, unit->stream, err);
    if (status == CT_OK) {
        ct_comm_label(comm, &unit->label, CT_REDUCE_SCATTER);
        status = unit->config.reduce_bits != 0
                     ? reduce_quantized(unit, comm, g, presence, part, op, err)
                     : comm->ops->reduce_scatter(comm, part, &whole, op, err);
        ct_comm_unlabel(comm);
        unit->label.call += status == CT_OK;
    }
    ct_comm *replicas = unit->replicas;
    if (status == CT_OK && replicas != NULL) {
        status = ct_comm_follow(replicas, unit->stream, err);
    }
    return status != CT_OK || replicas == NULL
               ? status
               : replicas->ops->all_reduce(replicas, part, CT_REDUCE_MEAN, err);
}

static ct_status
scale(const ct_fsdp *unit, double factor, const ct_span *span, ct_error *err)
{
    return factor == 1.0 ? CT_OK
                         : unit->device->scale(unit->stream, factor, (double)INFINITY,
                                               span, 1, err);
}

/* Into the shard's gradient: from what is reduced, with the factor that is left. */
static ct_status
deliver(const ct_fsdp *unit, const ct_span *shard, const ct_span *part, double factor,
        bool add, ct_error *err)
{
    if (add) {
        return unit->device->add(unit->stream, shard, part, 1, factor, err);
    }
    const ct_status status = unit->device->copy(unit->stream, shard, part, 1, err);
    return status == CT_OK ? scale(unit, factor, shard, err) : status;
}

/* The average needs no factor: it is taken in the sum's own precision. */
static bool
is_average(const ct_fsdp *unit, const ct_comm *comm)
{
    return !unit->config.lone_reduce &&
           unit->config.predivide * unit->config.postdivide == (double)comm->world_size;
}

/* Into `here`, memory of the device for this rank's part. */
static ct_status
reduce_group(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
             ct_fsdp_presence *presence, const ct_span *here, bool add, ct_error *err)
{
    const bool average = is_average(unit, comm);
    const ct_span whole = grads_of(unit, g);
    ct_span part = ct_span_part(whole, (size_t)comm->rank * here->n, here->n);
    ct_status status = presence == NULL
                           ? CT_OK
                           : ct_fsdp_mark(unit, presence, &whole, 0, here->n, err);
    if (status == CT_OK && !average) {
        status = scale(unit, 1.0 / unit->config.predivide, &whole, err);
    }
    const bool direct = !add && part.dtype == CT_F32 && !unit->config.lone_reduce;
    part = direct ? *here : part;
    if (status == CT_OK) {
        status = sum_over_ranks(unit, comm, g, presence, &part,
                                average ? CT_REDUCE_MEAN : CT_REDUCE_SUM, err);
    }
    const double factor = average ? 1.0 : 1.0 / unit->config.postdivide;
    if (status != CT_OK) {
        return status;
    }
    return direct ? scale(unit, factor, here, err)
                  : deliver(unit, here, &part, factor, add, err);
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

/* Writes what is in the block into a shard that is offloaded, or adds it. CT_ENOMEM
 * too. */
static ct_status
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

/* Of what is missing on this rank and has elements in `shard`, reduced, from `from` on:
 * whether any rank has it. */
static ct_status
ct_fsdp_read_marks(ct_fsdp *unit, ct_fsdp_presence *presence, const ct_span *shard,
                   size_t from, ct_error *err)
{
    const ct_device *where = unit->config.offload ? &ct_device_cpu : unit->device;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        ct_fsdp_param *param = &presence->params[i];
        float head[LOOKED_AT];
        size_t at, n = ct_fsdp_overlap(param, from, shard->n, &at);
        n = n < LOOKED_AT ? n : LOOKED_AT;
        if (param->there || n == 0) {
            continue;
        }
        status = where->transfer(unit->stream, head, (const float *)shard->data + at,
                                 n * sizeof(float), err);
        for (size_t k = 0; status == CT_OK && !param->there && k < n; k++) {
            param->there = head[k] != 0.0F || !signbit(head[k]);
        }
    }
    return status;
}

ct_status
ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
               const ct_span *shard, bool add, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    const size_t n = g->n / (size_t)comm->world_size;
    ct_span here;
    if (shard->n != n || shard->dtype != CT_F32) {
        return ct_fail(err, CT_EINVAL,
                       "the gradient of a shard has %zu elements of %s; expected %zu "
                       "of float32",
                       shard->n, ct_dtype_name(shard->dtype), n);
    }
    ct_status status = hold_grads(unit, unit->config.reduce, err);
    if (status == CT_OK) {
        status = ct_fsdp_place(unit, shard, &here, err);
    }
    if (status == CT_OK) {
        const bool adds_here = add && !unit->config.offload;
        status = reduce_group(unit, comm, g, presence, &here, adds_here, err);
    }
    if (status == CT_OK) {
        status = ct_fsdp_bring_down(unit, shard, &here, add, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : ct_fsdp_read_marks(unit, presence, shard, (size_t)comm->rank * n, err);
}

ct_status
ct_fsdp_clear_grads(ct_fsdp *unit, size_t group, size_t at, size_t n, ct_error *err)
{
    const ct_status status = hold_grads(unit, unit->config.reduce, err);
    if (status != CT_OK) {
        return status;
    }
    const ct_span gap = ct_span_part(grads_of(unit, &unit->groups[group]), at, n);
    return unit->device->zero(unit->stream, &gap, 1, err);
}

void
ct_fsdp_drop_grads(ct_fsdp *unit)
{
    if (unit->holds_grads) {
        ct_mapping_release(unit->grads, &unit->ledger->cache);
        unit->holds_grads = false;
        unit->ledger->live -= grad_live(unit);
    }
}

void
ct_fsdp_ledger_close(ct_fsdp_ledger *ledger, const ct_device *device)
{
    ct_block_cache_close(&ledger->cache);
    device->scratch_release(&ledger->staging);
    device->scratch_release(&ledger->zero);
}

/* ---- bits --------------------------------------------------------------------------
 */

bool
ct_fsdp_bits_known(int bits)
{
    return bits == 8 || bits == 4;
}
