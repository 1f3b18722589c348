/* Reading, writing, syncing and walking folders. Every call that the system interrupts
 * is made again, and every short write continued: callers see all bytes or an error
 * with the path.
 *
 * Errors keep errno beside the text, because the binding raises OSError with both. */
#define _GNU_SOURCE

#include "core/base/io.h"

#include "core/base/alloc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

ct_status
ct_fail_io(ct_error *err, int os_error, const char *doing, const char *path)
{
    char reason[128];
    /* GNU's strerror_r, the thread-safe one, may return a constant instead. */
    const char *text = strerror_r(os_error, reason, sizeof reason);
    ct_status status = ct_fail(err, CT_EIO, "cannot %s %s: %s", doing, path, text);
    if (err != NULL) {
        err->os_error = os_error;
    }
    return status;
}

char *
ct_path_join(const char *folder, const char *name)
{
    size_t n = strlen(folder) + strlen(name) + 2;
    char *path = ct_alloc(n);
    if (path != NULL) {
        (void)snprintf(path, n, "%s%s%s", folder, *folder == '\0' ? "" : "/", name);
    }
    return path;
}

const char *
ct_path_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

bool
ct_path_is_inside(const char *name, size_t n)
{
    size_t at = 0;
    if (memchr(name, '\0', n) != NULL) {
        return false;
    }
    /* Up to n itself: a name that ends in a slash has an empty last part. */
    while (at <= n) {
        const char *slash = memchr(name + at, '/', n - at);
        size_t part = slash == NULL ? n - at : (size_t)(slash - name) - at;
        if (part == 0 || (part == 2 && memcmp(name + at, "..", 2) == 0)) {
            return false;
        }
        at += part + 1;
    }
    return true;
}

static ct_status
sync_path(const char *path, int flags, int (*sync)(int), ct_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0) {
        return ct_fail_io(err, errno, "open", path);
    }
    /* close may overwrite errno. */
    int failed = sync(fd) < 0 ? errno : 0;
    (void)close(fd);
    /* EINVAL: a file system that has nothing to synchronise. */
    return failed == 0 || failed == EINVAL
               ? CT_OK
               : ct_fail_io(err, failed, "synchronise", path);
}

/* Sizes and data matter after a loss of power, times do not: fdatasync is enough. */
ct_status
ct_sync_file(const char *path, ct_error *err)
{
    return sync_path(path, 0, fdatasync, err);
}

ct_status
ct_sync_folder(const char *path, ct_error *err)
{
    return sync_path(path, O_DIRECTORY, fsync, err);
}

int
ct_open_read(const char *path, uint64_t *bytes, ct_error *err)
{
    struct stat info;
    /* Opening a pipe that nobody writes to would wait. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        (void)!ct_fail_io(err, errno, "open", path);
        return -1;
    }
    int failed = fstat(fd, &info) < 0 ? errno : S_ISDIR(info.st_mode) ? EISDIR : 0;
    if (failed == 0 && S_ISREG(info.st_mode)) {
        *bytes = (uint64_t)info.st_size;
        return fd;
    }
    (void)close(fd);
    if (failed != 0) {
        (void)!ct_fail_io(err, failed, "read", path);
    }
    else {
        (void)!ct_fail(err, CT_EINVAL,
                       "%s: is no regular file, but a pipe, a socket or a device",
                       path);
    }
    return -1;
}

/* O_TMPFILE needs support of the file system; without it the name exists for a moment.
 */
int
ct_open_unnamed(const char *folder)
{
    const int direct = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (direct >= 0) {
        return direct;
    }
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%s/ctrainer-XXXXXX", folder);
    if (n < 0 || (size_t)n >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    const int fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) {
        (void)unlink(path);
    }
    return fd;
}

ct_status
ct_read_at(int fd, void *data, size_t n, uint64_t offset, const char *path,
           ct_error *err)
{
    char *to = data;
    while (n > 0) {
        /* POSIX leaves longer requests undefined. */
        size_t ask = n < SSIZE_MAX ? n : SSIZE_MAX;
        ssize_t got = pread(fd, to, ask, (off_t)offset);
        if (got < 0 && errno != EINTR) {
            return ct_fail_io(err, errno, "read", path);
        }
        /* Another process has cut the file since the size was read. */
        if (got == 0) {
            return ct_fail(err, CT_EINVAL, "%s: ends %zu bytes too soon", path, n);
        }
        if (got > 0) {
            to += got;
            n -= (size_t)got;
            offset += (uint64_t)got;
        }
    }
    return CT_OK;
}

ct_status
ct_write_at(int fd, const void *data, size_t n, uint64_t offset, const char *path,
            ct_error *err)
{
    const char *from = data;
    while (n > 0) {
        size_t ask = n < SSIZE_MAX ? n : SSIZE_MAX;
        ssize_t done = pwrite(fd, from, ask, (off_t)offset);
        /* No progress and no reason either would loop for ever. */
        if (done == 0 || (done < 0 && errno != EINTR)) {
            return ct_fail_io(err, done == 0 ? EIO : errno, "write", path);
        }
        if (done > 0) {
            from += done;
            n -= (size_t)done;
            offset += (uint64_t)done;
        }
    }
    return CT_OK;
}

ct_status
ct_write_file(const char *path, const void *data, size_t n, ct_error *err)
{
    /* O_EXCL: callers that replace a file unlink the old name first, so nobody's open
     * file changes. */
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) {
        return ct_fail_io(err, errno, "create", path);
    }
    ct_status status = ct_write_at(fd, data, n, 0, path, err);
    if (close(fd) < 0 && status == CT_OK) { /* NFS reports a full disk only here */
        status = ct_fail_io(err, errno, "write", path);
    }
    return status;
}

/* Folders: making them, visiting what is below, removing it. */

/* Deeper than any checkpoint, shallow enough for the stack: the limit of the recursion
 * below. */
enum {
    MAX_DEPTH = 32
};

/* A new folder is found after a loss of power once the folder above it is synchronised.
 */
static ct_status
sync_above(const char *path, ct_error *err)
{
    const char *name = ct_path_name(path);
    size_t n = (size_t)(name - path);
    char *above = ct_path_join("", n == 0 ? "." : path);
    if (above == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", path);
    }
    above[n > 1 ? n - 1 : 1] = '\0'; /* "." and "/" keep their one byte */
    ct_status status = ct_sync_folder(above, err);
    ct_free(above);
    return status;
}

ct_status
ct_make_folders(const char *path, ct_error *err)
{
    ct_status status = CT_OK;
    char *copy = ct_path_join("", path);
    if (copy == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path %s", path);
    }
    for (char *at = copy; status == CT_OK && at != NULL;) {
        at = strchr(at + 1, '/');
        if (at != NULL) {
            *at = '\0';
        }
        /* Made rather than looked for: another rank may make the same folder at this
         * moment. */
        if (mkdir(copy, 0777) == 0) {
            status = sync_above(copy, err);
        }
        else if (errno != EEXIST) {
            status = ct_fail_io(err, errno, "make the folder", copy);
        }
        if (at != NULL) {
            *at = '/';
        }
    }
    ct_free(copy);
    return status;
}

/* NOLINTBEGIN(misc-no-recursion): folders nest, at most MAX_DEPTH deep */

typedef struct walk {
    const char *root;
    ct_visit_fn *visit;
    void *arg;
} walk;

static ct_status
walk_folder(const walk *w, const char *relative, int depth, ct_error *err);

static ct_status
walk_entry(const walk *w, const char *folder, const char *name, int depth,
           ct_error *err)
{
    struct stat info, target;
    ct_status status = CT_OK;
    char *path = NULL;
    char *relative = ct_path_join(folder, name);
    if (relative == NULL || (path = ct_path_join(w->root, relative)) == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory for a path below %s", w->root);
    }
    /* lstat, so that a link to a folder is no folder: a circle of links would not
     * end. */
    else if (lstat(path, &info) < 0) {
        status = ct_fail_io(err, errno, "look at", path);
    }
    else if (S_ISDIR(info.st_mode)) {
        status = walk_folder(w, relative, depth + 1, err);
    }
    else if (stat(path, &target) == 0 && S_ISREG(target.st_mode)) {
        status = w->visit(w->arg, relative, 0, err);
    }
    ct_free(path);
    ct_free(relative);
    return status;
}

static ct_status
walk_open(const walk *w, DIR *dir, const char *relative, int depth, ct_error *err)
{
    struct dirent *entry;
    ct_status status = CT_OK;
    /* readdir() returns NULL for an error and at the end: errno says which. */
    while (status == CT_OK && (errno = 0, entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            status = walk_entry(w, relative, entry->d_name, depth, err);
        }
    }
    if (status == CT_OK && errno != 0) {
        status = ct_fail_io(err, errno, "list", w->root);
    }
    return status == CT_OK ? w->visit(w->arg, relative, 1, err) : status;
}

static ct_status
walk_folder(const walk *w, const char *relative, int depth, ct_error *err)
{
    if (depth > MAX_DEPTH) {
        return ct_fail(err, CT_EINVAL, "%s: folders nested deeper than %d", w->root,
                       MAX_DEPTH);
    }
    char *path = ct_path_join(w->root, relative);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", w->root);
    }
    DIR *dir = opendir(path);
    ct_status status = dir == NULL ? ct_fail_io(err, errno, "list", path)
                                   : walk_open(w, dir, relative, depth, err);
    if (dir != NULL) {
        (void)closedir(dir);
    }
    ct_free(path);
    return status;
}

ct_status
ct_walk(const char *folder, ct_visit_fn *visit, void *arg, ct_error *err)
{
    walk w = {.root = folder, .visit = visit, .arg = arg};
    return walk_folder(&w, "", 0, err);
}

/* Empties the folder behind fd without following a link out of it. */
static ct_status
empty_folder(int fd, int depth, const char *path, ct_error *err)
{
    ct_status status = CT_OK;
    struct dirent *entry;
    DIR *dir = fdopendir(fd);
    if (dir == NULL) {
        (void)close(fd);
        return ct_fail_io(err, errno, "list", path);
    }
    while (status == CT_OK && (entry = readdir(dir)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
            /* Relative to the open folder: a path could be replaced by a link in
             * between. */
            unlinkat(fd, name, 0) == 0) {
            continue;
        }
        int below =
            depth == MAX_DEPTH
                ? -1
                : openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (below >= 0) {
            status = empty_folder(below, depth + 1, path, err);
        }
        if (status == CT_OK && unlinkat(fd, name, AT_REMOVEDIR) < 0 &&
            errno != ENOENT) {
            status = ct_fail_io(err, errno, "empty", path);
        }
    }
    (void)closedir(dir);
    return status;
}

/* NOLINTEND(misc-no-recursion) */

ct_status
ct_remove_tree(const char *folder, ct_error *err)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? CT_OK : ct_fail_io(err, errno, "open", folder);
    }
    ct_status status = empty_folder(fd, 0, folder, err);
    if (status == CT_OK && rmdir(folder) < 0 && errno != ENOENT) {
        status = ct_fail_io(err, errno, "remove", folder);
    }
    return status;
}
