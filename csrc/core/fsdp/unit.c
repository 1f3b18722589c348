/* A sharded unit: all-gather of the parameters, release, reduce-scatter of the
 * gradients, in full precision or quantized.
 *
 * Gathered parameters and gradients have fixed addresses; only the pages behind them
 * come and go, so that views of the flat parameter stay valid. The ledger counts the
 * bytes of every change, and a failed gather leaves the unit released. */
#include "core/fsdp/unit.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "core/comm/hierarchical.h"

#include "math/quantized.h"

#include <math.h>
#include <string.h>

/* ---- layout ---------------------------------------------------------------------- */

enum {
    ALIGNED_ELEMS = 32, /* gradients begin on a cache line whatever the dtype */
    ALIGNED_BYTES = 128
};

static size_t
padded(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static ct_status
check_group(const ct_fsdp_group *g, size_t i, int world_size, ct_error *err)
{
    if (g->n % (size_t)world_size != 0) {
        return ct_fail(err, CT_EINVAL,
                       "group %zu has %zu elements; expected a multiple of the %d "
                       "ranks of the sharding group",
                       i, g->n, world_size);
    }
    const bool floats = ct_dtypes[g->shard].is_float && ct_dtypes[g->full].is_float;
    const bool doubles = g->shard == CT_F64 || g->full == CT_F64;
    if (g->trainable ? !floats || doubles : !floats && g->shard != g->full) {
        return ct_fail(err, CT_EINVAL,
                       "group %zu is %s in shards and %s gathered%s; floats of up to "
                       "32 bits are trained, and floats alone are converted",
                       i, ct_dtype_name(g->shard), ct_dtype_name(g->full),
                       g->trainable ? ", and trainable" : "");
    }
    return CT_OK;
}

ct_status
ct_fsdp_init(ct_fsdp *unit, const ct_device *device, const ct_fsdp_group *groups,
             size_t n_groups, int world_size, ct_error *err)
{
    ct_status status = CT_OK;
    *unit = (ct_fsdp){.device = device};
    for (size_t i = 0; status == CT_OK && i < n_groups; i++) {
        status = check_group(&groups[i], i, world_size, err);
    }
    ct_fsdp_group *own = status == CT_OK ? ct_calloc(n_groups + 1, sizeof *own) : NULL;
    if (own == NULL) {
        return status != CT_OK
                   ? status
                   : ct_fail(err, CT_ENOMEM, "no memory for a unit of %zu groups",
                             n_groups);
    }
    size_t at = 0, grad_at = 0;
    for (size_t i = 0; i < n_groups; i++) {
        own[i] = groups[i];
        own[i].at = at;
        own[i].grad_at = grad_at;
        own[i].work = NULL;
        at += padded(own[i].n * ct_dtype_size(own[i].full), ALIGNED_BYTES);
        grad_at += own[i].trainable ? padded(own[i].n, ALIGNED_ELEMS) : 0;
    }
    own[n_groups] = (ct_fsdp_group){.at = at, .grad_at = grad_at}; /* the ends */
    unit->groups = own;
    unit->n_groups = n_groups;
    return CT_OK;
}

ct_status
ct_fsdp_await_copies(ct_fsdp *unit, ct_error *err)
{
    void *const copied = unit->copied;
    unit->copied = NULL;
    return copied == NULL ? CT_OK : unit->device->fetch_end(copied, err);
}

void
ct_fsdp_fini(ct_fsdp *unit)
{
    ct_error unused;
    if (unit->copied != NULL) {
        (void)unit->device->fetch_end(unit->copied, &unused);
    }
    ct_free(unit->groups);
    *unit = (ct_fsdp){.groups = NULL};
}

static ct_span
full_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    return (ct_span){(char *)unit->full->data + g->at, g->n, g->full};
}

static ct_span
grads_of(const ct_fsdp *unit, const ct_fsdp_group *g)
{
    const ct_span all = {unit->grads->data, 0, unit->grad_dtype};
    return ct_span_part(all, g->grad_at, g->n);
}

/* ---- the ledger ------------------------------------------------------------------ */

static size_t
grad_live(const ct_fsdp *unit)
{
    return unit->groups[unit->n_groups].grad_at * ct_dtype_size(unit->grad_dtype);
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
ct_fsdp_set_ledger(ct_fsdp *unit, ct_fsdp_ledger *ledger)
{
    const size_t bytes = (unit->gathered || unit->begun ? unit->full->bytes : 0) +
                         (unit->kept ? unit->secondary->bytes : 0) +
                         (unit->file.held ? unit->file.copy->bytes : 0) +
                         (unit->holds_grads ? grad_live(unit) : 0);
    unit->ledger->live -= bytes;
    unit->ledger->begun -= unit->begun;
    unit->ledger->reads -= unit->file.held;
    unit->ledger = ledger;
    unit->ledger->begun += unit->begun;
    unit->ledger->reads += unit->file.held;
    enter(ledger, bytes);
}

void
ct_fsdp_ledger_close(ct_fsdp_ledger *ledger, const ct_device *device)
{
    ct_block_cache_discard(&ledger->cache);
    device->scratch_release(&ledger->staging);
    device->scratch_release(&ledger->zero);
    device->scratch_release(&ledger->messages);
    device->scratch_release(&ledger->norm[0]);
    device->scratch_release(&ledger->norm[1]);
}

/* ---- offloaded shards ------------------------------------------------------------
 *
 * Shards in host memory pass through one block of device memory, a shard at a time. All
 * units of a ledger use the same block. Copies are enqueued on the group's stream, if
 * the group has a stream, and run beside the computation; the host waits for the copies
 * at the end of a pass, before anybody writes to shards or reads gradients. */

static size_t
bytes_of(const ct_span *span)
{
    return span->n * ct_dtype_size(span->dtype);
}

/* *here: `shard` itself, or the block for `parts` shards where shards are offloaded.
 * The block's contents are undefined, and the next call overwrites them. */
static ct_status
place(ct_fsdp *unit, const ct_span *shard, size_t parts, ct_span *here, ct_error *err)
{
    ct_fsdp_ledger *ledger = unit->ledger;
    ct_scratch *staging = &ledger->staging;
    double unused;
    ct_status status = CT_OK;
    *here = *shard;
    if (!unit->config.offload) {
        return CT_OK;
    }
    if (staging->data != NULL && ledger->staging_stream != unit->stream) {
        /* Waits for the work on the last stream. */
        status =
            unit->device->read(ledger->staging_stream, staging->data, &unused, err);
    }
    if (status == CT_OK) {
        status = unit->device->scratch_grow(
            staging, parts * bytes_of(shard) + sizeof unused, err);
    }
    if (status == CT_OK) {
        ledger->staging_stream = unit->stream;
        here->data = staging->data;
    }
    return status;
}

static ct_status
enqueue_copy(ct_fsdp *unit, void *to, const void *from, size_t bytes, ct_error *err)
{
    const ct_host_copy copy = {to, from, bytes};
    return unit->device->fetch_begin(unit->stream, &copy, 1, &unit->copied, err);
}

static ct_status
upload(ct_fsdp *unit, const ct_span *shard, ct_span *here, ct_error *err)
{
    const ct_status status = place(unit, shard, 1, here, err);
    return status != CT_OK || !unit->config.offload
               ? status
               : enqueue_copy(unit, here->data, shard->data, bytes_of(shard), err);
}

/* Copies *here, in the block for two shards, to `shard`, or adds *here to `shard`.
 * *here afterwards: the result on the device. */
static ct_status
download(ct_fsdp *unit, const ct_span *shard, ct_span *here, bool add, ct_error *err)
{
    const size_t bytes = bytes_of(shard);
    ct_status status = CT_OK;
    if (add) {
        const ct_span part = *here;
        here->data = (char *)part.data + bytes;
        status = enqueue_copy(unit, here->data, shard->data, bytes, err);
        if (status == CT_OK) {
            status = unit->device->add(unit->stream, here, &part, 1, 1.0, err);
        }
    }
    return status == CT_OK ? enqueue_copy(unit, shard->data, here->data, bytes, err)
                           : status;
}

/* ---- the ranks of machines ------------------------------------------------------- */

/* A group of one level is one rank a machine here. */
typedef struct levels {
    size_t machines, local; /* ranks of a machine */
    size_t place;           /* of this rank among those of its machine */
} levels;

static levels
levels_of(const ct_comm *comm)
{
    const int found = ct_comm_ranks_a_machine(comm), local = found == 0 ? 1 : found;
    return (levels){
        .machines = (size_t)(comm->world_size / local),
        .local = (size_t)local,
        .place = (size_t)(comm->rank % local),
    };
}

/* The part, of one length for every rank, of the rank with this one's place on a
 * machine. */
static ct_span
part_on(const levels *l, const ct_span *whole, size_t machine)
{
    const size_t n = whole->n / (l->machines * l->local);
    return ct_span_part(*whole, (machine * l->local + l->place) * n, n);
}

static ct_status
run_across(const ct_fsdp *unit, ct_comm *comm, const ct_request *r, ct_error *err)
{
    return ct_comm_ranks_a_machine(comm) == 0
               ? ct_comm_enqueue(comm, r, unit->stream, err)
               : ct_comm_run_level(comm, true, r, err);
}

/* Between part_on() of every machine and all parts of that machine, within this one:
 * gathers the parts, or sums them. */
static ct_status
run_within(ct_comm *comm, const levels *l, ct_collective what, ct_reduce_op op,
           const ct_span *whole, ct_error *err)
{
    const size_t block = whole->n / l->machines;
    ct_status status = CT_OK;
    for (size_t m = 0; status == CT_OK && l->local > 1 && m < l->machines; m++) {
        const ct_span all = ct_span_part(*whole, m * block, block);
        const ct_span own = part_on(l, whole, m);
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

static ct_status
gather_quantized(const ct_fsdp *unit, ct_comm *comm, const ct_span *full,
                 const ct_span *shard, ct_error *err)
{
    const int bits = unit->config.gather_bits;
    const levels l = levels_of(comm);
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
        const ct_span part = part_on(&l, full, m);
        status = decode(unit, bits, &part, b.received + m * bytes, 1, bytes, 1.0F, err);
    }
    close_buffers(unit);
    return status == CT_OK
               ? run_within(comm, &l, CT_ALL_GATHER, CT_REDUCE_SUM, full, err)
               : status;
}

/* ---- gathering ------------------------------------------------------------------- */

/* Copies this rank's shard to its place in `full` and gathers the other ranks' around
 * it; for a prefetch that collective is only begun. */
static ct_status
gather_group(ct_fsdp *unit, ct_comm *comm, ct_fsdp_group *g, const ct_span *shard,
             ct_error *err)
{
    const size_t n = g->n / (size_t)comm->world_size;
    const ct_span full = full_of(unit, g);
    const ct_span own = ct_span_part(full, (size_t)comm->rank * n, n);
    if (shard->n != n || shard->dtype != g->shard) {
        return ct_fail(err, CT_EINVAL,
                       "a shard has %zu elements of %s; expected %zu of %s: it must "
                       "not be cast or resized",
                       shard->n, ct_dtype_name(shard->dtype), n,
                       ct_dtype_name(g->shard));
    }
    const ct_span read =
        unit->file.held ? ct_shard_file_find(&unit->file, shard) : *shard;
    ct_span here;
    ct_status status = upload(unit, &read, &here, err);
    if (status != CT_OK) {
        return status;
    }
    /* Integers are quantized already. */
    if (unit->config.gather_bits != 0 && !unit->config.lone_gather &&
        ct_dtypes[g->shard].is_float) {
        return gather_quantized(unit, comm, &full, &here, err);
    }
    const ct_request request = {.what = CT_ALL_GATHER, .in = own, .out = full};
    if (unit->config.lone_gather) { /* else recycled pages would show */
        status = unit->device->zero(unit->stream, &full, 1, err);
    }
    if (status == CT_OK) {
        status = unit->device->copy(unit->stream, &own, &here, 1, err);
    }
    if (status != CT_OK || unit->config.lone_gather) {
        return status;
    }
    if (!unit->begun) {
        return ct_comm_enqueue(comm, &request, unit->stream, err);
    }
    status = ct_comm_follow(comm, unit->stream, err);
    return status == CT_OK ? ct_comm_start(comm, &request, &g->work, err) : status;
}

/* A group's secondary shard, `at` bytes behind the unit's first, and the shard's
 * place in the gathered group. */
static void
secondary_of(const ct_fsdp *unit, const ct_fsdp_group *g, const levels *l, size_t at,
             ct_span *kept, ct_span *place)
{
    const ct_span full = full_of(unit, g);
    const size_t n = g->n / l->local;
    *kept = (ct_span){(char *)unit->secondary->data + at, n, g->full};
    *place = ct_span_part(full, l->place * n, n);
}

static ct_status
gather_kept(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const levels l = levels_of(comm);
    ct_status status = CT_OK;
    size_t at = 0;
    for (size_t i = 0; status == CT_OK && i < unit->n_groups; i++) {
        const ct_fsdp_group *g = &unit->groups[i];
        ct_span kept, place;
        secondary_of(unit, g, &l, at, &kept, &place);
        const ct_request r = {
            .what = CT_ALL_GATHER, .in = place, .out = full_of(unit, g)};
        status = unit->device->copy(unit->stream, &place, &kept, 1, err);
        if (status == CT_OK) {
            status = ct_comm_run_level(comm, false, &r, err);
        }
        at += padded(bytes_of(&kept), ALIGNED_BYTES);
    }
    return status;
}

static ct_status
gather_each(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    ct_status status = CT_OK;
    ct_comm_label(comm, &unit->label, CT_ALL_GATHER);
    for (size_t i = 0; status == CT_OK && !unit->kept && i < unit->n_groups; i++) {
        status = gather_group(unit, comm, &unit->groups[i], &shards[i], err);
    }
    if (unit->kept) {
        status = gather_kept(unit, comm, err);
    }
    ct_comm_unlabel(comm);
    unit->label.call += status == CT_OK;
    return status;
}

/* Of offloaded shards: copies and collectives run on the group's stream. */
static ct_status
gather_beside(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    void *const stream = unit->stream;
    ct_status status = ct_comm_follow(comm, stream, err);
    if (status != CT_OK) {
        return status;
    }
    unit->stream = comm->stream == NULL ? stream : comm->stream;
    status = gather_each(unit, comm, shards, err);
    unit->stream = stream;
    return status == CT_OK && !unit->begun ? ct_comm_precede(comm, stream, err)
                                           : status;
}

/* ---- shards in a file ------------------------------------------------------------ */

/* The copy is in host memory. */
static ct_block_cache *
cache_of_copy(const ct_fsdp *unit)
{
    return unit->device == &ct_device_cpu ? &unit->ledger->cache : NULL;
}

static void
count_read(ct_fsdp *unit, bool held_before)
{
    if (unit->file.held && !held_before) {
        unit->ledger->reads++;
        enter(unit->ledger, unit->file.copy->bytes);
    }
    else if (held_before && !unit->file.held) {
        unit->ledger->reads--;
        unit->ledger->live -= unit->file.copy->bytes;
    }
}

ct_status
ct_fsdp_begin_read(ct_fsdp *unit, ct_error *err)
{
    const bool held = unit->file.held;
    if (unit->file.disk == NULL || unit->gathered || unit->begun || unit->kept) {
        return CT_OK;
    }
    const ct_status status = ct_shard_file_begin(&unit->file, cache_of_copy(unit), err);
    count_read(unit, held);
    return status;
}

void
ct_fsdp_drop_read(ct_fsdp *unit)
{
    if (unit->file.held) {
        ct_shard_file_drop(&unit->file, cache_of_copy(unit));
        count_read(unit, true);
    }
}

static ct_status
read_file(ct_fsdp *unit, ct_error *err)
{
    const bool held = unit->file.held;
    if (unit->file.disk == NULL || unit->kept) {
        return CT_OK;
    }
    const ct_status status = ct_shard_file_read(&unit->file, cache_of_copy(unit), err);
    count_read(unit, held);
    return status;
}

/* Drops the copy, when no copies of it to the device are under way. */
static ct_status
end_read(ct_fsdp *unit, ct_error *err)
{
    const ct_status status = unit->file.held ? ct_fsdp_await_copies(unit, err) : CT_OK;
    ct_fsdp_drop_read(unit);
    return status;
}

static ct_status
gather_groups(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err)
{
    unit->full->stream = unit->stream;
    ct_error unused;
    ct_status status =
        ct_mapping_obtain(unit->full, unit->full->bytes, &unit->ledger->cache, err);
    if (status == CT_OK) {
        status = read_file(unit, err);
    }
    if (status == CT_OK) {
        status = unit->config.offload ? gather_beside(unit, comm, shards, err)
                                      : gather_each(unit, comm, shards, err);
    }
    const ct_status ended = end_read(unit, status == CT_OK ? err : &unused);
    return status == CT_OK ? ended : status;
}

/* Each work must be waited for even after a failure. The first failure is reported: the
 * later ones follow from it. */
static ct_status
wait_for_groups(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    ct_error later;
    for (size_t i = 0; i < unit->n_groups; i++) {
        ct_work *work = unit->groups[i].work;
        unit->groups[i].work = NULL;
        const ct_status ended =
            ct_comm_order(comm, work, unit->stream, status == CT_OK ? err : &later);
        status = status == CT_OK ? ended : status;
    }
    return status;
}

static void
release_full(ct_fsdp *unit)
{
    ct_mapping_release(unit->full, &unit->ledger->cache);
    unit->gathered = false;
    unit->ledger->live -= unit->full->bytes;
}

/* Ends a prefetch: the unit is gathered afterwards, or released on failure. */
static ct_status
end_gather(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const ct_status status = wait_for_groups(unit, comm, err);
    unit->begun = false;
    unit->ledger->begun--;
    unit->gathered = true;
    if (status != CT_OK) {
        release_full(unit);
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
        return end_gather(unit, comm, err);
    }
    unit->gathered = true;
    enter(unit->ledger, unit->full->bytes);
    const ct_status status = gather_groups(unit, comm, shards, err);
    if (status != CT_OK) {
        release_full(unit);
    }
    return status;
}

void
ct_fsdp_release(ct_fsdp *unit)
{
    if (unit->gathered) {
        release_full(unit);
    }
}

void
ct_fsdp_cancel_gather(ct_fsdp *unit, ct_comm *comm)
{
    ct_error unused;
    if (unit->begun && end_gather(unit, comm, &unused) == CT_OK) {
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
                       "a unit with parameters quantized to %d bits cannot be "
                       "prefetched; gather it when it is needed",
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

/* ---- secondary shards ------------------------------------------------------------ */

size_t
ct_fsdp_secondary_bytes(const ct_fsdp *unit, int ranks_a_machine)
{
    size_t bytes = 0;
    for (size_t i = 0; i < unit->n_groups; i++) {
        const ct_fsdp_group *g = &unit->groups[i];
        bytes += padded(g->n / (size_t)ranks_a_machine * ct_dtype_size(g->full),
                        ALIGNED_BYTES);
    }
    return bytes;
}

ct_status
ct_fsdp_keep_secondary(ct_fsdp *unit, const ct_comm *comm, ct_error *err)
{
    const levels l = levels_of(comm);
    ct_mapping *memory = unit->secondary;
    size_t at = 0;
    if (memory == NULL || unit->kept) {
        return CT_OK;
    }
    memory->stream = unit->stream;
    ct_status status =
        ct_mapping_obtain(memory, memory->bytes, &unit->ledger->cache, err);
    for (size_t i = 0; status == CT_OK && i < unit->n_groups; i++) {
        ct_span kept, place;
        secondary_of(unit, &unit->groups[i], &l, at, &kept, &place);
        status = unit->device->copy(unit->stream, &kept, &place, 1, err);
        at += padded(bytes_of(&kept), ALIGNED_BYTES);
    }
    if (status != CT_OK) {
        ct_mapping_release(memory, &unit->ledger->cache);
        return status;
    }
    unit->kept = true;
    enter(unit->ledger, memory->bytes);
    return CT_OK;
}

void
ct_fsdp_drop_secondary(ct_fsdp *unit)
{
    if (unit->kept) {
        ct_mapping_release(unit->secondary, &unit->ledger->cache);
        unit->kept = false;
        unit->ledger->live -= unit->secondary->bytes;
    }
}

/* ---- gradients ------------------------------------------------------------------- */

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

/* ---- missing gradients -----------------------------------------------------------
 *
 * Whether any rank has a gradient of a parameter travels with the gradients, without a
 * message of its own, in the signs of zeros: a sum of nothing but -0 is -0. The
 * elements of a parameter without a gradient are -0. A parameter with a gradient begins
 * with something else in every rank's part. A mistake needs a sum in which all elements
 * that are read underflow to -0. Quantized values have no -0: their senders append a
 * bit for each parameter. */

enum {
    AT_ONCE = 32,  /* spans passed to the device together, on the stack */
    LOOKED_AT = 64 /* elements of a parameter */
};

typedef struct batch {
    ct_span spans[AT_ONCE];
    size_t n;
} batch;

/* How many of elements [from, from + n) belong to a parameter; *at: the first of these,
 * relative to `from`. */
static size_t
overlap(const ct_fsdp_param *param, size_t from, size_t n, size_t *at)
{
    const size_t begin = param->at > from ? param->at : from;
    const size_t own = param->at + param->n, all = from + n;
    const size_t end = own < all ? own : all;
    *at = begin - from;
    return end > begin ? end - begin : 0;
}

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

/* Adds a zero of the device's, made once: -0 + 0 is 0, other values stay. */
static ct_status
make_there(ct_fsdp *unit, batch *b, ct_error *err)
{
    ct_scratch *scratch = &unit->ledger->zero;
    const bool made = scratch->data != NULL;
    ct_span zeros[AT_ONCE];
    ct_status status = unit->device->scratch_grow(scratch, sizeof(float), err);
    for (size_t i = 0; i < b->n; i++) {
        zeros[i] = (ct_span){scratch->data, 1, CT_F32};
    }
    if (status == CT_OK && !made) { /* waits, as other streams use the zero, too */
        const float zero = 0.0F;
        status = unit->device->transfer(unit->stream, scratch->data, &zero, sizeof zero,
                                        err);
    }
    if (status == CT_OK) {
        status = unit->device->add(unit->stream, b->spans, zeros, b->n, 1.0, err);
    }
    b->n = 0;
    return status;
}

/* Marks `flat`, the elements of a group from `from` on, in ranks' parts of `part`
 * elements. Overwrites the places of missing gradients. */
static ct_status
mark(ct_fsdp *unit, const ct_fsdp_presence *presence, const ct_span *flat, size_t from,
     size_t part, ct_error *err)
{
    batch missing = {.n = 0}, there = {.n = 0};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        const ct_fsdp_param *param = &presence->params[i];
        size_t at, n = overlap(param, from, flat->n, &at);
        if (!param->there && n != 0) {
            missing.spans[missing.n++] = ct_span_part(*flat, at, n);
        }
        for (size_t end = at + n; status == CT_OK && param->there && at < end;
             at += part - at % part) { /* to the next rank's part */
            there.spans[there.n++] = ct_span_part(*flat, at, 1);
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

static bool
is_minus_zero(const void *values, size_t k, ct_dtype dtype)
{
    if (ct_dtype_size(dtype) == sizeof(uint16_t)) { /* BF16 and F16 alike */
        return ((const uint16_t *)values)[k] == 0x8000U;
    }
    const float value = ((const float *)values)[k];
    return value == 0.0F && signbit(value);
}

/* Reads the marks of the parameters with elements in the reduced `shard`, elements of
 * the group from `from` on, of two or four bytes. */
static ct_status
read_marks(const ct_fsdp *unit, ct_fsdp_presence *presence, const ct_span *shard,
           size_t from, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        ct_fsdp_param *param = &presence->params[i];
        float head[LOOKED_AT];
        size_t at, n = overlap(param, from, shard->n, &at);
        n = n < LOOKED_AT ? n : LOOKED_AT;
        if (param->there || n == 0) {
            continue;
        }
        const ct_span look = ct_span_part(*shard, at, n);
        status =
            unit->device->transfer(unit->stream, head, look.data, bytes_of(&look), err);
        for (size_t k = 0; status == CT_OK && !param->there && k < n; k++) {
            param->there = !is_minus_zero(head, k, shard->dtype);
        }
    }
    return status;
}

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
        size_t at, n = overlap(param, r->from, all.n, &at);
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

/* A reduce-scatter of `whole`, summed within each machine, into `part`, maybe a part of
 * `whole`, times factor. */
static ct_status
exchange_quantized(const ct_fsdp *unit, ct_comm *comm, const ct_span *whole,
                   float *residual, ct_fsdp_presence *presence, const ct_span *part,
                   float factor, ct_error *err)
{
    const int width = unit->config.reduce_bits;
    const levels l = levels_of(comm);
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
        const ct_span own = part_on(&l, whole, m);
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

static ct_status
reduce_quantized(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
                 ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
                 ct_error *err)
{
    const levels l = levels_of(comm);
    const ct_span whole = grads_of(unit, g);
    float *residual = unit->residual == NULL ? NULL : unit->residual + g->grad_at;
    const float factor = op == CT_REDUCE_MEAN ? 1.0F / (float)l.machines : 1.0F;
    ct_status status = run_within(comm, &l, CT_REDUCE_SCATTER, op, &whole, err);
    for (size_t m = 0; status == CT_OK && l.local > 1 && m < l.machines; m++) {
        const ct_span own = part_on(&l, &whole, m);
        status = presence == NULL ? CT_OK
                                  : read_marks(unit, presence, &own,
                                               (m * l.local + l.place) * part->n, err);
    }
    if (status == CT_OK) {
        status = exchange_quantized(unit, comm, &whole, residual, presence, part,
                                    factor, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : mark(unit, presence, part, (size_t)comm->rank * part->n, part->n, err);
}

/* ---- reducing -------------------------------------------------------------------- */

/* Sums over the sharding group, then averages over the replicate group. */
static ct_status
sum_over_ranks(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
               ct_fsdp_presence *presence, const ct_span *part, ct_reduce_op op,
               ct_error *err)
{
    const ct_span whole = grads_of(unit, g);
    const ct_request scatter = {
        .what = CT_REDUCE_SCATTER, .op = op, .in = whole, .out = *part};
    const ct_request average = {
        .what = CT_ALL_REDUCE, .op = CT_REDUCE_MEAN, .in = *part};
    ct_comm *replicate_group = unit->replicate_group;
    if (unit->config.lone_reduce) {
        return CT_OK;
    }
    ct_comm_label(comm, &unit->label, CT_REDUCE_SCATTER);
    ct_status status = unit->config.reduce_bits != 0
                           ? reduce_quantized(unit, comm, g, presence, part, op, err)
                           : ct_comm_enqueue(comm, &scatter, unit->stream, err);
    ct_comm_unlabel(comm);
    unit->label.call += status == CT_OK;
    return status != CT_OK || replicate_group == NULL
               ? status
               : ct_comm_enqueue(replicate_group, &average, unit->stream, err);
}

static ct_status
scale(const ct_fsdp *unit, double factor, const ct_span *span, ct_error *err)
{
    return factor == 1.0 ? CT_OK
                         : unit->device->scale(unit->stream, factor, (double)INFINITY,
                                               span, 1, err);
}

static ct_status
deliver(const ct_fsdp *unit, const ct_span *shard, const ct_span *part, double factor,
        bool add, ct_error *err)
{
    if (add) {
        return unit->device->add(unit->stream, shard, part, 1, factor, err);
    }
    /* Scaled in the wider dtype. */
    const bool narrows = ct_dtype_size(shard->dtype) < ct_dtype_size(part->dtype);
    ct_status status = narrows ? scale(unit, factor, part, err) : CT_OK;
    if (status == CT_OK) {
        status = unit->device->copy(unit->stream, shard, part, 1, err);
    }
    return status == CT_OK && !narrows ? scale(unit, factor, shard, err) : status;
}

/* An average needs no factor: the collective divides in the sum's own precision. */
static bool
is_average(const ct_fsdp *unit, const ct_comm *comm)
{
    return !unit->config.lone_reduce &&
           unit->config.predivide * unit->config.postdivide == (double)comm->world_size;
}

/* here: device memory for this rank's part. */
static ct_status
reduce_group(ct_fsdp *unit, ct_comm *comm, const ct_fsdp_group *g,
             ct_fsdp_presence *presence, const ct_span *here, bool add, ct_error *err)
{
    const bool average = is_average(unit, comm);
    const ct_span whole = grads_of(unit, g);
    ct_span part = ct_span_part(whole, (size_t)comm->rank * here->n, here->n);
    ct_status status =
        presence == NULL ? CT_OK : mark(unit, presence, &whole, 0, here->n, err);
    if (status == CT_OK && !average) {
        status = scale(unit, 1.0 / unit->config.predivide, &whole, err);
    }
    const bool direct = !add && part.dtype == here->dtype && !unit->config.lone_reduce;
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
reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
       const ct_span *shard, bool add, ct_error *err)
{
    const ct_fsdp_group *g = &unit->groups[group];
    const size_t n = g->n / (size_t)comm->world_size;
    const bool offload = unit->config.offload;
    ct_span here;
    if (shard->n != n || shard->dtype != g->shard) {
        return ct_fail(err, CT_EINVAL,
                       "the gradient of a shard has %zu elements of %s; expected %zu "
                       "of %s",
                       shard->n, ct_dtype_name(shard->dtype), n,
                       ct_dtype_name(g->shard));
    }
    ct_status status = hold_grads(unit, unit->config.reduce, err);
    if (status == CT_OK) {
        status = place(unit, shard, 2, &here, err);
    }
    if (status == CT_OK) {
        status = reduce_group(unit, comm, g, presence, &here, add && !offload, err);
    }
    if (status == CT_OK && offload) {
        status = download(unit, shard, &here, add, err);
    }
    return status != CT_OK || presence == NULL
               ? status
               : read_marks(unit, presence, &here, (size_t)comm->rank * n, err);
}

/* Beside the computation: all of the reduction runs on the group's stream. Quantized
 * values pass through memory of the ledger, of one stream: that of the gathers. */
ct_status
ct_fsdp_reduce(ct_fsdp *unit, ct_comm *comm, size_t group, ct_fsdp_presence *presence,
               const ct_span *shard, bool add, ct_error *err)
{
    void *const stream = unit->stream;
    const bool offload = unit->config.offload;
    if (comm->stream == NULL || (!offload && unit->config.reduce_bits != 0)) {
        return reduce(unit, comm, group, presence, shard, add, err);
    }
    ct_status status = ct_comm_follow(comm, stream, err);
    if (status == CT_OK) {
        unit->reducing = true;
        unit->stream = unit->grads->stream = comm->stream;
        status = reduce(unit, comm, group, presence, shard, add, err);
        unit->stream = stream;
    }
    return status;
}

ct_status
ct_fsdp_settle(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const bool reducing = unit->reducing;
    unit->reducing = false;
    return reducing ? ct_comm_precede(comm, unit->stream, err) : CT_OK;
}
