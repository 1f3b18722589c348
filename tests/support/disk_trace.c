/* Preloaded, writes to $CT_DISK_TRACE what a process has the disk do, in order: "sync"
 * and "unlink" with the path, "rename" with the path before and after. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void
note(const char *what, const char *path, const char *to)
{
    const char *log = getenv("CT_DISK_TRACE");
    FILE *file = log == NULL ? NULL : fopen(log, "a");
    if (file != NULL) {
        (void)fprintf(file, "%s\t%s\t%s\n", what, path, to);
        (void)fclose(file);
    }
}

static int
synced(int status, int fd)
{
    char link[64], path[PATH_MAX] = {0};
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (status == 0 && readlink(link, path, sizeof path - 1) > 0) {
        note("sync", path, "");
    }
    return status;
}

static char *
resolved(const char *path)
{
    static __thread char whole[2][PATH_MAX];
    static __thread int next;
    char *to = whole[next++ % 2];
    if (realpath(path, to) == NULL) {
        (void)snprintf(to, PATH_MAX, "%s", path);
    }
    return to;
}

int
fsync(int fd)
{
    return synced(((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd), fd);
}

int
fdatasync(int fd)
{
    return synced(((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd), fd);
}

int
unlink(const char *path)
{
    const char *source = resolved(path);
    int status = ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
    if (status == 0) {
        note("unlink", source, "");
    }
    return status;
}

int
rename(const char *from, const char *to)
{
    int (*next)(const char *, const char *) =
        (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    const char *source = resolved(from);
    int status = next(from, to);
    if (status == 0) {
        note("rename", source, resolved(to));
    }
    return status;
}

int
renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    int (*next)(int, const char *, int, const char *, unsigned) =
        (int (*)(int, const char *, int, const char *, unsigned))dlsym(RTLD_NEXT,
                                                                       "renameat2");
    const char *source = resolved(from);
    int status = next(from_fd, from, to_fd, to, flags);
    if (status == 0) {
        note("rename", source, resolved(to));
    }
    return status;
}
