#define _GNU_SOURCE
#include "core/checkpoint/writer.h"

#include "core/base/alloc.h"
#include "core/checkpoint/arena.h"
#include "core/checkpoint/plan.h"
#include "core/base/io.h"
#include "core/base/owner.h"
#include "core/checkpoint/staging.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

enum {
    SMALL_PAGE = 4096
};

/* While `started`, everything but `done` belongs to the thread. */
struct ct_writer {
    ct_staging staging; /* .outer != NULL: a save is open or being written */
    ct_fileset files;
    char **doomed; /* folders to remove once the save is in place; owned */
    size_t n_doomed, doomed_capacity;
    ct_arena arena;
    size_t reserved; /* bytes that the thread is to ready */
    ct_error error;  /* kept; code CT_OK: none */
    ct_owner owner;  /* the process that began the save or started the thread */
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

static void
drop_files(ct_writer *writer)
{
    ct_fileset_clear(&writer->files);
    for (size_t i = 0; i < writer->n_doomed; i++) {
        ct_free(writer->doomed[i]);
    }
    writer->n_doomed = 0;
    ct_arena_reset(&writer->arena);
}

/* A forked child owns no folder and has no such thread, which may have been changing
 * everything at the time of the fork: the child's copy of that is left as it is. */
static void
forget_parents_save(ct_writer *writer)
{
    if (writer->started) {
        writer->staging = (ct_staging){.lock = -1};
        writer->files = (ct_fileset){0};
        writer->arena = (ct_arena){0};
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

/* Ends what the thread or the caller has under way. */
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
    ct_fileset_fini(&writer->files);
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
        bool copied = copy && ct_arena_copy(&writer->arena, plan, NULL) == CT_OK;
        status = ct_fileset_keep(&writer->files, plan, &index, err);
        if (status == CT_OK && !copied) {
            status = ct_fileset_write_one(&writer->files, index, folder, err);
        }
    }
    ct_plan_fini(plan);
    return status;
}

ct_status
ct_writer_flush(ct_writer *writer, ct_error *err)
{
    const char *folder = ct_writer_folder_borrow(writer);
    return folder == NULL ? CT_OK : ct_fileset_write(&writer->files, folder, err);
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

static ct_status
finish(ct_writer *writer, ct_error *err)
{
    const char *folder = writer->staging.folder;
    ct_status status = ct_fileset_write(&writer->files, folder, err);
    if (status == CT_OK) {
        status = ct_staging_adopt(&writer->staging, err);
    }
    if (status == CT_OK) {
        status = ct_fileset_sync(&writer->files, folder, err);
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

static void *
run_reserve(void *arg)
{
    ct_writer *writer = arg;
    volatile unsigned char *data = ct_arena_take(&writer->arena, writer->reserved);
    for (size_t at = 0; data != NULL && at < writer->reserved; at += SMALL_PAGE) {
        data[at] = 0;
    }
    ct_arena_reset(&writer->arena);
    return NULL;
}

/* Signals are the main thread's: a handler must not run on this one. */
static int
start_thread(ct_writer *writer, void *(*run)(void *))
{
    sigset_t all, before;
    writer->owner = ct_owner_here();
    writer->started = true;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&writer->thread, NULL, run, writer);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    writer->started = failed == 0;
    return failed;
}

ct_status
ct_writer_reserve(ct_writer *writer, size_t bytes, ct_error *err)
{
    settle(writer);
    if (writer->staging.outer != NULL) {
        return ct_fail(err, CT_EINVAL, "%s is being saved: reserve memory before",
                       writer->staging.final);
    }
    if (bytes > ct_arena_bytes(&writer->arena)) {
        writer->reserved = bytes;
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
