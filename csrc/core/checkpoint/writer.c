/* Saves folders of files in the background: memory for snapshots, the folder and the
 * files of a save, and the thread that writes them.
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
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/source.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
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

static arena_chunk *
add_chunk(arena *a, size_t bytes)
{
    void *block = a->chunks;
    bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (ct_grow(&block, &a->chunks_capacity, a->n_chunks + 1, sizeof *a->chunks,
                NULL) != CT_OK) {
        return NULL;
    }
    a->chunks = block;
    if (bytes / 9 > available_bytes() / 10) { /* mmap() overcommits */
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
    a->chunks[a->n_chunks] = (arena_chunk){.data = data, .bytes = bytes};
    return &a->chunks[a->n_chunks++];
}

static void *
arena_take(arena *a, size_t bytes)
{
    if (bytes > SIZE_MAX - PAGE_BYTES) {
        return NULL;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (size_t i = 0; i < a->n_chunks; i++) {
        void *data = take_from(&a->chunks[i], bytes);
        if (data != NULL) {
            return data;
        }
    }
    arena_chunk *chunk = add_chunk(a, bytes);
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
        targets[i] = arena_take(a, piece->n);
        if (targets[i] == NULL) {
            return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s",
                           plan->name);
        }
    }
    return CT_OK;
}

/* Replaces the plan's borrowed bytes by copies. CT_ENOMEM leaves the plan alone. */
static ct_status
arena_copy(arena *a, ct_plan *plan, ct_error *err)
{
    size_t most = 1, n = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        most += plan->pieces[i].n / PORTION_BYTES + 1;
    }
    portion *portions = ct_calloc(most, sizeof *portions);
    unsigned char **targets =
        (unsigned char **)ct_calloc(plan->n_pieces + 1, sizeof(unsigned char *));
    if (portions == NULL || targets == NULL) {
        ct_free((void *)targets);
        ct_free(portions);
        return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s", plan->name);
    }
    ct_status status = take_targets(a, plan, targets, err);
    for (size_t i = 0; status == CT_OK && i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        const unsigned char *from = piece->data;
        for (size_t at = 0; targets[i] != NULL && at < piece->n; at += PORTION_BYTES) {
            size_t left = piece->n - at;
            portions[n++] = (portion){targets[i] + at, from + at,
                                      left < PORTION_BYTES ? left : PORTION_BYTES};
        }
        piece->data = targets[i] != NULL ? targets[i] : piece->data;
    }
    if (status == CT_OK) {
        ct_pool_run(copy_portion, portions, n);
    }
    ct_free((void *)targets);
    ct_free(portions);
    return status;
}

/* ---- the folder of a save --------------------------------------------------------
 *
 * Files go to PARENT/.ctrainer-saving-XXXXXX/NAME; publishing renames that folder to
 * PARENT/NAME. The outer folder is locked while its process lives: the next process
 * that saves there recognises and removes the folders of killed processes.
 *
 * At every moment each folder exists under its final name, or below an outer folder in
 * a place that recovery searches. An outer folder is removed only after all names are
 * restored, and only by the process that has locked it. */

/* Starts as {0}; all strings owned. */
typedef struct ct_staging {
    char *final;    /* PARENT/NAME */
    char *parent;   /* PARENT */
    char *outer;    /* PARENT/.ctrainer-saving-XXXXXX */
    char *folder;   /* outer/NAME, for the files */
    int lock;       /* descriptor of outer, locked; -1 on a file system without locks */
    bool had_final; /* final was there already */
    bool shown;     /* final is a link to folder */
    int buried;     /* folders moved to outer so far */
} ct_staging;

static const char prefix[] = ".ctrainer-saving-";

/* Below outer: the old NAME, during a replacement in two renames. */
static const char replaced[] = ".replaced";

/* Below outer: the old NAME, while PARENT/NAME is a link to outer/NAME. */
static const char hidden[] = ".hidden";

enum {
    ATTEMPTS = 8,
    TARGET_BYTES = 64 /* more than the first part of such a link has */
};

/* Frees *staging and leaves the disk alone, as a forked child must. */
static void
staging_forget(ct_staging *staging)
{
    if (staging->outer != NULL && staging->lock >= 0) {
        (void)close(staging->lock);
    }
    ct_free(staging->folder);
    ct_free(staging->outer);
    ct_free(staging->parent);
    ct_free(staging->final);
    *staging = (ct_staging){.lock = -1};
}

/* PARENT/NAME is missing if a replacement was interrupted between two renames. The
 * new folder is complete then: its rename comes last of all. */
static bool
put_back(const char *parent, const char *outer, const char *name)
{
    char *final = ct_path_join(parent, name), *whole = ct_path_join(outer, name);
    bool there = final != NULL && whole != NULL &&
                 (access(final, F_OK) == 0 || rename(whole, final) == 0);
    ct_free(whole);
    ct_free(final);
    return there;
}

static bool
is_link_into(const char *path, const char *outer)
{
    const char *name = ct_path_name(outer);
    const size_t n = strlen(name);
    char target[TARGET_BYTES];
    const ssize_t got = readlink(path, target, sizeof target);
    return got > 0 && (size_t)got > n && memcmp(target, name, n) == 0 &&
           target[n] == '/';
}

/* Removes PARENT/NAME, a link to an unfinished save, and restores the old folder of
 * that name. False on failure. */
static bool
unlink_shown(const char *parent, const char *outer, const char *name)
{
    char *final = ct_path_join(parent, name), *aside = ct_path_join(outer, hidden);
    char *old = aside == NULL ? NULL : ct_path_join(aside, name);
    bool done = final != NULL && old != NULL &&
                (!is_link_into(final, outer) || unlink(final) == 0) &&
                (access(old, F_OK) != 0 || rename(old, final) == 0);
    ct_free(old);
    ct_free(aside);
    ct_free(final);
    return done;
}

/* Calls visit with the name of each entry of the folder; false once it returns false.
 */
typedef bool visit_fn(void *arg, const char *name);

static bool
each_entry(const char *folder, visit_fn *visit, void *arg)
{
    bool done = true;
    struct dirent *entry;
    DIR *dir = opendir(folder);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            done = visit(arg, entry->d_name) && done;
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return done;
}

typedef struct recovery {
    const char *parent, *outer, *old;
} recovery;

static bool
restore_shown(void *arg, const char *name)
{
    const recovery *r = arg;
    return name[0] == '.' || unlink_shown(r->parent, r->outer, name);
}

static bool
restore_replaced(void *arg, const char *name)
{
    const recovery *r = arg;
    return put_back(r->parent, r->outer, name) || put_back(r->parent, r->old, name);
}

/* Restores all names that a save has taken. False while a folder is without its name:
 * outer must stay. */
static bool
recover(const char *parent, const char *outer)
{
    char *old = ct_path_join(outer, replaced);
    recovery r = {parent, outer, old};
    bool done = each_entry(outer, restore_shown, &r);
    done = done && (old == NULL || each_entry(old, restore_replaced, &r));
    ct_free(old);
    return done;
}

/* Removes the folders, as far as possible, and frees *staging. */
static void
staging_close(ct_staging *staging)
{
    if (staging->outer != NULL && recover(staging->parent, staging->outer)) {
        (void)!ct_remove_tree(staging->outer, NULL); /* the next save tries again */
    }
    staging_forget(staging);
}

/* A folder without a lock belonged to a process that is gone. */
static bool
remove_if_stale(void *arg, const char *name)
{
    char *path =
        strncmp(name, prefix, sizeof prefix - 1) == 0 ? ct_path_join(arg, name) : NULL;
    int fd =
        path == NULL ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && recover(arg, path)) {
        (void)!ct_remove_tree(path, NULL);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    ct_free(path);
    return true;
}

void
ct_staging_recover(const char *parent)
{
    (void)each_entry(parent, remove_if_stale, (void *)parent);
}

/* Between mkdtemp() and flock() another process may find the folder stale and remove
 * it: only a locked folder that still has its name counts. */
static bool
lock_outer(ct_staging *staging)
{
    struct stat locked, named;
    staging->lock = open(staging->outer, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (staging->lock < 0) {
        return false;
    }
    if (flock(staging->lock, LOCK_EX) < 0) {
        return errno != EINTR; /* no locks here: nothing is taken for stale either */
    }
    return fstat(staging->lock, &locked) == 0 && stat(staging->outer, &named) == 0 &&
           locked.st_ino == named.st_ino && locked.st_dev == named.st_dev;
}

static ct_status
make_outer(ct_staging *staging, ct_error *err)
{
    size_t n = strlen(staging->outer);
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        memcpy(staging->outer + n - 6, "XXXXXX", 6);
        if (mkdtemp(staging->outer) == NULL) {
            return ct_fail_io(err, errno, "make a folder in", staging->parent);
        }
        if (lock_outer(staging)) {
            return CT_OK;
        }
        if (staging->lock >= 0) {
            (void)close(staging->lock);
            staging->lock = -1;
        }
    }
    return ct_fail_io(err, EAGAIN, "keep a folder in", staging->parent);
}

/* False when out of memory. */
static bool
name_folders(ct_staging *staging, const char *final_folder)
{
    char outer[sizeof prefix + 6];
    (void)snprintf(outer, sizeof outer, "%sXXXXXX", prefix);
    const char *name = ct_path_name(final_folder);
    size_t n = (size_t)(name - final_folder);
    staging->final = ct_path_join("", final_folder);
    staging->parent = n == 0 ? ct_path_join("", ".") : ct_path_join("", final_folder);
    if (staging->parent != NULL) {
        staging->parent[n > 1 ? n - 1 : 1] = '\0'; /* "." and "/" keep one byte */
        staging->outer = ct_path_join(staging->parent, outer);
    }
    return staging->final != NULL && staging->outer != NULL;
}

static ct_status
open_folders(ct_staging *staging, const char *final_folder, ct_error *err)
{
    struct stat info;
    ct_status status = ct_make_folders(staging->parent, err);
    if (status != CT_OK) {
        return status;
    }
    ct_staging_recover(staging->parent);
    if ((status = make_outer(staging, err)) != CT_OK) {
        return status;
    }
    staging->folder = ct_path_join(staging->outer, ct_path_name(final_folder));
    if (staging->folder == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", final_folder);
    }
    staging->had_final = lstat(staging->final, &info) == 0;
    return mkdir(staging->folder, 0777) == 0
               ? CT_OK
               : ct_fail_io(err, errno, "make the folder", staging->folder);
}

/* Makes the folders, PARENT too, and removes the folders of killed processes. CT_EIO
 * leaves *staging empty. */
static ct_status
staging_open(ct_staging *staging, const char *final_folder, ct_error *err)
{
    ct_staging made = {.lock = -1};
    const char *name = ct_path_name(final_folder);
    if (*name == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return ct_fail(err, CT_EINVAL, "'%s' does not end in a folder's name",
                       final_folder);
    }
    ct_status status =
        name_folders(&made, final_folder)
            ? open_folders(&made, final_folder, err)
            : ct_fail(err, CT_ENOMEM, "no memory for the path %s", final_folder);
    if (status == CT_OK) {
        *staging = made;
    }
    else if (made.folder == NULL && made.lock < 0) {
        staging_forget(&made); /* nothing of ours is on the disk */
    }
    else {
        staging_close(&made);
    }
    return status;
}

/* Moves PARENT/NAME to outer/SUB/NAME, which *moved names for ct_free() even on
 * failure. 0, or the error's number. */
static int
put_aside(const ct_staging *staging, const char *sub, char **moved)
{
    char *aside = ct_path_join(staging->outer, sub);
    int failed = 0;
    *moved = aside == NULL ? NULL : ct_path_join(aside, ct_path_name(staging->final));
    if (*moved == NULL) {
        failed = ENOMEM;
    }
    else if ((mkdir(aside, 0777) < 0 && errno != EEXIST) ||
             rename(staging->final, *moved) < 0) {
        failed = errno;
    }
    ct_free(aside);
    return failed;
}

/* Makes final a link to folder, so that files can be read and written under their
 * final names; an old folder of that name waits in outer. No change on a file system
 * without links. */
static ct_status
staging_show(ct_staging *staging, ct_error *err)
{
    const char *name = ct_path_name(staging->final);
    if (staging->shown) {
        return CT_OK;
    }
    if (staging->had_final) {
        char *moved;
        const int failed = put_aside(staging, hidden, &moved);
        ct_free(moved);
        if (failed != 0) {
            return ct_fail_io(err, failed, "put aside", staging->final);
        }
    }
    char *target = ct_path_join(ct_path_name(staging->outer), name);
    ct_status status =
        target == NULL ? ct_fail(err, CT_ENOMEM, "no memory for a path") : CT_OK;
    staging->shown = target != NULL && symlink(target, staging->final) == 0;
    ct_free(target);
    if (!staging->shown && !unlink_shown(staging->parent, staging->outer, name) &&
        status == CT_OK) {
        status = ct_fail_io(err, errno, "put back", staging->final);
    }
    return status;
}

/* Makes `to` one more name of the file `from`. A file that has the name already stays,
 * unless `over`. On a file system without hard links the file moves. A temporary file
 * that has left meanwhile is no failure. */
static bool
link_file(const char *from, const char *to, bool over)
{
    if (over) {
        (void)unlink(to);
    }
    return link(from, to) == 0 || errno == EEXIST || errno == ENOENT ||
           rename(from, to) == 0;
}

static ct_status adopt(const char *from, const char *to, bool over, ct_error *err);

static ct_status
adopt_entry(const char *from, const char *to, bool over, ct_error *err)
{
    struct stat info;
    if (lstat(from, &info) < 0 || !S_ISDIR(info.st_mode)) {
        return link_file(from, to, over) ? CT_OK
                                         : ct_fail_io(err, errno, "take over", from);
    }
    return mkdir(to, 0777) == 0 || errno == EEXIST
               ? adopt(from, to, over, err)
               : ct_fail_io(err, errno, "make the folder", to);
}

/* Links each file below `from` to a name below `to`: `from` stays whole, whatever
 * fails. Without a folder `from` there is nothing to do. */
static ct_status
adopt(const char *from, const char *to, bool over, ct_error *err)
{
    ct_status status = CT_OK;
    struct dirent *entry;
    DIR *dir = opendir(from);
    while (dir != NULL && status == CT_OK &&
           (errno = 0, entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            char *one = ct_path_join(from, entry->d_name);
            char *other = ct_path_join(to, entry->d_name);
            status = one == NULL || other == NULL
                         ? ct_fail(err, CT_ENOMEM, "no memory for a path")
                         : adopt_entry(one, other, over, err);
            ct_free(other);
            ct_free(one);
        }
    }
    if (status == CT_OK && dir != NULL && errno != 0) {
        status = ct_fail_io(err, errno, "list", from);
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return status;
}

/* Removes the link of staging_show. Without a link, and if final was not there at
 * the start, files that others wrote to final become files of folder, too: after a
 * failure from here on, or a kill, final still has the files. */
static ct_status
staging_adopt(ct_staging *staging, ct_error *err)
{
    if (staging->shown &&
        !unlink_shown(staging->parent, staging->outer, ct_path_name(staging->final))) {
        return ct_fail_io(err, errno, "put back", staging->final);
    }
    staging->shown = false;
    return staging->had_final ? CT_OK
                              : adopt(staging->final, staging->folder, true, err);
}

/* The old folder moves to outer, to be removed by staging_close(). Returns 0, or the
 * error's number; *moved names the old folder for ct_free() even on failure. */
static int
exchange(const ct_staging *staging, char **moved)
{
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, staging->folder, AT_FDCWD, staging->final,
                  RENAME_EXCHANGE) == 0) {
        *moved = ct_path_join("", staging->folder);
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return errno;
    }
#endif
    int failed = put_aside(staging, replaced, moved);
    if (failed == 0 && rename(staging->folder, staging->final) < 0) {
        failed = errno;
        (void)!rename(*moved, staging->final); /* else recovery finds the folder */
    }
    return failed;
}

/* Renames folder to final, in place of an old folder, and syncs PARENT. If the file
 * system can exchange names, final exists at every moment. Otherwise it is missing
 * between two renames: after a failure of the second the old folder is restored,
 * after a kill by ct_staging_recover. */
static ct_status
staging_publish(ct_staging *staging, ct_error *err)
{
    int failed = rename(staging->folder, staging->final) < 0 ? errno : 0;
    if (failed == ENOTEMPTY || failed == EEXIST) {
        char *old = NULL;
        failed = exchange(staging, &old);
        if (failed == 0 && old != NULL && !staging->had_final) {
            /* The manifest lacks what others have written since staging_adopt(). */
            (void)adopt(old, staging->final, false, NULL);
        }
        ct_free(old);
    }
    return failed != 0 ? ct_fail_io(err, failed, "put in place", staging->final)
                       : ct_sync_folder(staging->parent, err);
}

/* Moves another folder of PARENT to outer, to be removed by staging_close. */
static ct_status
staging_bury(ct_staging *staging, const char *folder, ct_error *err)
{
    char name[32];
    (void)snprintf(name, sizeof name, ".old-%d", staging->buried++);
    char *grave = ct_path_join(staging->outer, name);
    if (grave == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", folder);
    }
    ct_status status = rename(folder, grave) == 0 || errno == ENOENT
                           ? CT_OK
                           : ct_fail_io(err, errno, "remove", folder);
    ct_free(grave);
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
    if (writer->started) {
        writer->staging = (ct_staging){.lock = -1};
        writer->files = (fileset){0};
        writer->arena = (arena){0};
        writer->doomed = NULL;
        writer->n_doomed = writer->doomed_capacity = 0;
    }
    else {
        staging_forget(&writer->staging);
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
    staging_close(&writer->staging);
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
    return staging_open(&writer->staging, final_folder, err);
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
        bool copied = copy && arena_copy(&writer->arena, plan, NULL) == CT_OK;
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
    return folder == NULL ? CT_OK : fileset_write(&writer->files, folder, err);
}

ct_status
ct_writer_show(ct_writer *writer, ct_error *err)
{
    ct_status status = ct_writer_flush(writer, err);
    return status != CT_OK || ct_writer_folder_borrow(writer) == NULL
               ? status
               : staging_show(&writer->staging, err);
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
    ct_status status = fileset_write(&writer->files, folder, err);
    if (status == CT_OK) {
        status = staging_adopt(&writer->staging, err);
    }
    if (status == CT_OK) {
        status = fileset_sync(&writer->files, folder, err);
    }
    if (status == CT_OK) {
        status = staging_publish(&writer->staging, err);
    }
    for (size_t i = 0; i < writer->n_doomed && status == CT_OK; i++) {
        status = staging_bury(&writer->staging, writer->doomed[i], err);
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
    staging_close(&writer->staging);
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
    volatile unsigned char *data = arena_take(&writer->arena, writer->reserved);
    for (size_t at = 0; data != NULL && at < writer->reserved; at += SMALL_PAGE) {
        data[at] = 0;
    }
    arena_reset(&writer->arena);
    return NULL;
}

/* Signal handlers must run on the main thread, not on this thread. */
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
    if (bytes > arena_bytes(&writer->arena)) {
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
