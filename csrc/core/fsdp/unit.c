/* A sharded unit: memory, all-gather and release of the parameters.
 *
 * Gathered parameters and gradients have fixed addresses; only the pages behind them
 * come and go, so that views of the flat parameter stay valid. The ledger counts the
 * bytes of every change, and a failed gather leaves the unit released. */
#include "core/fsdp/unit.h"

#include "core/fsdp/internal.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"

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

/* ---- memory of gradients -------------------------------------------------------- */

ct_status
ct_fsdp_hold_grads(ct_fsdp *unit, ct_dtype dtype, ct_error *err)
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

void
ct_fsdp_drop_grads(ct_fsdp *unit)
{
    if (unit->holds_grads) {
        ct_mapping_release(unit->grads, &unit->ledger->cache);
        unit->holds_grads = false;
        unit->ledger->live -= grad_live(unit);
    }
}

/* ---- offloaded shards ------------------------------------------------------------
 *
 * Shards in host memory pass through one block of device memory, a shard at a time. All
 * units of a ledger use the same block. Copies are enqueued on the group's stream, if
 * the group has a stream, and run beside the computation; the host waits for the copies
 * at the end of a pass, before anybody writes to shards or reads gradients. */

ct_status
ct_fsdp_place(ct_fsdp *unit, const ct_span *shard, size_t parts, ct_span *here,
              ct_error *err)
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
            staging, parts * ct_fsdp_bytes_of(shard) + sizeof unused, err);
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
    const ct_status status = ct_fsdp_place(unit, shard, 1, here, err);
    return status != CT_OK || !unit->config.offload
               ? status
               : enqueue_copy(unit, here->data, shard->data, ct_fsdp_bytes_of(shard),
                              err);
}

ct_status
ct_fsdp_download(ct_fsdp *unit, const ct_span *shard, ct_span *here, bool add,
                 ct_error *err)
{
    const size_t bytes = ct_fsdp_bytes_of(shard);
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
        return ct_fsdp_gather_quantized(unit, comm, &full, &here, err);
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
secondary_of(const ct_fsdp *unit, const ct_fsdp_group *g, const ct_fsdp_levels *l,
             size_t at, ct_span *kept, ct_span *place)
{
    const ct_span full = full_of(unit, g);
    const size_t n = g->n / l->local;
    *kept = (ct_span){(char *)unit->secondary->data + at, n, g->full};
    *place = ct_span_part(full, l->place * n, n);
}

static ct_status
gather_kept(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const ct_fsdp_levels l = ct_fsdp_levels_of(comm);
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
        at += padded(ct_fsdp_bytes_of(&kept), ALIGNED_BYTES);
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
    const ct_fsdp_levels l = ct_fsdp_levels_of(comm);
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
        at += padded(ct_fsdp_bytes_of(&kept), ALIGNED_BYTES);
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
