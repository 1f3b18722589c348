/* A block of memory that grows without being copied, optionally backed by a file.
 *
 * Growth moves pages (mremap) without a second copy, so the peak is the final size.
 * Pages that were never written take no memory. Not safe to use from two threads. */
#ifndef CT_REGION_H
#define CT_REGION_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct ct_region {
    void *data;   /* NULL while bytes is 0; moves when the region grows */
    size_t bytes; /* mapped: at least what was reserved */
    int fd;       /* valid when has_file */
    bool has_file;
} ct_region;

/* Makes the region at least `bytes` long and keeps its content; new bytes are zero.
 * CT_ENOMEM, or CT_EIO when the disk behind it is full; the region is unchanged. */
CT_NODISCARD ct_status ct_region_reserve(ct_region *region, size_t bytes,
                                         ct_error *err);

/* Moves the content into an unnamed file in `folder`, removed with the region. Pages
 * then belong to the page cache, and the system may write them out. CT_EIO, with the
 * region unchanged. */
CT_NODISCARD ct_status ct_region_to_file(ct_region *region, const char *folder,
                                         ct_error *err);

/* Returns the memory beyond the first `bytes`, rounded up to whole pages. */
void ct_region_trim(ct_region *region, size_t bytes);

/* Releases everything and leaves the region empty; {0} is empty too. */
void ct_region_fini(ct_region *region);

/* Bytes of memory that this process can still get without swapping: the system's
 * available memory, or the rest of the control group's limit; 0 when unknown. */
size_t ct_memory_available(void);

/* Memory that this process has now, in bytes; 0 when unknown. */
size_t ct_memory_resident(void);

#endif
