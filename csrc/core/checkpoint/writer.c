/* Saves folders of files in the background: the files of a save, and the thread that
 * writes them.
 *
 * Everything but `done` belongs to either the caller or the thread, never to both: the
 * caller joins the thread before it touches the writer again. A folder appears under
 * its final name only after all files, of other processes too, and the manifest are on
 * the disk. */
#define _GNU_SOURCE
#include "core/checkpoint/writer.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/base/owner.h"
#include "core/base/thread.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/parts.h"
#include "core/checkpoint/snapshot.h"
#include "core/checkpoint/source.h"
#include "core/checkpoint/staging.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* "sub/name" needs a folder "sub"; the folder of a dropped save is not made again. */
static ct_status
make_parent(char *path, const char *folder, const char *name, ct_error *err)
{
    char *slash = strchr(name, '/') == NULL ? NULL : strrchr(path, '/');
    if (slash == NULL || access(folder, F_OK) < 0) {
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
    ct_status status = make_parent(path, folder, f->plan.name, err);
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
    const ct_manifest *reported; /* files of other processes; or NULL */
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

static const ct_manifest_file *
find_reported(const ct_manifest *reported, const char *name)
{
    for (size_t i = 0; reported != NULL && i < reported->n; i++) {
        if (strcmp(reported->files[i].name, name) == 0) {
            return &reported->files[i];
        }
    }
    return NULL;
}

static ct_status
count_file(listing *c, const char *name, const char *path, ct_error *err)
{
    struct stat now;
    ct_expected found;
    ct_status status = CT_OK;
    const file *f = find(c->set, name);
    const ct_manifest_file *known = find_reported(c->reported, name);
    if (stat(path, &now) < 0) {
        return ct_fail_io(err, errno, "look at", path);
    }
    if (known != NULL) { /* synced by the other process */
        return ct_manifest_add(&c->manifest, name, strlen(name), known->bytes,
                               known->crc32c, err);
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
fileset_sync(fileset *set, const char *folder, const ct_manifest *reported,
             ct_error *err)
{
    listing c = {.set = set, .reported = reported, .folder = folder};
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

/* Syncs and lists the files of the set alone. */
static ct_status
fileset_sync_own(const fileset *set, const char *folder, ct_manifest *written,
                 ct_error *err)
{
    listing c = {.set = set, .folder = folder};
    ct_status status = CT_OK;
    for (size_t i = 0; i < set->n && status == CT_OK; i++) {
        const char *name = set->files[i].plan.name;
        char *path = ct_path_join(folder, name);
        if (path == NULL) {
            status = ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
        }
        else if (access(path, F_OK) == 0) { /* an override may have removed the file */
            status = count_file(&c, name, path, err);
        }
        ct_free(path);
    }
    *written = c.manifest;
    return status;
}

/* ---- the writer ------------------------------------------------------------------ */

/* While `started`, everything but `done` belongs to the thread. */
struct ct_writer {
    ct_staging staging; /* .outer != NULL: a save is open or being written */
    fileset files;
    struct part {
        int number;
        bool locked;
    } *parts; /* of other processes */
    size_t n_parts, parts_capacity;
    double parts_seconds; /* the longest wait for the parts */
    char **doomed;        /* folders to remove once the save is in place; owned */
    size_t n_doomed, doomed_capacity;
    ct_snapshot snapshot;
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

/* Keeps the capacity of the lists and the memory of the snapshot for the next save. */
static void
drop_files(ct_writer *writer)
{
    fileset_clear(&writer->files);
    for (size_t i = 0; i < writer->n_doomed; i++) {
        ct_free(writer->doomed[i]);
    }
    writer->n_doomed = writer->n_parts = 0;
    ct_snapshot_clear(&writer->snapshot);
}

/* A forked child owns no folder and has no such thread. The thread may have been
 * changing the fields at the time of the fork, so the child's copy is not freed. */
static void
forget_parents_save(ct_writer *writer)
{
    if (writer->started) {
        writer->staging = (ct_staging){.lock = -1};
        writer->files = (fileset){0};
        writer->snapshot = (ct_snapshot){0};
        writer->parts = NULL;
        writer->n_parts = writer->parts_capacity = 0;
        writer->doomed = NULL;
        writer->n_doomed = writer->doomed_capacity = 0;
    }
    else {
        ct_staging_forget(&writer->staging);
        ct_snapshot_leave_devices(&writer->snapshot);
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
    drop_files(writer);
    ct_staging_close(&writer->staging);
}

void
ct_writer_release(ct_writer *writer)
{
    settle(writer);
    if (writer->staging.outer == NULL) {
        ct_snapshot_fini(&writer->snapshot);
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
    ct_snapshot_fini(&writer->snapshot);
    ct_free(writer->parts);
    ct_free((void *)writer->doomed);
    fileset_fini(&writer->files);
    ct_free(writer);
}

size_t
ct_writer_snapshot_bytes(const ct_writer *writer)
{
    return writer->started ? 0 : ct_snapshot_bytes(&writer->snapshot);
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

/* Waits for the last save. */
static ct_status
make_ready(ct_writer *writer, const char *folder, ct_error *err)
{
    ct_status status = ct_writer_wait(writer, err);
    if (status != CT_OK) {
        return status;
    }
    if (writer->staging.outer != NULL) {
        return ct_fail(err, CT_EINVAL,
                       "%s is still being saved: commit or abort it before %s",
                       writer->staging.final, folder);
    }
    writer->owner = ct_owner_here();
    return CT_OK;
}

ct_status
ct_writer_begin(ct_writer *writer, const char *final_folder, ct_error *err)
{
    ct_status status = make_ready(writer, final_folder, err);
    return status == CT_OK ? ct_staging_open(&writer->staging, final_folder, err)
                           : status;
}

ct_status
ct_writer_join(ct_writer *writer, const char *folder, int number, ct_error *err)
{
    ct_status status = make_ready(writer, folder, err);
    return status == CT_OK ? ct_staging_join(&writer->staging, folder, number, err)
                           : status;
}

ct_status
ct_writer_expect(ct_writer *writer, const int *numbers, size_t n, double seconds,
                 ct_error *err)
{
    void *block = writer->parts;
    const char *folder = ct_writer_folder_borrow(writer);
    if (folder == NULL || writer->staging.part != NULL) {
        return ct_fail(err, CT_EINVAL, "no save was begun here that could have parts");
    }
    ct_status status =
        ct_grow(&block, &writer->parts_capacity, n, sizeof *writer->parts, err);
    writer->parts = block;
    writer->parts_seconds = seconds;
    for (writer->n_parts = 0; status == CT_OK && writer->n_parts < n;
         writer->n_parts++) {
        struct part *p = &writer->parts[writer->n_parts];
        p->number = numbers[writer->n_parts];
        status = ct_part_is_locked(folder, p->number, &p->locked, err);
    }
    return status;
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
        bool copied = copy && ct_snapshot_copy(&writer->snapshot, plan, NULL) == CT_OK;
        status = fileset_keep(&writer->files, plan, &index, err);
        if (status == CT_OK && !copied) {
            status = fileset_write_one(&writer->files, index, folder, err);
        }
    }
    ct_plan_fini(plan);
    return status;
}

ct_status
ct_writer_share(ct_writer *writer, int fd, const void *theirs, size_t n, ct_error *err)
{
    return ct_writer_folder_borrow(writer) == NULL
               ? ct_fail(err, CT_EINVAL, "no save is open to share data with")
               : ct_snapshot_share(&writer->snapshot, fd, theirs, n, err);
}

static ct_status
write_files(ct_writer *writer, ct_error *err)
{
    ct_status status = ct_snapshot_await(&writer->snapshot, err);
    return status == CT_OK ? fileset_write(&writer->files, writer->staging.folder, err)
                           : status;
}

ct_status
ct_writer_flush(ct_writer *writer, ct_error *err)
{
    return ct_writer_folder_borrow(writer) == NULL ? CT_OK : write_files(writer, err);
}

ct_status
ct_writer_show(ct_writer *writer, ct_error *err)
{
    ct_status status = ct_writer_flush(writer, err);
    return status != CT_OK || ct_writer_folder_borrow(writer) == NULL ||
                   writer->staging.part != NULL
               ? status
               : ct_staging_show(&writer->staging, err);
}

ct_status
ct_writer_remove_after(ct_writer *writer, const char *path, ct_error *err)
{
    void *block = (void *)writer->doomed;
    if (ct_writer_folder_borrow(writer) == NULL || writer->staging.part != NULL) {
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

/* Ends this process's part of another process's save. */
static ct_status
finish_part(ct_writer *writer, ct_error *err)
{
    ct_error unseen;
    ct_manifest written = {0};
    const ct_staging *staging = &writer->staging;
    ct_status status = write_files(writer, err);
    if (status == CT_OK) {
        status = fileset_sync_own(&writer->files, staging->folder, &written, err);
    }
    const ct_status ended =
        ct_part_end(staging->lock, staging->part, &written,
                    status == CT_OK ? NULL : err, status == CT_OK ? err : &unseen);
    ct_manifest_fini(&written);
    return status == CT_OK ? ended : status;
}

static ct_status
await_parts(const ct_writer *writer, ct_manifest *reported, ct_error *err)
{
    ct_status status = CT_OK;
    const ct_deadline deadline = ct_deadline_after(writer->parts_seconds);
    for (size_t i = 0; i < writer->n_parts && status == CT_OK; i++) {
        const struct part *p = &writer->parts[i];
        status = ct_part_await(writer->staging.folder, p->number, p->locked, deadline,
                               reported, err);
    }
    return status;
}

/* The order is what makes a save whole or absent: bytes, manifest, and only then the
 * name. Old folders are removed last, when the new one can take their place. */
static ct_status
finish(ct_writer *writer, ct_error *err)
{
    ct_manifest reported = {0};
    const char *folder = writer->staging.folder;
    ct_status status = write_files(writer, err);
    if (status == CT_OK) {
        status = await_parts(writer, &reported, err);
    }
    if (status == CT_OK) {
        status = ct_staging_adopt(&writer->staging, err);
    }
    if (status == CT_OK) {
        status = fileset_sync(&writer->files, folder, &reported, err);
    }
    ct_manifest_fini(&reported);
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
    const bool is_part = writer->staging.part != NULL;
    if ((is_part ? finish_part : finish)(writer, &err) != CT_OK) {
        writer->error = err;
    }
    drop_files(writer); /* a file in use may keep a folder from being removed */
    ct_staging_close(&writer->staging);
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
    ct_snapshot_reserve(&writer->snapshot, device, writer->reserved);
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
    if (bytes > ct_snapshot_bytes(&writer->snapshot)) {
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
