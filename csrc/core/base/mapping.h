/* Mappings: memory at a fixed address, of which the pages come and go.
 *
 * Views into a mapping stay valid for its whole life. Released memory reads as zeros;
 * a poisoned mapping then reads as NaN; a watched one faults at the first touch, so
 * that a use after release stops at the faulty line. Other mappings can report later
 * whether they have been used.
 *
 * Returning pages to the system and obtaining new, zeroed ones costs as much as copying
 * them. A block cache keeps released pages for the next mapping instead: they move to
 * its address. The host's is the arena (core/base/arena.h). */
#ifndef CORE_BASE_MAPPING_H
#define CORE_BASE_MAPPING_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

typedef struct ct_cached_block ct_cached_block;
typedef struct ct_mapping ct_mapping;
typedef struct ct_block_cache ct_block_cache;

/* The functions below for a device's memory. */
typedef struct ct_mapping_ops {
    /* For 0 bytes: finds the ordinal alone. */
    ct_status (*open)(ct_mapping *map, size_t bytes, ct_error *err);
    ct_status (*obtain)(ct_mapping *map, size_t bytes, ct_block_cache *cache,
                        ct_error *err);
    void (*release)(ct_mapping *map, ct_block_cache *cache);
    void (*close)(ct_mapping *map);
    void (*discard)(ct_block_cache *cache);
} ct_mapping_ops;

/* Released pages, ready for the mappings of one device; at most as many as were in use
 * at once. {NULL} is empty, and the host's, and may be closed. */
struct ct_block_cache {
    ct_cached_block *first;
    const ct_mapping_ops *ops; /* the device's; NULL: the host's */
};

/* {0} is empty and may be closed. */
struct ct_mapping {
    void *data;
    size_t bytes;
    void *home;             /* the pages' place in the arena; NULL: of their own */
    ct_cached_block *block; /* of a device: the pages' owner; NULL: none */
    bool watched, poisoned, detects;
    const ct_mapping_ops *ops; /* the device's; NULL: the host's */
    void *stream;              /* a device's: the user's work is enqueued here */
    int ordinal;               /* number of the device */
};

/* Maps zeroed pages of this process, without memory before the first touch. watched:
 * between release and `obtain` every touch faults. bytes may be 0. CT_ENOMEM. */
CT_NODISCARD ct_status ct_mapping_open(ct_mapping *map, size_t bytes, bool watched,
                                       ct_error *err);

/* Does the same in a device's memory, by the device's ops (NULL: the host's). A
 * device's mapping has no memory before the first `obtain` and after a release:
 * touching it then is an error of the device if watched, else such an error or a read
 * of old content. CT_ENOMEM, CT_EDEVICE. */
CT_NODISCARD ct_status ct_mapping_open_on(const ct_mapping_ops *ops, ct_mapping *map,
                                          size_t bytes, bool watched, ct_error *err);

/* Fills released memory with 0xFF from now on: NaN in float32, bfloat16 and float16.
 * Does nothing on a device. */
void ct_mapping_poison(ct_mapping *map);

/* Enables ct_mapping_touched() for the host's memory, neither watched nor poisoned.
 * Call it before the first touch. */
void ct_mapping_detect(ct_mapping *map);

/* Whether the mapping has been read or written since the release. */
bool ct_mapping_touched(const ct_mapping *map);

/* Releases the memory to the cache, or to the system if obtained without a cache; on
 * a device to the cache, if cache is not NULL, behind the work on the stream. */
void ct_mapping_release(ct_mapping *map, ct_block_cache *cache);

/* Makes the first `bytes` usable after a release, with cached pages if possible; the
 * host's memory needs no call before the first use. The content is undefined.
 * CT_ENOMEM and CT_EDEVICE, on a device alone. */
CT_NODISCARD ct_status ct_mapping_obtain(ct_mapping *map, size_t bytes,
                                         ct_block_cache *cache, ct_error *err);

void ct_mapping_close(ct_mapping *map);

/* Returns the cached pages to the system; of the host all of the arena's. */
void ct_block_cache_discard(ct_block_cache *cache);

/* The thresholds from which glibc returns freed memory to the system, for the whole
 * process; with another C library the two functions do nothing. */

/* Sets the thresholds: `longest` bytes for a freed block outside the heap, `end` bytes
 * for the end of the heap. MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ of the
 * user take precedence. Returns whether the thresholds were set. */
bool ct_malloc_keep(size_t longest, size_t end);

/* Returns the free whole pages, unless there are few. */
void ct_malloc_trim(void);

CT_END_DECLS

#endif
