#define _GNU_SOURCE
#include "core/checkpoint/staging.h"

#include "core/base/alloc.h"
#include "core/base/io.h"

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

/* Below outer: NAME as it was, while it is replaced without an exchange of names. */
static const char replaced[] = ".replaced";

/* Below outer: NAME as it was, while PARENT/NAME is a link to outer/NAME. */
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
    ct_free(staging->folder);
    ct_free(staging->outer);
    ct_free(staging->parent);
    ct_free(staging->final);
    *staging = (ct_staging){.lock = -1};
}

/* PARENT/NAME is away if its replacement was cut off between two renames. What was to
 * take its place is whole: it is renamed last of all. */
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

/* PARENT/NAME is a link to an unfinished save: takes it away, and puts back what had
 * the name. False where that could not be. */
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

/* False where a folder is still without its name: outer must stay. */
static bool
unlink_all_shown(const char *parent, const char *outer)
{
    bool done = true;
    struct dirent *entry;
    DIR *dir = opendir(outer);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] != '.') {
            done = unlink_shown(parent, outer, entry->d_name) && done;
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return done;
}

/* The same for all that a save may have taken a name from. */
static bool
recover(const char *parent, const char *outer)
{
    bool done = unlink_all_shown(parent, outer);
    struct dirent *entry;
    char *old = ct_path_join(outer, replaced);
    DIR *dir = old == NULL ? NULL : opendir(old);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
            done =
                done && (put_back(parent, outer, name) || put_back(parent, old, name));
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    ct_free(old);
    return done;
}

void
ct_staging_close(ct_staging *staging)
{
    if (staging->outer != NULL && recover(staging->parent, staging->outer)) {
        (void)!ct_remove_tree(staging->outer, NULL); /* the next save tries again */
    }
    ct_staging_forget(staging);
}

/* A folder nobody has locked belonged to a process that is gone. */
static void
remove_if_stale(const char *parent, const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && recover(parent, path)) {
        (void)!ct_remove_tree(path, NULL);
    }
    (void)close(fd);
}

void
ct_staging_recover(const char *parent)
{
    struct dirent *entry;
    DIR *dir = opendir(parent);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        char *path = NULL;
        if (strncmp(entry->d_name, prefix, sizeof prefix - 1) == 0 &&
            (path = ct_path_join(parent, entry->d_name)) != NULL) {
            remove_if_stale(parent, path);
        }
        ct_free(path);
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
}

/* Between making a folder and locking it another process may take it for stale and
 * remove it; hence the look whether the locked one still has its name. */
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

static ct_status
name_folders(ct_staging *staging, const char *final_folder, ct_error *err)
{
    char outer[sizeof prefix + 6];
    (void)snprintf(outer, sizeof outer, "%sXXXXXX", prefix);
    const char *name = ct_path_name(final_folder);
    size_t n = (size_t)(name - final_folder);
    staging->final = ct_path_join("", final_folder);
    staging->parent = n == 0 ? ct_path_join("", ".") : ct_path_join("", final_folder);
    if (staging->parent != NULL) {
        staging->parent[n > 1 ? n - 1 : 1] = '\0'; /* "." and "/" keep their one byte */
        staging->outer = ct_path_join(staging->parent, outer);
    }
    return staging->final == NULL || staging->outer == NULL
               ? ct_fail(err, CT_ENOMEM, "no memory for the path %s", final_folder)
               : CT_OK;
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
    ct_status status = name_folders(&made, final_folder, err);
    if (status == CT_OK) {
        status = open_folders(&made, final_folder, err);
    }
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

/* Out of the link's way; errno tells why not. */
static int
hide_final(const ct_staging *staging)
{
    char *aside = ct_path_join(staging->outer, hidden);
    char *old =
        aside == NULL ? NULL : ct_path_join(aside, ct_path_name(staging->final));
    int failed = old == NULL ? ENOMEM : 0;
    if (failed == 0 && mkdir(aside, 0777) < 0 && errno != EEXIST) {
        failed = errno;
    }
    if (failed == 0 && rename(staging->final, old) < 0) {
        failed = errno;
    }
    ct_free(old);
    ct_free(aside);
    errno = failed;
    return failed == 0 ? 0 : -1;
}

ct_status
ct_staging_show(ct_staging *staging, ct_error *err)
{
    const char *name = ct_path_name(staging->final);
    if (staging->shown) {
        return CT_OK;
    }
    if (staging->had_final && hide_final(staging) < 0) {
        return ct_fail_io(err, errno, "put aside", staging->final);
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

static ct_status
adopt_entry(const ct_staging *staging, const char *name, ct_error *err)
{
    ct_status status = CT_OK;
    char *from = ct_path_join(staging->final, name);
    char *to = ct_path_join(staging->folder, name);
    if (from == NULL || to == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory for a path");
    }
    else if (rename(from, to) < 0) {
        status = ct_fail_io(err, errno, "take over", from);
    }
    ct_free(to);
    ct_free(from);
    return status;
}

ct_status
ct_staging_adopt(ct_staging *staging, ct_error *err)
{
    ct_status status = CT_OK;
    struct dirent *entry;
    if (staging->shown &&
        !unlink_shown(staging->parent, staging->outer, ct_path_name(staging->final))) {
        return ct_fail_io(err, errno, "put back", staging->final);
    }
    staging->shown = false;
    DIR *dir = staging->had_final ? NULL : opendir(staging->final);
    if (dir == NULL) {
        return CT_OK;
    }
    while (status == CT_OK && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            status = adopt_entry(staging, entry->d_name, err);
        }
    }
    (void)closedir(dir);
    if (status == CT_OK && rmdir(staging->final) < 0) {
        status = ct_fail_io(err, errno, "replace", staging->final);
    }
    return status;
}

/* Two renames; errno tells why not. */
static int
replace_in_steps(const ct_staging *staging, const char *away)
{
    char *old = ct_path_join(away, ct_path_name(staging->final));
    if (old == NULL) {
        errno = ENOMEM;
        return -1;
    }
    int failed = rename(staging->final, old) < 0 ? errno : 0;
    if (failed == 0 && rename(staging->folder, staging->final) < 0) {
        failed = errno;
        (void)!rename(old, staging->final); /* failing, it stays where recovery looks */
    }
    ct_free(old);
    errno = failed;
    return failed == 0 ? 0 : -1;
}

/* The old folder ends up in outer, where closing removes it. */
static int
exchange(const ct_staging *staging)
{
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, staging->folder, AT_FDCWD, staging->final,
                  RENAME_EXCHANGE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return -1;
    }
#endif
    char *away = ct_path_join(staging->outer, replaced);
    int failed = away == NULL ? ENOMEM : 0;
    if (failed == 0 && mkdir(away, 0777) < 0 && errno != EEXIST) {
        failed = errno;
    }
    if (failed == 0 && replace_in_steps(staging, away) < 0) {
        failed = errno;
    }
    ct_free(away);
    errno = failed;
    return failed == 0 ? 0 : -1;
}

ct_status
ct_staging_publish(ct_staging *staging, ct_error *err)
{
    int failed = rename(staging->folder, staging->final);
    if (failed < 0 && (errno == ENOTEMPTY || errno == EEXIST)) {
        failed = exchange(staging);
    }
    return failed < 0 ? ct_fail_io(err, errno, "put in place", staging->final)
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
