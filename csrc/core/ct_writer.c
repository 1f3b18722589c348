#define _GNU_SOURCE
#include "core/ct_writer.h"

#include "core/ct_alloc.h"
#include "core/ct_arena.h"
#include "core/ct_io.h"
#include "core/ct_manifest.h"
#include "core/ct_staging.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file of ours as it was right after it was written: an override may have changed it
 * since, and then its checksum is worked out anew. */
typedef struct file {
    ct_plan plan;
    bool written;
    struct stat as_written;
} file;

/* While `started`, everything but `done` belongs to the thread. */
struct ct_writer {
    ct_staging staging; /* .outer != NULL: a save is open or being written */
    file *files;
    size_t n_files, files_capacity;
    char **doomed; /* folders to remove once the save is in place; owned */
    size_t n_doomed, doomed_capacity;
    ct_arena arena;
    ct_error error; /* kept; code CT_OK: none */
    pid_t owner;    /* the process that started the thread */
    pthread_t thread;
    bool started;
    atomic_bool done;
};

ct_writer *
ct_writer_new(void)
{
    return ct_calloc(1, sizeof(ct_writer));
}

static void
drop_files(ct_writer *writer)
{
    for (size_t i = 0; i < writer->n_files; i++) {
        ct_plan_fini(&writer->files[i].plan);
    }
    for (size_t i = 0; i < writer->n_doomed; i++) {
        ct_free(writer->doomed[i]);
    }
    writer->n_files = 0;
    writer->n_doomed = 0;
    ct_arena_reset(&writer->arena);
}

/* Ends what the thread or the caller has under way. A forked child has no such thread
 * and owns no folder. */
static void
settle(ct_writer *writer)
{
    if (writer->owner != getpid()) {
        ct_staging_forget(&writer->staging);
        drop_files(writer);
    }
    else if (writer->started) {
        (void)pthread_join(writer->thread, NULL);
    }
    writer->started = false;
}

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
        ct_arena_fini(&writer->arena);
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
    ct_arena_fini(&writer->arena);
    ct_free((void *)writer->doomed);
    ct_free(writer->files);
    ct_free(writer);
}

size_t
ct_writer_snapshot_bytes(const ct_writer *writer)
{
    return writer->started ? 0 : ct_arena_bytes(&writer->arena);
}

bool
ct_writer_pending(const ct_writer *writer)
{
    return writer->started && writer->owner == getpid() &&
           !atomic_load_explicit(&writer->done, memory_order_acquire);
}

const char *
ct_writer_folder_borrow(const ct_writer *writer)
{
    return writer->started ? NULL : writer->staging.folder;
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
    writer->owner = getpid();
    return ct_staging_open(&writer->staging, final_folder, err);
}

static ct_status
write_file(ct_writer *writer, file *f, ct_error *err)
{
    char *slash = NULL;
    ct_status status = CT_OK;
    if (f->written) {
        return CT_OK;
    }
    char *path = ct_path_join(writer->staging.folder, f->plan.name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path of %s", f->plan.name);
    }
    if (strchr(f->plan.name, '/') != NULL && (slash = strrchr(path, '/')) != NULL) {
        *slash = '\0';
        status = ct_make_folders(path, err);
        *slash = '/';
    }
    ct_plan_seal(&f->plan);
    if (status == CT_OK) {
        status = ct_plan_write(&f->plan, path, err);
    }
    if (status == CT_OK) {
        f->written = stat(path, &f->as_written) == 0;
    }
    ct_free(path);
    return status;
}

static file *
find_file(ct_writer *writer, const char *name)
{
    for (size_t i = 0; i < writer->n_files; i++) {
        if (strcmp(writer->files[i].plan.name, name) == 0) {
            return &writer->files[i];
        }
    }
    return NULL;
}

/* Moves *plan into the list, over one of the same name. */
static ct_status
keep_plan(ct_writer *writer, ct_plan *plan, file **kept, ct_error *err)
{
    file *f = find_file(writer, plan->name);
    if (f != NULL) {
        ct_plan_fini(&f->plan);
    }
    else {
        void *block = writer->files;
        ct_status status = ct_grow(&block, &writer->files_capacity, writer->n_files + 1,
                                   sizeof *writer->files, err);
        writer->files = block;
        if (status != CT_OK) {
            return status;
        }
        f = &writer->files[writer->n_files++];
    }
    *f = (file){.plan = *plan};
    *plan = (ct_plan){0};
    *kept = f;
    return CT_OK;
}

ct_status
ct_writer_add(ct_writer *writer, ct_plan *plan, bool copy, ct_error *err)
{
    file *f = NULL;
    ct_status status = CT_OK;
    if (ct_writer_folder_borrow(writer) == NULL || plan->name == NULL) {
        status = ct_fail(err, CT_EINVAL, "no save is open to add %s to",
                         plan->name == NULL ? "a file" : plan->name);
    }
    else {
        bool copied = copy && ct_arena_copy(&writer->arena, plan, NULL) == CT_OK;
        status = keep_plan(writer, plan, &f, err);
        if (status == CT_OK && !copied) {
            status = write_file(writer, f, err);
        }
    }
    ct_plan_fini(plan);
    return status;
}

static ct_status
write_files(ct_writer *writer, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < writer->n_files && status == CT_OK; i++) {
        status = write_file(writer, &writer->files[i], err);
    }
    return status;
}

ct_status
ct_writer_flush(ct_writer *writer, ct_error *err)
{
    return ct_writer_folder_borrow(writer) == NULL ? CT_OK : write_files(writer, err);
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
    writer->doomed = block;
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

/* What is visited while the folder is put on the disk and into the manifest. */
typedef struct census {
    ct_writer *writer;
    ct_manifest manifest;
} census;

static bool
is_untouched(const file *f, const struct stat *now)
{
    const struct stat *then = &f->as_written;
    return f->written && then->st_ino == now->st_ino && then->st_size == now->st_size &&
           then->st_mtim.tv_sec == now->st_mtim.tv_sec &&
           then->st_mtim.tv_nsec == now->st_mtim.tv_nsec;
}

static ct_status
count_file(census *c, const char *name, const char *path, ct_error *err)
{
    struct stat now;
    uint32_t crc = 0;
    uint64_t bytes = 0;
    ct_status status = CT_OK;
    const file *f = find_file(c->writer, name);
    if (stat(path, &now) < 0) {
        return ct_fail_io(err, errno, "look at", path);
    }
    if (f != NULL && is_untouched(f, &now)) {
        crc = f->plan.crc32c;
        bytes = f->plan.bytes;
    }
    else {
        status = ct_checksum_file(path, &crc, &bytes, err);
    }
    if (status == CT_OK) {
        status = ct_sync_file(path, err);
    }
    return status == CT_OK
               ? ct_manifest_add(&c->manifest, name, strlen(name), bytes, crc, err)
               : status;
}

static ct_status
visit(void *arg, const char *relative, int is_folder, ct_error *err)
{
    census *c = arg;
    const char *folder = c->writer->staging.folder;
    if (strcmp(relative, CT_MANIFEST_NAME) == 0) {
        return CT_OK; /* somebody's copy of another folder's: ours replaces it */
    }
    char *path = ct_path_join(folder, relative);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status =
        is_folder ? ct_sync_folder(path, err) : count_file(c, relative, path, err);
    ct_free(path);
    return status;
}

static ct_status
finish(ct_writer *writer, ct_error *err)
{
    census c = {.writer = writer};
    const char *folder = writer->staging.folder;
    ct_status status = write_files(writer, err);
    if (status == CT_OK) {
        status = ct_staging_adopt(&writer->staging, err);
    }
    if (status == CT_OK) {
        status = ct_walk(folder, visit, &c, err);
    }
    if (status == CT_OK) {
        status = ct_manifest_write(&c.manifest, folder, err);
    }
    if (status == CT_OK) {
        status = ct_sync_folder(folder, err);
    }
    if (status == CT_OK) {
        status = ct_staging_publish(&writer->staging, err);
    }
    for (size_t i = 0; i < writer->n_doomed && status == CT_OK; i++) {
        status = ct_staging_bury(&writer->staging, writer->doomed[i], err);
    }
    ct_manifest_fini(&c.manifest);
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
run_thread(void *arg)
{
    ct_writer *writer = arg;
    finish_and_keep(writer);
    atomic_store_explicit(&writer->done, true, memory_order_release);
    return NULL;
}

/* Signals are the main thread's: a handler must not run on this one. */
static int
start_thread(ct_writer *writer)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&writer->thread, NULL, run_thread, writer);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

ct_status
ct_writer_commit(ct_writer *writer, ct_error *err)
{
    if (ct_writer_folder_borrow(writer) == NULL) {
        return ct_fail(err, CT_EINVAL, "no save is open to commit");
    }
    atomic_store(&writer->done, false);
    writer->started = true;
    if (start_thread(writer) != 0) {
        writer->started = false;
        finish_and_keep(writer); /* no thread to be had: here and now */
    }
    return CT_OK;
}
