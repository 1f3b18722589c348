/* O_DIRECT is asked for when the file is made, and tried: some file systems take the
 * flag and reject the reads. Without O_DIRECT the page cache takes free memory. */
#define _GNU_SOURCE /* O_DIRECT */
#include "core/base/disk_memory.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/base/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void
read_past_the_cache(const ct_disk_memory *memory)
{
    const int flags = fcntl(memory->fd, F_GETFL);
    ct_pages *page = NULL;
    if (flags < 0 || ct_pages_new(&page, 1, NULL) != CT_OK) {
        return;
    }
    if (fcntl(memory->fd, F_SETFL, flags | O_DIRECT) == 0 &&
        pread(memory->fd, page->data, page->bytes, 0) != (ssize_t)page->bytes) {
        (void)fcntl(memory->fd, F_SETFL, flags);
    }
    ct_pages_drop(page);
}

static char *
name_of(const char *folder)
{
    static const char format[] = "the unnamed file in %s";
    const size_t bytes = sizeof format + strlen(folder);
    char *name = ct_alloc(bytes);
    if (name != NULL) {
        (void)snprintf(name, bytes, format, folder);
    }
    return name;
}

/* CT_EIO, with advice. */
static ct_status
fail_to_make(ct_error *err, int os_error, const char *doing, const char *folder)
{
    const char *advice = os_error == ENOENT || os_error == ENOTDIR
                             ? "; make the folder, or mount the drive"
                             : "; name a folder on a drive with room for all of it";
    const ct_status status = ct_fail_io(err, os_error, doing, folder);
    if (err != NULL) {
        const size_t n = strlen(err->message);
        (void)snprintf(err->message + n, sizeof err->message - n, "%s", advice);
    }
    return status;
}

static ct_status
fill(ct_disk_memory *made, const char *folder, ct_error *err)
{
    char doing[64];
    const int os_error = posix_fallocate(made->fd, 0, (off_t)made->bytes);
    if (os_error != 0) {
        (void)snprintf(doing, sizeof doing, "set aside %zu bytes in", made->bytes);
        return fail_to_make(err, os_error, doing, folder);
    }
    void *data =
        mmap(NULL, made->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->fd, 0);
    if (data == MAP_FAILED) {
        return ct_fail(err, CT_ENOMEM, "cannot map %zu bytes", made->bytes);
    }
    made->data = data;
    read_past_the_cache(made);
    return CT_OK;
}

ct_status
ct_disk_memory_open(ct_disk_memory *memory, size_t bytes, const char *folder,
                    ct_error *err)
{
    ct_disk_memory made = {.bytes = ct_pages_round(bytes), .owner = ct_owner_here()};
    if (made.bytes == 0 || made.bytes > PTRDIFF_MAX) {
        return ct_fail(err, CT_EINVAL, "a file of %zu bytes cannot be mapped", bytes);
    }
    made.fd = ct_open_unnamed(folder);
    if (made.fd < 0) {
        return fail_to_make(err, errno, "make a file in", folder);
    }
    made.name = name_of(folder);
    ct_status status = made.name == NULL ? ct_fail(err, CT_ENOMEM, "out of memory")
                                         : fill(&made, folder, err);
    if (status == CT_OK) {
        *memory = made;
        return CT_OK;
    }
    (void)close(made.fd);
    ct_free(made.name);
    return status;
}

ct_status
ct_disk_memory_check(const ct_disk_memory *memory, const char *doing, ct_error *err)
{
    struct stat found;
    const ct_status status = ct_owner_check(memory->owner, doing, memory->name, err);
    if (status != CT_OK) {
        return status;
    }
    if (fstat(memory->fd, &found) != 0) {
        return ct_fail_io(err, errno, "look at", memory->name);
    }
    return (uint64_t)found.st_size >= memory->bytes
               ? CT_OK
               : ct_fail(err, CT_EIO,
                         "%s has been cut from %zu to %lld bytes: nothing is updated; "
                         "resume from the last checkpoint",
                         memory->name, memory->bytes, (long long)found.st_size);
}

static size_t
offset_of(const ct_disk_memory *memory, const void *at)
{
    /* An address below the memory wraps around to an offset beyond its end. */
    return (uintptr_t)at - (uintptr_t)memory->data;
}

bool
ct_disk_memory_has(const ct_disk_memory *memory, const void *at)
{
    return at != NULL && offset_of(memory, at) < memory->bytes;
}

ct_status
ct_disk_memory_read(const ct_disk_memory *memory, const void *at, void *to,
                    size_t bytes, ct_error *err)
{
    return ct_read_at(memory->fd, to, bytes, offset_of(memory, at), memory->name, err);
}

ct_status
ct_disk_memory_write(const ct_disk_memory *memory, void *at, const void *from,
                     size_t bytes, ct_error *err)
{
    return ct_write_at(memory->fd, from, bytes, offset_of(memory, at), memory->name,
                       err);
}

void
ct_disk_memory_drop_pages(const ct_disk_memory *memory)
{
    (void)madvise(memory->data, memory->bytes, MADV_DONTNEED);
}

void
ct_disk_memory_close(ct_disk_memory *memory)
{
    if (memory->data != NULL) {
        (void)munmap(memory->data, memory->bytes);
        (void)close(memory->fd);
    }
    ct_free(memory->name);
    *memory = (ct_disk_memory){0};
}
