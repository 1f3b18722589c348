/* Growth by mremap: the pages move to a longer range of addresses and are not copied,
 * so the peak is the final size. The blocks of a backing file are allocated before they
 * are mapped, since a write to a page that a full disk cannot back kills the process.
 */
#define _GNU_SOURCE /* mremap */
#include "core/base/region.h"

#include "core/base/io.h"
#include "core/base/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* From here on huge pages save page faults and waste at most a thirty-second. */
static const size_t huge_from_bytes = (size_t)64 << 20;

static void *
map_pages(const ct_region *region, size_t bytes)
{
    const int flags = region->has_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    const int fd = region->has_file ? region->fd : -1;
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    return data == MAP_FAILED ? NULL : data;
}

/* The pages of region->data, at least `bytes` long, perhaps at another address. mremap
 * of a file's mapping extends into the file, whose blocks are there already. */
static void *
remap_pages(ct_region *region, size_t bytes)
{
    if (region->data == NULL) {
        return map_pages(region, bytes);
    }
    void *data = mremap(region->data, region->bytes, bytes, MREMAP_MAYMOVE);
    return data == MAP_FAILED ? NULL : data;
}

static ct_status
extend_file(int fd, size_t bytes, const char *folder, ct_error *err)
{
    const int os_error = posix_fallocate(fd, 0, (off_t)bytes);
    return os_error == 0
               ? CT_OK
               : ct_fail_io(err, os_error, "set aside disk space for predictions in",
                            folder);
}

static void
advise(const ct_region *region)
{
    if (!region->has_file && region->bytes >= huge_from_bytes) {
        (void)madvise(region->data, region->bytes, MADV_HUGEPAGE);
    }
}

ct_status
ct_region_reserve(ct_region *region, size_t bytes, ct_error *err)
{
    if (bytes <= region->bytes) {
        return CT_OK;
    }
    const size_t rounded = ct_pages_round(bytes);
    /* Differences of addresses beyond PTRDIFF_MAX are undefined. */
    if (rounded == 0 || rounded > PTRDIFF_MAX) {
        return ct_fail(err, CT_ENOMEM, "cannot map %zu bytes", bytes);
    }
    if (region->has_file) {
        ct_status status = extend_file(region->fd, rounded, "the spill file", err);
        if (status != CT_OK) {
            return status;
        }
    }
    void *data = remap_pages(region, rounded);
    if (data == NULL) {
        return ct_fail(err, CT_ENOMEM, "cannot map %zu bytes", rounded);
    }
    region->data = data;
    region->bytes = rounded;
    advise(region);
    return CT_OK;
}

void
ct_region_fini(ct_region *region)
{
    if (region->data != NULL) {
        (void)munmap(region->data, region->bytes);
    }
    if (region->has_file) {
        (void)close(region->fd);
    }
    *region = (ct_region){0};
}

ct_status
ct_region_to_file(ct_region *region, const char *folder, ct_error *err)
{
    if (region->has_file) {
        return CT_OK;
    }
    /* A mapping of no bytes does not exist, and later growth moves a mapping. */
    const size_t bytes = region->bytes > 0 ? region->bytes : ct_pages_round(1);
    ct_region file = {.bytes = bytes, .has_file = true, .fd = ct_open_unnamed(folder)};
    if (file.fd < 0) {
        return ct_fail_io(err, errno, "make a temporary file in", folder);
    }
    ct_status status = extend_file(file.fd, bytes, folder, err);
    if (status == CT_OK) {
        file.data = map_pages(&file, bytes);
        status = file.data != NULL
                     ? CT_OK
                     : ct_fail_io(err, errno, "map a temporary file in", folder);
    }
    if (file.data == NULL) {
        (void)close(file.fd);
        return status;
    }
    /* The old pages are released only after the copy, so a failure above changes
     * nothing. */
    if (region->data != NULL) {
        memcpy(file.data, region->data, region->bytes);
    }
    ct_region_fini(region);
    *region = file;
    return CT_OK;
}

void
ct_region_trim(ct_region *region, size_t bytes)
{
    const size_t kept = ct_pages_round(bytes);
    /* 0 pages cannot stay mapped; the whole region is released by ct_region_fini. */
    if (kept == 0 || kept >= region->bytes) {
        return;
    }
    (void)munmap((char *)region->data + kept, region->bytes - kept);
    region->bytes = kept;
    if (region->has_file) {
        (void)!ftruncate(region->fd, (off_t)kept); /* gcc warns at (void) alone */
    }
}

/* The number in the first line of the file that starts with `key`; false if none. */
static bool
read_number(const char *path, const char *key, unsigned long long *value)
{
    char line[256];
    bool found = false;
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    while (!found && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            char *end = NULL;
            *value = strtoull(line + strlen(key), &end, 10);
            found = end != line + strlen(key);
        }
    }
    (void)fclose(file);
    return found;
}

size_t
ct_memory_available(void)
{
    unsigned long long kib = 0, limit = 0, used = 0;
    unsigned long long bytes = SIZE_MAX;
    if (read_number("/proc/meminfo", "MemAvailable:", &kib)) {
        bytes = kib * 1024;
    }
    if (read_number("/sys/fs/cgroup/memory.max", "", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", "", &used)) {
        /* 0 would mean unknown. Without a limit the file says "max", which is no
         * number. */
        const unsigned long long left = limit > used ? limit - used : 1;
        bytes = left < bytes ? left : bytes;
    }
    return bytes >= SIZE_MAX ? 0 : (size_t)bytes;
}

/* The second number of the file, in pages. */
size_t
ct_memory_resident(void)
{
    char line[256];
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file == NULL) {
        return 0;
    }
    if (fgets(line, sizeof line, file) != NULL) {
        char *end = NULL;
        (void)strtoull(line, &end, 10);
        pages = strtoull(end, NULL, 10);
    }
    (void)fclose(file);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}
