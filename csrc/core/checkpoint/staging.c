/* Renames, links and locks of the folder that a save is written to. The header says
 * which names exist when; each function here keeps that true at every moment, so that
 * a kill between two calls of the system loses no folder. */
#define _GNU_SOURCE
#include "core/checkpoint/staging.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/checkpoint/parts.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char prefix[] = ".ctrainer-saving-";

/* Below outer: the old NAME, during a replacement in two renames. */
static const char replaced[] = ".replaced";

/* Below outer: the old NAME, while PARENT/NAME is a link to outer/NAME. */
static const char hidden[] = ".hidden";

enum {
    ATTEMPTS = 8,
    TARGET_BYTES = 64 /* more than the first part of such a link has */
};

void
ct_staging_forget(ct_staging *staging)
{
    if (staging->outer != NULL && staging->lock >= 0) {
        (void)close(staging->lock);
    }
    ct_free(staging->part);
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

void
ct_staging_close(ct_staging *staging)
{
    if (staging->outer != NULL && staging->part == NULL &&
        recover(staging->parent, staging->outer)) {
        (void)!ct_remove_tree(staging->outer, NULL); /* the next save tries again */
    }
    ct_staging_forget(staging);
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

ct_status
ct_staging_open(ct_staging *staging, const char *final_folder, ct_error *err)
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
        ct_staging_forget(&made); /* nothing of ours is on the disk */
    }
    else {
        ct_staging_close(&made);
    }
    return status;
}

ct_status
ct_staging_join(ct_staging *staging, const char *folder, int number, ct_error *err)
{
    ct_staging made = {.lock = -1};
    made.final = ct_path_join("", folder);
    made.folder = ct_path_join("", folder);
    made.outer = ct_path_join("", folder);
    made.part = ct_part_path(folder, number);
    if (made.final == NULL || made.folder == NULL || made.outer == NULL ||
        made.part == NULL) {
        ct_staging_forget(&made);
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", folder);
    }
    made.outer[ct_path_name(folder) - folder] = '\0';
    made.lock = ct_part_open(made.part, err);
    if (made.lock < 0) {
        ct_staging_forget(&made);
        return CT_EIO;
    }
    *staging = made;
    return CT_OK;
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

ct_status
ct_staging_show(ct_staging *staging, ct_error *err)
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

ct_status
ct_staging_adopt(ct_staging *staging, ct_error *err)
{
    if (staging->shown &&
        !unlink_shown(staging->parent, staging->outer, ct_path_name(staging->final))) {
        return ct_fail_io(err, errno, "put back", staging->final);
    }
    staging->shown = false;
    return staging->had_final ? CT_OK
                              : adopt(staging->final, staging->folder, true, err);
}

/* The old folder moves to outer, to be removed by ct_staging_close(). Returns 0, or the
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

ct_status
ct_staging_publish(ct_staging *staging, ct_error *err)
{
    int failed = rename(staging->folder, staging->final) < 0 ? errno : 0;
    if (failed == ENOTEMPTY || failed == EEXIST) {
        char *old = NULL;
        failed = exchange(staging, &old);
        if (failed == 0 && old != NULL && !staging->had_final) {
            /* The manifest lacks what others have written since ct_staging_adopt(). */
            (void)adopt(old, staging->final, false, NULL);
        }
        ct_free(old);
    }
    return failed != 0 ? ct_fail_io(err, failed, "put in place", staging->final)
                       : ct_sync_folder(staging->parent, err);
}

ct_status
ct_staging_bury(ct_staging *staging, const char *folder, ct_error *err)
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
