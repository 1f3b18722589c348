/* Files by which processes report the end of their part of a save.
 *
 * Another process may read a report while the text is being written: the last
 * characters show whether the text is complete, "}}\n" of a manifest or "\n" of "!ERRNO
 * MESSAGE". */
#define _GNU_SOURCE
#include "core/checkpoint/parts.h"

#include "core/base/alloc.h"
#include "core/base/buf.h"
#include "core/base/io.h"
#include "core/checkpoint/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SIZE_LIMIT = 16 << 20, /* of the list of one process's files */
};

static const double first_nap = 0.001, longest_nap = 0.05;

char *
ct_part_path(const char *folder, int number)
{
    char name[32];
    const size_t n = (size_t)(ct_path_name(folder) - folder);
    (void)snprintf(name, sizeof name, ".part-%d", number);
    char *path = ct_path_join(folder, name);
    if (path != NULL) {
        memmove(path + n, name, strlen(name) + 1); /* in place of the folder's name */
    }
    return path;
}

int
ct_part_open(const char *path, ct_error *err)
{
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        (void)!ct_fail_io(err, errno, "make", path);
        return -1;
    }
    /* On a file system without locks ct_part_is_locked() finds none. */
    (void)!flock(fd, LOCK_EX | LOCK_NB);
    return fd;
}

ct_status
ct_part_end(int fd, const char *path, ct_manifest *written, const ct_error *failure,
            ct_error *err)
{
    ct_buf text = {0};
    ct_status status;
    if (failure == NULL) {
        status = ct_manifest_format(written, &text, err);
    }
    else {
        char line[sizeof failure->message + 32];
        const int n = snprintf(line, sizeof line, "!%d %s\n", failure->os_error,
                               failure->message);
        status = ct_buf_add(&text, line, (size_t)n, err);
    }
    if (status == CT_OK) {
        status = ct_write_at(fd, text.data, text.n, 0, path, err);
    }
    ct_buf_fini(&text);
    return status;
}

/* ---- reports of other processes -------------------------------------------------- */

typedef struct report {
    char *text; /* owned; '\0' behind it */
    size_t n;
    struct timespec at;
} report;

static bool
ends_with(const report *r, const char *end)
{
    const size_t n = strlen(end);
    return r->n >= n && memcmp(r->text + r->n - n, end, n) == 0;
}

static bool
has_failed(const report *r)
{
    return r->n > 0 && r->text[0] == '!' && ends_with(r, "\n");
}

static bool
has_ended(const report *r)
{
    return has_failed(r) || ends_with(r, "}}\n");
}

/* r->text is NULL on failure. */
static ct_status
read_report(const char *path, report *r, ct_error *err)
{
    ct_source source;
    struct stat info = {0};
    *r = (report){0};
    ct_status status = ct_source_open(&source, path, NULL, err);
    if (status != CT_OK) {
        return status;
    }
    r->n = source.bytes < SIZE_LIMIT ? (size_t)source.bytes : SIZE_LIMIT;
    r->text = ct_calloc(r->n + 1, 1);
    if (r->text == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory to read %s", path);
    }
    else if ((status = ct_source_read(&source, r->text, r->n, 0, err)) == CT_OK &&
             fstat(source.fd, &info) < 0) {
        status = ct_fail_io(err, errno, "look at", path);
    }
    r->at = info.st_mtim;
    ct_source_close(&source);
    if (status != CT_OK) {
        ct_free(r->text);
        r->text = NULL;
    }
    return status;
}

static ct_status
is_locked(const char *path, bool *locked, ct_error *err)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return ct_fail_io(err, errno, "open", path);
    }
    *locked = flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    (void)close(fd);
    return CT_OK;
}

ct_status
ct_part_is_locked(const char *folder, int number, bool *locked, ct_error *err)
{
    char *path = ct_part_path(folder, number);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path beside %s", folder);
    }
    ct_status status = is_locked(path, locked, err);
    ct_free(path);
    return status;
}

static ct_status
fail_as_reported(const report *r, int number, const char *folder, ct_error *err)
{
    char *message;
    const long os_error = strtol(r->text + 1, &message, 10);
    r->text[r->n - 1] = '\0';
    ct_status status =
        ct_fail(err, CT_EIO, "rank %d could not write its files of %s:%s", number,
                ct_path_name(folder), message);
    if (err != NULL) {
        err->os_error = os_error == 0 ? EIO : (int)os_error;
    }
    return status;
}

/* Has nobody written to the file since the report? */
static bool
is_as_reported(const report *r, const char *folder, const ct_manifest_file *file)
{
    struct stat now;
    char *path = ct_path_join(folder, file->name);
    const bool there = path != NULL && stat(path, &now) == 0;
    ct_free(path);
    return there && (uint64_t)now.st_size == file->bytes &&
           (now.st_mtim.tv_sec < r->at.tv_sec ||
            (now.st_mtim.tv_sec == r->at.tv_sec &&
             now.st_mtim.tv_nsec <= r->at.tv_nsec));
}

static ct_status
take(report *r, const char *path, const char *folder, ct_manifest *found, ct_error *err)
{
    ct_manifest listed = {0};
    ct_status status = ct_manifest_parse(&listed, r->text, r->n, path, err);
    for (size_t i = 0; status == CT_OK && i < listed.n; i++) {
        const ct_manifest_file *file = &listed.files[i];
        if (is_as_reported(r, folder, file)) {
            status = ct_manifest_add(found, file->name, strlen(file->name), file->bytes,
                                     file->crc32c, err);
        }
    }
    ct_manifest_fini(&listed);
    return status;
}

/* One look at a part; *ended once there is nothing more to wait for. */
static ct_status
look(const char *path, const char *folder, int number, bool locked, bool *ended,
     ct_manifest *found, ct_error *err)
{
    report r = {0};
    bool lives = true;
    /* The lock first: a process writes the report before the lock is released. */
    ct_status status = locked ? is_locked(path, &lives, err) : CT_OK;
    if (status == CT_OK) {
        status = read_report(path, &r, err);
    }
    *ended = status != CT_OK || !lives || has_ended(&r);
    if (status == CT_OK && *ended) {
        status = has_failed(&r)  ? fail_as_reported(&r, number, folder, err)
                 : has_ended(&r) ? take(&r, path, folder, found, err)
                                 : ct_fail(err, CT_ECOMM,
                                           "rank %d ended before it had "
                                           "written its files of %s",
                                           number, ct_path_name(folder));
    }
    ct_free(r.text);
    return status;
}

ct_status
ct_part_await(const char *folder, int number, bool locked, ct_deadline deadline,
              ct_manifest *found, ct_error *err)
{
    bool ended = false;
    double nap = first_nap;
    char *path = ct_part_path(folder, number);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path beside %s", folder);
    }
    ct_status status = look(path, folder, number, locked, &ended, found, err);
    while (!ended && ct_deadline_left(deadline) > 0) {
        ct_deadline_nap(deadline, nap);
        nap = nap * 2 < longest_nap ? nap * 2 : longest_nap;
        status = look(path, folder, number, locked, &ended, found, err);
    }
    ct_free(path);
    return ended ? status
                 : ct_fail(err, CT_ECOMM,
                           "rank %d has not written its files of %s in time", number,
                           ct_path_name(folder));
}
