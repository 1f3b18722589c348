/* Saves folders of files in the background: memory for snapshots, the files of a save,
 * and the thread that writes them.
 *
 * Everything but `done` belongs to either the caller or the thread, never to both: the
 * caller joins the thread before it touches the writer again. A folder appears under
 * its final name only after all files and the manifest are on the disk. */
#define _GNU_SOURCE
#include "core/checkpoint/writer.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/base/owner.h"
#include "core/base/pool.h"
#include "core/base/thread.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/source.h"
#include "core/checkpoint/staging.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- snapshot memory -------------------------------------------------------------
 *
 * A snapshot takes hundreds of megabytes, and faulting in fresh pages costs as much as
 * the copy. The arena keeps its chunks between saves; the same requests in the same
 * order find the same chunks again. */

typedef struct arena_chunk {
    unsigned char *data; /* mapped */
    size_t bytes, used;
    const ct_device *device; /* for which memory is pinned; NULL: ordinary memory */
} arena_chunk;

typedef struct arena {
    arena_chunk *chunks;
    size_t n_chunks, chunks_capacity;
} arena;

enum {
    ALIGNMENT = 64,
    PAGE_BYTES = 2 << 20,   /* a huge page: fewer faults at the first save */
    CHUNK_BYTES = 64 << 20, /* the least that is mapped at a time */
    PORTION_BYTES = 4 << 20 /* copied by a thread at a time */
};

static void
arena_fini(arena *a)
{
    for (size_t i = 0; i < a->n_chunks; i++) {
        if (a->chunks[i].device != NULL) {
            a->chunks[i].device->unpin(a->chunks[i].data);
        }
        (void)munmap(a->chunks[i].data, a->chunks[i].bytes);
    }
    ct_free(a->chunks);
    *a = (arena){0};
}

static void
arena_reset(arena *a)
{
    for (size_t i = 0; i < a->n_chunks; i++) {
        a->chunks[i].used = 0;
    }
}

static size_t
arena_bytes(const arena *a)
{
    size_t bytes = 0;
    for (size_t i = 0; i < a->n_chunks; i++) {
        bytes += a->chunks[i].bytes;
    }
    return bytes;
}

static void *
take_from(arena_chunk *chunk, size_t bytes)
{
    if (chunk->bytes - chunk->used < bytes) {
        return NULL;
    }
    void *data = chunk->data + chunk->used;
    chunk->used += bytes;
    return data;
}

/* The kernel's estimate of memory that is free without swapping; SIZE_MAX without an
 * estimate. */
static size_t
available_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];
    bool found = false;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        static const char key[] = "MemAvailable:";
        found = strncmp(line, key, sizeof key - 1) == 0;
        kib = found ? strtoull(line + sizeof key - 1, NULL, 10) : 0;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return found && kib < SIZE_MAX / 1024 ? (size_t)kib * 1024 : SIZE_MAX;
}

/* `device` != NULL: pinned memory. */
static arena_chunk *
add_chunk(arena *a, const ct_device *device, size_t bytes)
{
    void *block = a->chunks;
    bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (ct_grow(&block, &a->chunks_capacity, a->n_chunks + 1, sizeof *a->chunks,
                NULL) != CT_OK) {
        return NULL;
    }
    a->chunks = block;
    /* mmap() overcommits: a snapshot that swaps, or that the kernel answers by killing
     * a process, is worse than a save without a snapshot. */
    if (bytes / 9 > available_bytes() / 10) {
        return NULL;
    }
    void *data =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* else small pages */
#endif
    if (device != NULL && device->pin(data, bytes, NULL) != CT_OK) {
        (void)munmap(data, bytes);
        return NULL;
    }
    a->chunks[a->n_chunks] =
        (arena_chunk){.data = data, .bytes = bytes, .device = device};
    return &a->chunks[a->n_chunks++];
}

static void *
arena_take(arena *a, const ct_device *device, size_t bytes)
{
    if (bytes > SIZE_MAX - PAGE_BYTES) {
        return NULL;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (size_t i = 0; i < a->n_chunks; i++) {
        arena_chunk *chunk = &a->chunks[i];
        void *data = chunk->device == device ? take_from(chunk, bytes) : NULL;
        if (data != NULL) {
            return data;
        }
    }
    arena_chunk *chunk = add_chunk(a, device, bytes);
    return chunk == NULL ? NULL : take_from(chunk, bytes);
}

/* A batch of the pool: a part of a piece. */
typedef struct portion {
    unsigned char *to;
    const unsigned char *from;
    size_t n;
} portion;

static void
copy_portion(void *arg, size_t batch)
{
    const portion *p = (const portion *)arg + batch;
    memcpy(p->to, p->from, p->n);
}

/* Takes memory for every borrowed piece; targets[i] is NULL for other pieces. */
static ct_status
take_targets(arena *a, const ct_plan *plan, unsigned char **targets, ct_error *err)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL || piece->n == 0) {
            continue;
        }
        targets[i] = arena_take(a, piece->place.device, piece->n);
        if (targets[i] == NULL) {
            return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s",
                           plan->name);
        }
    }
    return CT_OK;
}

/* ---- copies from devices ---------------------------------------------------------
 *
 * Copies go to pinned memory behind the work on the caller's stream, and later work on
 * the stream follows the copies: the caller waits for nothing, and may let the stream
 * change the data at once. Whoever reads the copies waits first. */

typedef struct fetch {
    ct_place place;
    void *copied; /* of fetch_begin */
} fetch;

typedef struct fetches {
    fetch *list;
    size_t n, capacity;
} fetches;

/* Waits for all, also after a failure. */
static ct_status
await_fetches(fetches *f, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < f->n; i++) {
        ct_error own, unused;
        const ct_device *device = f->list[i].place.device;
        int ordinal = f->list[i].place.ordinal;
        ct_status ended = ct_device_switch(device, &ordinal, &own);
        if (ended == CT_OK) {
            ended = device->fetch_end(f->list[i].copied, &own);
            (void)ct_device_switch(device, &ordinal, &unused);
        }
        if (status == CT_OK && ended != CT_OK) {
            status = ended;
            *err = own;
        }
    }
    f->n = 0;
    return status;
}

static bool
is_same_place(const ct_place *a, const ct_place *b)
{
    return a->device == b->device && a->ordinal == b->ordinal && a->stream == b->stream;
}

static ct_status
begin_fetch(fetches *f, const ct_place *place, const ct_host_copy *copies, size_t n,
            ct_error *err)
{
    ct_error unused;
    void *block = f->list, *copied = NULL;
    int ordinal = place->ordinal;
    ct_status status = ct_grow(&block, &f->capacity, f->n + 1, sizeof *f->list, err);
    f->list = block;
    if (status == CT_OK) {
        status = ct_device_switch(place->device, &ordinal, err);
    }
    if (status == CT_OK) {
        status = place->device->fetch_begin(place->stream, copies, n, &copied, err);
        (void)ct_device_switch(place->device, &ordinal, &unused);
    }
    if (status == CT_OK) {
        f->list[f->n++] = (fetch){*place, copied};
    }
    return status;
}

/* Of the pieces on devices, run by run of the same place, to targets[]. */
static ct_status
fetch_pieces(fetches *f, const ct_plan *plan, unsigned char **targets,
             ct_host_copy *copies, ct_error *err)
{
    const ct_place *place = NULL;
    size_t n = 0;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < plan->n_pieces; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (targets[i] == NULL || piece->place.device == NULL) {
            continue;
        }
        if (n != 0 && !is_same_place(place, &piece->place)) {
            status = begin_fetch(f, place, copies, n, err);
            n = 0;
        }
        place = &piece->place;
        copies[n++] = (ct_host_copy){targets[i], piece->data, piece->n};
    }
    return status == CT_OK && n != 0 ? begin_fetch(f, place, copies, n, err) : status;
}

/* Replaces the plan's borrowed bytes by copies. A failure leaves the plan alone. */
static ct_status
arena_copy(arena *a, fetches *f, ct_plan *plan, ct_error *err)
{
    size_t most = 1, n = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        most += plan->pieces[i].n / PORTION_BYTES + 1;
    }
    portion *portions = ct_calloc(most, sizeof *portions);
    ct_host_copy *copies = ct_calloc(plan->n_pieces + 1, sizeof *copies);
    unsigned char **targets =
        (unsigned char **)ct_calloc(plan->n_pieces + 1, sizeof(unsigned char *));
    if (portions == NULL || copies == NULL || targets == NULL) {
        ct_free((void *)targets);
        ct_free(copies);
        ct_free(portions);
        return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s", plan->name);
    }
    /* All memory is taken before the first piece is changed. */
    ct_status status = take_targets(a, plan, targets, err);
    if (status == CT_OK) {
        status = fetch_pieces(f, plan, targets, copies, err);
    }
    for (size_t i = 0; status == CT_OK && i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        const unsigned char *from = piece->data;
        if (targets[i] == NULL) {
            continue;
        }
        for (size_t at = 0; piece->place.device == NULL && at < piece->n;
             at += PORTION_BYTES) {
            size_t left = piece->n - at;
            portions[n++] = (portion){targets[i] + at, from + at,
                                      left < PORTION_BYTES ? left : PORTION_BYTES};
        }
        piece->data = targets[i];
        piece->place = (ct_place){0};
    }
    if (status == CT_OK) {
        ct_pool_run(copy_portion, portions, n);
    }
    ct_free((void *)targets);
    ct_free(copies);
    ct_free(portions);
    return status;
}

/* ---- the files of a save ---------------------------------------------------------
 *
 * Plans that are written once, and the files on the disk afterwards. Other programs may
 * write to the same folder, and over these files: the manifest lists the files found on
 * the disk. */

/* as_written: the status after the write. A file that was changed later is summed
 * again. */
typedef struct file {
    ct_plan plan;
    bool written;
    struct stat as_written;
} file;

typedef struct fileset {
    file *files;
    size_t n, capacity;
} fileset;

static void
fileset_clear(fileset *set)
{
    for (size_t i = 0; i < set->n; i++) {
        ct_plan_fini(&set->files[i].plan);
    }
    set->n = 0;
}

static void
fileset_fini(fileset *set)
{
    fileset_clear(set);
    ct_free(set->files);
    *set = (fileset){0};
}

static file *
find(const fileset *set, const char *name)
{
    for (size_t i = 0; i < set->n; i++) {
        if (strcmp(set->files[i].plan.name, name) == 0) {
            return &set->files[i];
        }
    }
    return NULL;
}

static ct_status
fileset_keep(fileset *set, ct_plan *plan, size_t *index, ct_error *err)
{
    file *f = find(set, plan->name);
    if (f != NULL) {
        ct_plan_fini(&f->plan);
    }
    else {
        void *block = set->files;
        ct_status status = ct_grow(&block, &set->capacity, set->n + 1, sizeof *f, err);
        set->files = block;
        if (status != CT_OK) {
            return status;
        }
        f = &set->files[set->n++];
    }
    *f = (file){.plan = *plan};
    *plan = (ct_plan){0};
    *index = (size_t)(f - set->files);
    return CT_OK;
}

/* "sub/name" needs a folder "sub". */
static ct_status
make_parent(char *path, const char *name, ct_error *err)
{
    char *slash = strchr(name, '/') == NULL ? NULL : strrchr(path, '/');
    if (slash == NULL) {
        return CT_OK;
    }
    *slash = '\0';
    ct_status status = ct_make_folders(path, err);
    *slash = '/';
    return status;
}

static ct_status
fileset_write_one(fileset *set, size_t index, const char *folder, ct_error *err)
{
    file *f = &set->files[index];
    if (f->written) {
        return CT_OK;
    }
    char *path = ct_path_join(folder, f->plan.name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path of %s", f->plan.name);
    }
    ct_status status = make_parent(path, f->plan.name, err);
    if (status == CT_OK) {
        status = ct_plan_write(&f->plan, path, err);
    }
    if (status == CT_OK) {
        f->written = stat(path, &f->as_written) == 0;
    }
    ct_free(path);
    return status;
}

static ct_status
fileset_write(fileset *set, const char *folder, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < set->n && status == CT_OK; i++) {
        status = fileset_write_one(set, i, folder, err);
    }
    return status;
}

typedef struct listing {
    const fileset *set;
    const char *folder;
    ct_manifest manifest;
} listing;

static bool
is_untouched(const file *f, const struct stat *now)
{
    const struct stat *then = &f->as_written;
    return f->written && then->st_ino == now->st_ino && then->st_size == now->st_size &&
           then->st_mtim.tv_sec == now->st_mtim.tv_sec &&
           then->st_mtim.tv_nsec == now->st_mtim.tv_nsec;
}

static ct_status
count_file(listing *c, const char *name, const char *path, ct_error *err)
{
    struct stat now;
    ct_expected found;
    ct_status status = CT_OK;
    const file *f = find(c->set, name);
    if (stat(path, &now) < 0) {
        return ct_fail_io(err, errno, "look at", path);
    }
    if (f != NULL && is_untouched(f, &now)) {
        found = (ct_expected){f->plan.bytes, f->plan.crc32c};
    }
    else {
        status = ct_checksum_file(path, NULL, &found, err);
    }
    if (status == CT_OK) {
        status = ct_sync_file(path, err);
    }
    return status == CT_OK ? ct_manifest_add(&c->manifest, name, strlen(name),
                                             found.bytes, found.crc32c, err)
                           : status;
}

static ct_status
visit(void *arg, const char *relative, int is_folder, ct_error *err)
{
    listing *c = arg;
    if (strcmp(relative, CT_MANIFEST_NAME) == 0) {
        return CT_OK; /* a copy of another folder's manifest: replaced below */
    }
    char *path = ct_path_join(c->folder, relative);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", c->folder);
    }
    ct_status status =
        is_folder ? ct_sync_folder(path, err) : count_file(c, relative, path, err);
    ct_free(path);
    return status;
}

static ct_status
fileset_sync(fileset *set, const char *folder, ct_error *err)
{
    listing c = {.set = set, .folder = folder};
    ct_status status = ct_walk(folder, visit, &c, err);
    if (status == CT_OK) {
        status = ct_manifest_write(&c.manifest, folder, err);
    }
    if (status == CT_OK) {
        status = ct_sync_folder(folder, err);
    }
    ct_manifest_fini(&c.manifest);
    return status;
}

/* ---- the writer ------------------------------------------------------------------ */

enum {
    SMALL_PAGE = 4096
};

/* While `started`, everything but `done` belongs to the thread. */
struct ct_writer {
    ct_staging staging; /* .outer != NULL: a save is open or being written */
    fileset files;
    char **doomed; /* folders to remove once the save is in place; owned */
    size_t n_doomed, doomed_capacity;
    arena arena;
    fetches fetches; /* into the arena */
    size_t reserved; /* bytes that the thread is to ready */
    ct_place reserved_for;
    ct_error error; /* kept; code CT_OK: none */
    ct_owner owner; /* the process that began the save or started the thread */
    pthread_t thread;
    bool started;
    atomic_bool done;
};

ct_writer *
ct_writer_new(void)
{
    ct_writer *writer = ct_calloc(1, sizeof *writer);
    if (writer != NULL) {
        writer->owner = ct_owner_here();
    }
    return writer;
}

/* Keeps the capacity of the lists and the chunks of the arena for the next save. */
static void
drop_files(ct_writer *writer)
{
    ct_error unused;
    (void)await_fetches(&writer->fetches, &unused);
    fileset_clear(&writer->files);
    for (size_t i = 0; i < writer->n_doomed; i++) {
        ct_free(writer->doomed[i]);
    }
    writer->n_doomed = 0;
    arena_reset(&writer->arena);
}

/* A forked child owns no folder and has no such thread. The thread may have been
 * changing the fields at the time of the fork, so the child's copy is not freed. */
static void
forget_parents_save(ct_writer *writer)
{
    /* Nor can a device be used in a child. */
    writer->fetches.n = 0;
    for (size_t i = 0; !writer->started && i < writer->arena.n_chunks; i++) {
        writer->arena.chunks[i].device = NULL;
    }
    if (writer->started) {
        writer->staging = (ct_staging){.lock = -1};
        writer->files = (fileset){0};
        writer->arena = (arena){0};
        writer->fetches = (fetches){0};
        writer->doomed = NULL;
        writer->n_doomed = writer->doomed_capacity = 0;
    }
    else {
        ct_staging_forget(&writer->staging);
        drop_files(writer);
    }
    writer->error = (ct_error){0};
    writer->owner = ct_owner_here();
}

/* Ends the work of the thread. */
static void
settle(ct_writer *writer)
{
    if (!ct_owner_is_here(writer->owner)) {
        forget_parents_save(writer);
    }
    else if (writer->started) {
        (void)pthread_join(writer->thread, NULL);
    }
    writer->started = false;
}

/* An error of the thread is raised once, by the first call that can. */
static ct_status
take_error(ct_writer *writer, ct_error *err)
{
    ct_status status = writer->error.code;
    if (status != CT_OK && err != NULL) {
        *err = writer->error;
    }
    writer->error = (ct_error){0};
    return status;
}

ct_status
ct_writer_wait(ct_writer *writer, ct_error *err)
{
    settle(writer);
    return take_error(writer, err);
}

void
ct_writer_abort(ct_writer *writer)
{
    if (writer->started || writer->staging.outer == NULL) {
        return;
    }
    settle(writer);
    ct_staging_close(&writer->staging);
    drop_files(writer);
}

void
ct_writer_release(ct_writer *writer)
{
    settle(writer);
    if (writer->staging.outer == NULL) {
        arena_fini(&writer->arena);
    }
}

void
ct_writer_free(ct_writer *writer)
{
    if (writer == NULL) {
        return;
    }
    settle(writer);
    ct_writer_abort(writer);
    drop_files(writer);
    arena_fini(&writer->arena);
    ct_free(writer->fetches.list);
    ct_free((void *)writer->doomed);
    fileset_fini(&writer->files);
    ct_free(writer);
}

size_t
ct_writer_snapshot_bytes(const ct_writer *writer)
{
    return writer->started ? 0 : arena_bytes(&writer->arena);
}

bool
ct_writer_pending(const ct_writer *writer)
{
    return writer->started && ct_owner_is_here(writer->owner) &&
           !atomic_load_explicit(&writer->done, memory_order_acquire);
}

const char *
ct_writer_folder_borrow(const ct_writer *writer)
{
    return writer->started || !ct_owner_is_here(writer->owner) ? NULL
                                                               : writer->staging.folder;
}

ct_status
ct_writer_begin(ct_writer *writer, const char *final_folder, ct_error *err)
{
    ct_status status = ct_writer_wait(writer, err);
    if (status != CT_OK) {
        return status;
    }
    if (writer->staging.outer != NULL) {
        return ct_fail(err, CT_EINVAL,
                       "%s is still being saved: commit or abort it before %s",
                       writer->staging.final, final_folder);
    }
    writer->owner = ct_owner_here();
    return ct_staging_open(&writer->staging, final_folder, err);
}

ct_status
ct_writer_add(ct_writer *writer, ct_plan *plan, bool copy, ct_error *err)
{
    size_t index;
    ct_status status;
    const char *folder = ct_writer_folder_borrow(writer);
    if (folder == NULL || plan->name == NULL) {
        status = ct_fail(err, CT_EINVAL, "no save is open to add %s to",
                         plan->name == NULL ? "a file" : plan->name);
    }
    else {
        /* Without memory for a snapshot the file is written while the caller waits. */
        bool copied =
            copy && arena_copy(&writer->arena, &writer->fetches, plan, NULL) == CT_OK;
        status = fileset_keep(&writer->files, plan, &index, err);
        if (status == CT_OK && !copied) {
            status = fileset_write_one(&writer->files, index, folder, err);
        }
    }
    ct_plan_fini(plan);
    return status;
}

ct_status
ct_writer_flush(ct_writer *writer, ct_error *err)
{
    const char *folder = ct_writer_folder_borrow(writer);
    ct_status status = folder == NULL ? CT_OK : await_fetches(&writer->fetches, err);
    return folder == NULL || status != CT_OK
               ? status
               : fileset_write(&writer->files, folder, err);
}

ct_status
ct_writer_show(ct_writer *writer, ct_error *err)
{
    ct_status status = ct_writer_flush(writer, err);
    return status != CT_OK || ct_writer_folder_borrow(writer) == NULL
               ? status
               : ct_staging_show(&writer->staging, err);
}

ct_status
ct_writer_remove_after(ct_writer *writer, const char *path, ct_error *err)
{
    void *block = (void *)writer->doomed;
    if (ct_writer_folder_borrow(writer) == NULL) {
        return ct_fail(err, CT_EINVAL, "no save is open to remove %s after", path);
    }
    ct_status status = ct_grow(&block, &writer->doomed_capacity, writer->n_doomed + 1,
                               sizeof(char *), err);
    writer->doomed = (char **)block;
    if (status != CT_OK) {
        return status;
    }
    char *copy = ct_path_join("", path);
    if (copy == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", path);
    }
    writer->doomed[writer->n_doomed++] = copy;
    return CT_OK;
}

/* The order is what makes a save whole or absent: bytes, manifest, and only then the
 * name. Old folders are removed last, when the new one can take their place. */
static ct_status
finish(ct_writer *writer, ct_error *err)
{
    const char *folder = writer->staging.folder;
    ct_status status = await_fetches(&writer->fetches, err);
    if (status == CT_OK) {
        status = fileset_write(&writer->files, folder, err);
    }
    if (status == CT_OK) {
        status = ct_staging_adopt(&writer->staging, err);
    }
    if (status == CT_OK) {
        status = fileset_sync(&writer->files, folder, err);
    }
    if (status == CT_OK) {
        status = ct_staging_publish(&writer->staging, err);
    }
    for (size_t i = 0; i < writer->n_doomed && status == CT_OK; i++) {
        status = ct_staging_bury(&writer->staging, writer->doomed[i], err);
    }
    return status;
}

static void
finish_and_keep(ct_writer *writer)
{
    ct_error err = {0};
    if (finish(writer, &err) != CT_OK) {
        writer->error = err;
    }
    ct_staging_close(&writer->staging);
    drop_files(writer);
}

static void *
run_save(void *arg)
{
    ct_writer *writer = arg;
    finish_and_keep(writer);
    atomic_store_explicit(&writer->done, true, memory_order_release);
    return NULL;
}

/* One write to each page faults the page in, in this thread instead of the first save.
 */
static void *
run_reserve(void *arg)
{
    ct_writer *writer = arg;
    ct_error unused;
    const ct_device *device = writer->reserved_for.device;
    int ordinal = writer->reserved_for.ordinal;
    if (device != NULL && ct_device_switch(device, &ordinal, &unused) != CT_OK) {
        return NULL; /* the thread ends, so nothing is switched back */
    }
    volatile unsigned char *data = arena_take(&writer->arena, device, writer->reserved);
    for (size_t at = 0; data != NULL && at < writer->reserved; at += SMALL_PAGE) {
        data[at] = 0;
    }
    arena_reset(&writer->arena);
    return NULL;
}

static int
start_thread(ct_writer *writer, void *(*run)(void *))
{
    writer->owner = ct_owner_here();
    writer->started = true;
    const int failed = ct_thread_start(&writer->thread, run, writer);
    writer->started = failed == 0;
    return failed;
}

ct_status
ct_writer_reserve(ct_writer *writer, size_t bytes, ct_place place, ct_error *err)
{
    settle(writer);
    if (writer->staging.outer != NULL) {
        return ct_fail(err, CT_EINVAL, "%s is being saved: reserve memory before",
                       writer->staging.final);
    }
    if (bytes > arena_bytes(&writer->arena)) {
        writer->reserved = bytes;
        writer->reserved_for = place;
        atomic_store(&writer->done, true); /* nothing is being saved */
        (void)start_thread(writer, run_reserve);
    }
    return CT_OK;
}

ct_status
ct_writer_commit(ct_writer *writer, ct_error *err)
{
    if (ct_writer_folder_borrow(writer) == NULL) {
        return ct_fail(err, CT_EINVAL, "no save is open to commit");
    }
    atomic_store(&writer->done, false);
    if (start_thread(writer, run_save) != 0) {
        finish_and_keep(writer); /* no thread to be had: here and now */
    }
    return CT_OK;
}
