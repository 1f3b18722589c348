#define _GNU_SOURCE /* MADV_HUGEPAGE */
#include "core/ct_mapping.h"

#include <sys/mman.h>

static void
own_release(ct_mapping *map)
{
    (void)madvise(map->data, map->bytes, MADV_DONTNEED);
    if (map->watched) {
        (void)mprotect(map->data, map->bytes, PROT_NONE);
    }
}

static void
own_obtain(ct_mapping *map)
{
    if (map->watched) {
        (void)mprotect(map->data, map->bytes, PROT_READ | PROT_WRITE);
    }
}

static void
own_close(ct_mapping *map)
{
    (void)munmap(map->data, map->bytes);
}

static const ct_mapping_ops own_ops = {
    .release = own_release,
    .obtain = own_obtain,
    .close = own_close,
};

ct_status
ct_mapping_open(ct_mapping *map, size_t bytes, bool watched, ct_error *err)
{
    *map = (ct_mapping){.ops = NULL};
    if (bytes == 0) {
        return CT_OK;
    }
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        return ct_fail(err, CT_ENOMEM, "no room to map %zu bytes", bytes);
    }
#ifdef MADV_HUGEPAGE
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* a 512th of the faults */
#endif
    *map = (ct_mapping){&own_ops, data, bytes, watched};
    return CT_OK;
}

void
ct_mapping_release(ct_mapping *map)
{
    if (map->ops != NULL) {
        map->ops->release(map);
    }
}

void
ct_mapping_obtain(ct_mapping *map)
{
    if (map->ops != NULL) {
        map->ops->obtain(map);
    }
}

void
ct_mapping_close(ct_mapping *map)
{
    if (map->ops != NULL) {
        map->ops->close(map);
    }
    *map = (ct_mapping){.ops = NULL};
}
