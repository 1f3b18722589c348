/* Memory in a file without a name, on a drive that the caller chooses.
 *
 * The file is mapped, so that whoever reads a tensor there finds its values; and the
 * file is read and written in whole pages, past the page cache where the file system
 * can, for whoever streams the content. The kernel keeps both ways coherent. The disk
 * space is set aside when the file is made, and the file ends with the process. */
#ifndef CORE_BASE_DISK_MEMORY_H
#define CORE_BASE_DISK_MEMORY_H

#include "core/base/owner.h"

#include <stddef.h>

CT_BEGIN_DECLS

/* {0} is empty and may be closed. */
typedef struct ct_disk_memory {
    unsigned char *data; /* zeros when made; aligned to a page */
    size_t bytes;        /* a multiple of a page */
    int fd;
    char *name; /* for messages */
    ct_owner owner;
} ct_disk_memory;

/* Makes a file of `bytes` > 0 in `folder`. CT_EIO where the folder is missing or the
 * disk full, CT_ENOMEM. */
CT_NODISCARD ct_status ct_disk_memory_open(ct_disk_memory *memory, size_t bytes,
                                           const char *folder, ct_error *err);

/* Before `doing`: fails in a forked child (CT_ECOMM), and where the file has been cut
 * (CT_EIO). */
CT_NODISCARD ct_status ct_disk_memory_check(const ct_disk_memory *memory,
                                            const char *doing, ct_error *err);

/* Whether an address lies in there. */
bool ct_disk_memory_has(const ct_disk_memory *memory, const void *at);

/* Copy whole pages between the file, from the place of `at` on, and memory that begins
 * on a page boundary. CT_EIO. */
CT_NODISCARD ct_status ct_disk_memory_read(const ct_disk_memory *memory, const void *at,
                                           void *to, size_t bytes, ct_error *err);
CT_NODISCARD ct_status ct_disk_memory_write(const ct_disk_memory *memory, void *at,
                                            const void *from, size_t bytes,
                                            ct_error *err);

/* Returns the pages that were read or written at the addresses; the file has them. */
void ct_disk_memory_drop_pages(const ct_disk_memory *memory);

void ct_disk_memory_close(ct_disk_memory *memory);

CT_END_DECLS

#endif
