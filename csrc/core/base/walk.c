/* Folders: making them, visiting what is below, removing it. */
#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/base/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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
    while (status == CT_OK && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            status = walk_entry(w, relative, entry->d_name, depth, err);
        }
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
