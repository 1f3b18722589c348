/* What is in a file is updated piece by piece, through a ring of buffers: a thread
 * reads the next pieces, the caller updates a piece, and a second thread writes updated
 * pieces.
 *
 * Three counters say how far each thread is, written <= updated <= read <= written +
 * buffers, and each thread waits for the counter before its own. A rule that works
 * element by element gives the same bits whatever the pieces. The threads end with the
 * update, so that nothing is under way when the process forks or state is read. */
#define _GNU_SOURCE /* MADV_DONTFORK */
#include "core/optim/disk.h"

#include "core/base/alloc.h"
#include "core/base/thread.h"
#include "math/compact.h"

#include <string.h>
#include <sys/mman.h>

enum {
    PIECE = 1 << 20, /* elements at most */
};

/* The arrays of a span that may be in a file. */
enum {
    STATES = CT_RULE_MAX_STATES,
    PARAM = STATES,
    COPY, /* written only */
    ARRAYS
};

_Static_assert(PIECE % CT_QUANT_BLOCK == 0 && PIECE % CT_COMPACT_GROUP == 0,
               "a piece has whole blocks");

/* Elements [begin, begin + n) of a span with an array in a file, or n_spans whole spans
 * in memory. */
typedef struct piece {
    size_t span, n_spans, begin, n;
} piece;

typedef struct pipeline {
    const ct_disk_state *disk;
    const ct_rule_run *run;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    size_t read, updated, written; /* pieces so far */
    ct_status status;              /* the first failure of any thread */
    ct_error error;
} pipeline;

/* ---- arrays in files ------------------------------------------------------------- */

typedef struct array {
    const ct_disk_memory *file; /* NULL: in memory */
    unsigned char *data;
    size_t size; /* bytes of an element */
} array;

static const ct_disk_memory *
file_of(const ct_disk_state *disk, const void *data)
{
    if (disk->memory != NULL && ct_disk_memory_has(disk->memory, data)) {
        return disk->memory;
    }
    for (size_t i = 0; i < disk->n_shards; i++) {
        if (ct_disk_memory_has(disk->shards[i], data)) {
            return disk->shards[i];
        }
    }
    return NULL;
}

static array
array_of(const ct_disk_state *disk, const ct_update_span *span, size_t k)
{
    void *data = k == PARAM ? span->param : k == COPY ? span->copy : span->state[k];
    const ct_dtype dtype = k == PARAM  ? span->dtype
                           : k == COPY ? span->copy_dtype
                                       : span->state_dtype;
    return (array){file_of(disk, data), data, ct_dtype_size(dtype)};
}

static void
put_array(ct_update_span *span, size_t k, void *data)
{
    *(k == PARAM ? &span->param : k == COPY ? &span->copy : &span->state[k]) = data;
}

/* The whole pages of a file with elements [begin, begin + n) of an array, which begin
 * `lead` bytes behind the first page's begin and end at byte `end`. */
typedef struct window {
    unsigned char *first;
    size_t lead, end, bytes;
} window;

static window
window_of(const array *a, size_t begin, size_t n)
{
    unsigned char *from = a->data + begin * a->size;
    const size_t lead = (size_t)(from - a->file->data) % ct_pages_round(1);
    const size_t end = lead + n * a->size;
    return (window){from - lead, lead, end, ct_pages_round(end)};
}

static bool
is_on_disk(const ct_disk_state *disk, const ct_update_span *span)
{
    bool found = false;
    for (size_t k = 0; !found && k < ARRAYS; k++) {
        found = array_of(disk, span, k).file != NULL;
    }
    return found;
}

bool
ct_disk_state_has(const ct_disk_state *disk, const ct_rule_run *run)
{
    bool found = false;
    for (size_t i = 0; !found && i < run->update.n_spans; i++) {
        found = is_on_disk(disk, &run->spans[i]);
    }
    return found;
}

/* ---- pieces ---------------------------------------------------------------------- */

static size_t
least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Fills in the list, unless `to` is NULL; returns its length. */
static size_t
list_pieces(const ct_disk_state *disk, const ct_rule_run *run, piece *to)
{
    size_t n = 0;
    bool in_memory = false;
    for (size_t i = 0; i < run->update.n_spans; i++) {
        const ct_update_span *span = &run->spans[i];
        if (!is_on_disk(disk, span)) {
            n += !in_memory;
            if (to != NULL) {
                to[n - 1] = (piece){in_memory ? to[n - 1].span : i,
                                    in_memory ? to[n - 1].n_spans + 1 : 1, 0, 0};
            }
            in_memory = true;
            continue;
        }
        in_memory = false;
        for (size_t at = 0; at < span->n; at += PIECE) {
            if (to != NULL) {
                to[n] = (piece){i, 1, at, least(PIECE, span->n - at)};
            }
            n++;
        }
    }
    return n;
}

static void *
at(void *data, size_t begin, size_t size)
{
    return data == NULL ? NULL : (char *)data + begin * size;
}

/* Elements [begin, begin + n) of a span. */
static ct_update_span
slice(const ct_update_span *span, size_t begin, size_t n)
{
    ct_update_span part = *span;
    part.n = n;
    part.first += begin;
    part.grad = at(span->grad, begin, ct_dtype_size(span->grad_dtype));
    part.param = at(span->param, begin, ct_dtype_size(span->dtype));
    part.correction = at(span->correction, begin, sizeof *span->correction);
    part.copy = at(span->copy, begin, ct_dtype_size(span->copy_dtype));
    part.ema = at(span->ema, begin, ct_dtype_size(span->ema_dtype));
    for (size_t k = 0; k < STATES; k++) {
        part.state[k] = at(span->state[k], begin, ct_dtype_size(span->state_dtype));
        if (span->state_dtype == CT_I8 && span->quant[k].scales != NULL) {
            part.quant[k].scales += begin / CT_COMPACT_GROUP;
        }
        else if (span->state_dtype == CT_U8 && span->quant[k].absmax != NULL) {
            part.quant[k].absmax += begin / CT_QUANT_BLOCK;
        }
    }
    return part;
}

/* ---- before the update ----------------------------------------------------------- */

void
ct_disk_state_fini(ct_disk_state *disk)
{
    ct_pages_drop(disk->buffers);
    ct_free(disk->pieces);
    ct_free((void *)disk->shards);
    *disk = (ct_disk_state){0};
}

ct_status
ct_disk_state_set_shards(ct_disk_state *disk, const ct_disk_memory *const *files,
                         size_t n, ct_error *err)
{
    void *shards = (void *)disk->shards;
    const ct_status status =
        ct_grow(&shards, &disk->shards_capacity, n, sizeof(void *), err);
    disk->shards = (const ct_disk_memory **)shards;
    if (status == CT_OK) {
        for (size_t i = 0; i < n; i++) {
            disk->shards[i] = files[i];
        }
        disk->n_shards = n;
    }
    return status;
}

/* The kernel reads into the buffers while the process may fork: a child's copy
 * would take pages from under the drive. Behind the buffers is the writer's page. */
static ct_status
reserve_buffers(ct_disk_state *disk, size_t bytes, ct_error *err)
{
    ct_pages *made = NULL;
    if (bytes <= disk->buffer_bytes) {
        return CT_OK;
    }
    ct_status status =
        ct_pages_new(&made, disk->n_buffers * bytes + ct_pages_round(1), err);
    if (status == CT_OK) {
        (void)madvise(made->data, made->bytes, MADV_DONTFORK);
        ct_pages_drop(disk->buffers);
        disk->buffers = made;
        disk->buffer_bytes = bytes;
    }
    return status;
}

static ct_status
check_span(const ct_disk_state *disk, const ct_update_span *span, size_t *buffer,
           ct_error *err)
{
    size_t bytes = 0;
    for (size_t k = 0; k < ARRAYS; k++) {
        const array a = array_of(disk, span, k);
        if (a.file == NULL) {
            continue;
        }
        const size_t offset = (size_t)(a.data - a.file->data);
        const window all = window_of(&a, 0, span->n);
        if ((a.file == disk->memory && all.lead != 0) ||
            all.bytes > a.file->bytes - (offset - all.lead)) {
            return ct_fail(err, CT_EINVAL,
                           "state in a file has to begin at a page of its own, and is "
                           "at byte %zu: leave the optimizer's state as it was made",
                           offset);
        }
        bytes += window_of(&a, 0, least(PIECE, span->n)).bytes;
    }
    *buffer = bytes > *buffer ? bytes : *buffer;
    return CT_OK;
}

static ct_status
check_files(const ct_disk_state *disk, ct_error *err)
{
    ct_status status = disk->memory == NULL
                           ? CT_OK
                           : ct_disk_memory_check(disk->memory, "an update", err);
    for (size_t i = 0; status == CT_OK && i < disk->n_shards; i++) {
        status = ct_disk_memory_check(disk->shards[i], "an update", err);
    }
    return status;
}

ct_status
ct_disk_state_prepare(ct_disk_state *disk, const ct_rule_run *run, ct_error *err)
{
    size_t buffer = 0;
    if (ct_rule_is_of_whole(run->update.rule) || run->device != &ct_device_cpu) {
        return ct_fail(
            err, CT_EINVAL,
            "state and shards in a file are for parameters in the host's memory, and "
            "for optimizers that work element by element, such as AdamW");
    }
    ct_status status = check_files(disk, err);
    for (size_t i = 0; status == CT_OK && i < run->update.n_spans; i++) {
        status = check_span(disk, &run->spans[i], &buffer, err);
    }
    if (status == CT_OK) {
        status = reserve_buffers(disk, buffer, err);
    }
    return status == CT_OK ? ct_grow(&disk->pieces, &disk->pieces_capacity,
                                     list_pieces(disk, run, NULL), sizeof(piece), err)
                           : status;
}

/* ---- the threads ----------------------------------------------------------------- */

/* Waits until *counter reaches n; false after a failure that keeps it from that. */
static bool
await_counter(pipeline *p, const size_t *counter, size_t n)
{
    (void)pthread_mutex_lock(&p->lock);
    while (*counter < n && p->status == CT_OK) {
        (void)pthread_cond_wait(&p->moved, &p->lock);
    }
    const bool reached = *counter >= n;
    (void)pthread_mutex_unlock(&p->lock);
    return reached;
}

/* Counts a piece, or notes the failure; returns whether to continue. */
static bool
advance(pipeline *p, size_t *counter, ct_status status, const ct_error *err)
{
    (void)pthread_mutex_lock(&p->lock);
    *counter += status == CT_OK;
    if (status != CT_OK && p->status == CT_OK) {
        p->status = status;
        p->error = *err;
    }
    (void)pthread_cond_broadcast(&p->moved);
    (void)pthread_mutex_unlock(&p->lock);
    return status == CT_OK;
}

static const piece *
piece_of(const pipeline *p, size_t i)
{
    return (const piece *)p->disk->pieces + i;
}

/* The buffer of a piece, in the ring of them. */
static unsigned char *
buffer_of(const pipeline *p, size_t i)
{
    const ct_disk_state *disk = p->disk;
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): n_buffers > 0 with a memory */
    return disk->buffers->data + i % disk->n_buffers * disk->buffer_bytes;
}

/* Writes bytes [from, to) of a page that has other arrays, too. No other thread
 * writes; bytes that a thread reads meanwhile are others and do not change. */
static ct_status
write_edge(const pipeline *p, const ct_disk_memory *file, unsigned char *page,
           const unsigned char *buffer, size_t from, size_t to, ct_error *err)
{
    unsigned char *own =
        p->disk->buffers->data + p->disk->n_buffers * p->disk->buffer_bytes;
    const size_t bytes = ct_pages_round(1);
    const ct_status status = ct_disk_memory_read(file, page, own, bytes, err);
    if (status != CT_OK) {
        return status;
    }
    memcpy(own + from, buffer + from, to - from);
    return ct_disk_memory_write(file, page, own, bytes, err);
}

static ct_status
write_shared(const pipeline *p, const array *a, const window *w,
             const unsigned char *buffer, ct_error *err)
{
    const size_t page = ct_pages_round(1);
    const bool has_head = w->lead != 0, has_tail = w->end % page != 0;
    const size_t begin = has_head ? page : 0, end = w->end / page * page;
    ct_status status = CT_OK;
    if (has_head) {
        status =
            write_edge(p, a->file, w->first, buffer, w->lead, least(w->end, page), err);
    }
    if (status == CT_OK && end > begin) {
        status = ct_disk_memory_write(a->file, w->first + begin, buffer + begin,
                                      end - begin, err);
    }
    return status == CT_OK && has_tail && end >= begin
               ? write_edge(p, a->file, w->first + end, buffer + end, 0, w->end - end,
                            err)
               : status;
}

static ct_status
move_array(const pipeline *p, const array *a, const window *w, unsigned char *buffer,
           bool writes, ct_error *err)
{
    if (!writes) {
        return ct_disk_memory_read(a->file, w->first, buffer, w->bytes, err);
    }
    return a->file == p->disk->memory
               ? ct_disk_memory_write(a->file, w->first, buffer, w->bytes, err)
               : write_shared(p, a, w, buffer, err);
}

/* Moves each array of a piece that is in a file to or from the buffer. */
static ct_status
move_piece(const pipeline *p, size_t i, bool writes, ct_error *err)
{
    const piece *of = piece_of(p, i);
    unsigned char *buffer = buffer_of(p, i);
    ct_status status = CT_OK;
    for (size_t k = 0; of->n != 0 && status == CT_OK && k < ARRAYS; k++) {
        const array a = array_of(p->disk, &p->run->spans[of->span], k);
        if (a.file != NULL) {
            const window w = window_of(&a, of->begin, of->n);
            if (writes || k != COPY) {
                status = move_array(p, &a, &w, buffer, writes, err);
            }
            buffer += w.bytes;
        }
    }
    return status;
}

static void *
read_ahead(void *arg)
{
    pipeline *p = arg;
    const size_t buffers = p->disk->n_buffers;
    ct_error err;
    for (size_t i = 0; i < p->disk->n_pieces; i++) {
        const size_t free_after = i < buffers ? 0 : i - buffers + 1;
        if (!await_counter(p, &p->written, free_after) ||
            !advance(p, &p->read, move_piece(p, i, false, &err), &err)) {
            break;
        }
    }
    return NULL;
}

static void *
write_behind(void *arg)
{
    pipeline *p = arg;
    ct_error err;
    for (size_t i = 0; i < p->disk->n_pieces; i++) {
        if (!await_counter(p, &p->updated, i + 1) ||
            !advance(p, &p->written, move_piece(p, i, true, &err), &err)) {
            break;
        }
    }
    return NULL;
}

/* ---- the update ------------------------------------------------------------------ */

static ct_status
update_piece(const pipeline *p, size_t i, void *stream, ct_error *err)
{
    const piece *of = piece_of(p, i);
    const ct_update_span *span = &p->run->spans[of->span];
    unsigned char *buffer = buffer_of(p, i);
    ct_rule_run run = *p->run;
    ct_update_span part;
    run.spans = &p->run->spans[of->span];
    run.update.n_spans = of->n_spans;
    if (of->n != 0) {
        part = slice(span, of->begin, of->n);
        for (size_t k = 0; k < ARRAYS; k++) {
            const array a = array_of(p->disk, span, k);
            if (a.file != NULL) {
                const window w = window_of(&a, of->begin, of->n);
                put_array(&part, k, buffer + w.lead);
                buffer += w.bytes;
            }
        }
        run.spans = &part;
    }
    run.update.spans = run.spans;
    return ct_rule_run_update(&run, stream, err);
}

static ct_status
fail(const pipeline *p, ct_error *err)
{
    ct_status status =
        ct_fail(err, p->status,
                "%.200s: %zu of %zu parts of the parameters are updated, and %zu "
                "written to the "
                "file: resume from the last checkpoint, with a drive that works",
                p->error.message, p->updated, p->disk->n_pieces, p->written);
    if (err != NULL) {
        err->os_error = p->error.os_error;
    }
    return status;
}

ct_status
ct_disk_state_update(ct_disk_state *disk, const ct_rule_run *run, void *stream,
                     ct_error *err)
{
    pipeline p = {.disk = disk,
                  .run = run,
                  .lock = PTHREAD_MUTEX_INITIALIZER,
                  .moved = PTHREAD_COND_INITIALIZER};
    pthread_t reader, writer;
    ct_error own;
    disk->n_pieces = list_pieces(disk, run, disk->pieces);
    if (ct_thread_start(&writer, write_behind, &p) != 0) {
        return ct_fail(err, CT_ENOMEM, "no thread to write the update");
    }
    const bool reads = ct_thread_start(&reader, read_ahead, &p) == 0;
    if (!reads) {
        (void)advance(&p, &p.read,
                      ct_fail(&own, CT_ENOMEM, "no thread to read for the update"),
                      &own);
    }
    for (size_t i = 0; i < disk->n_pieces && await_counter(&p, &p.read, i + 1); i++) {
        if (!advance(&p, &p.updated, update_piece(&p, i, stream, &own), &own)) {
            break;
        }
    }
    if (reads) {
        (void)pthread_join(reader, NULL);
    }
    (void)pthread_join(writer, NULL);
    return p.status == CT_OK ? CT_OK : fail(&p, err);
}
