#define _GNU_SOURCE
#include "core/base/io.h"

#include "core/base/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    PIECES_AT_ONCE = 256
};

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

/* Drops the first `done` bytes of v[0..n); returns how many entries are used up. */
static int
advance(struct iovec *v, int n, size_t done)
{
    int used = 0;
    while (used < n && done >= v[used].iov_len) {
        done -= v[used++].iov_len;
    }
    if (used < n) {
        v[used].iov_base = (char *)v[used].iov_base + done;
        v[used].iov_len -= done;
    }
    return used;
}

static int
write_all(int fd, struct iovec *v, int n)
{
    while (n > 0) {
        ssize_t done = writev(fd, v, n);
        if (done == 0) {
            errno =
                EIO; /* neither bytes nor a reason: asking again could go on for ever */
        }
        if (done == 0 || (done < 0 && errno != EINTR)) {
            return -1;
        }
        int used = advance(v, n, done < 0 ? 0 : (size_t)done);
        v += used;
        n -= used;
    }
    return 0;
}

static int
write_pieces(int fd, const ct_piece *pieces, size_t n)
{
    struct iovec v[PIECES_AT_ONCE];
    for (size_t at = 0; at < n;) {
        int k = 0;
        for (; k < PIECES_AT_ONCE && at < n; at++) {
            if (pieces[at].n > 0) {
                v[k].iov_base = (void *)pieces[at].data; /* writev's type */
                v[k++].iov_len = pieces[at].n;
            }
        }
        if (write_all(fd, v, k) < 0) {
            return -1;
        }
    }
    return 0;
}

ct_status
ct_write_file(const char *path, const ct_piece *pieces, size_t n, ct_error *err)
{
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) {
        return ct_fail_io(err, errno, "create", path);
    }
    int failed = write_pieces(fd, pieces, n) < 0 ? errno : 0;
    if (close(fd) < 0 && failed == 0) { /* NFS tells of a full disk only here */
        failed = errno;
    }
    return failed == 0 ? CT_OK : ct_fail_io(err, failed, "write", path);
}

static ct_status
sync_path(const char *path, int flags, int (*sync)(int), ct_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0) {
        return ct_fail_io(err, errno, "open", path);
    }
    int failed = sync(fd) < 0 ? errno : 0;
    (void)close(fd);
    /* EINVAL: a file system that has nothing to synchronise. */
    return failed == 0 || failed == EINVAL
               ? CT_OK
               : ct_fail_io(err, failed, "synchronise", path);
}

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

ct_status
ct_read_at(int fd, void *data, size_t n, uint64_t offset, const char *path,
           ct_error *err)
{
    char *to = data;
    while (n > 0) {
        size_t ask = n < SSIZE_MAX ? n : SSIZE_MAX;
        ssize_t got = pread(fd, to, ask, (off_t)offset);
        if (got < 0 && errno != EINTR) {
            return ct_fail_io(err, errno, "read", path);
        }
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
