/* Memory at a fixed address whose pages come and go.
 *
 * Views into it stay valid for its whole life. What is released reads as zeros, or,
 * where watched, ends in a fault at the first touch, so that use after release is found
 * where it happens; or, where poisoned, as NaN. Without either the pages tell later
 * whether they have been used.
 *
 * Its pages need not go back to the system: that has to find and to zero new ones,
 * which costs as much as a copy of them. They can be moved aside to mappings that are
 * obtained later, each at its own address. */
#ifndef CORE_BASE_MAPPING_H
#define CORE_BASE_MAPPING_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_cached_block ct_cached_block;
typedef struct ct_mapping ct_mapping;
typedef struct ct_block_cache ct_block_cache;

/* Mappings of a device's memory: what the functions below do, for its own. */
typedef struct ct_mapping_ops {
    ct_status (*open)(ct_mapping *map, size_t bytes, ct_error *err);
    ct_status (*obtain)(ct_mapping *map, size_t bytes, ct_block_cache *cache,
                        ct_error *err);
    void (*release)(ct_mapping *map, ct_block_cache *cache);
    void (*close)(ct_mapping *map);
    void (*discard)(ct_block_cache *cache);
} ct_mapping_ops;

/* Pages that lie ready for mappings of one device, not more than these have had at
 * once. Starts as {NULL}, which is empty and may be closed. */
struct ct_block_cache {
    ct_cached_block *first;
    const ct_mapping_ops *ops; /* the device's; NULL: the host's */
};

/* Starts as {0}, which is empty and may be closed. */
struct ct_mapping {
    void *data;
    size_t bytes;
    ct_cached_block *block; /* whose pages these are; NULL: its own, on a device none */
    bool watched, poisoned, detects;
    const ct_mapping_ops *ops; /* the device's; NULL: the host's */
    void *stream;              /* of a device: where its user enqueues what it does */
    int ordinal;               /* which one it is, where there are several */
};

/* Zeroed pages of this process; nothing is taken before it is touched. watched: from a
 * release on to `obtain` every touch faults. bytes may be 0. CT_ENOMEM. */
CT_NODISCARD ct_status ct_mapping_open(ct_mapping *map, size_t bytes, bool watched,
                                       ct_error *err);

/* The same in a device's memory, by its ops (NULL: the host's). There it has no memory
 * before the first `obtain`, nor after a release: touching it is an error of the
 * device's then, if watched, or else finds what was there or such an error. CT_ENOMEM,
 * CT_EDEVICE. */
CT_NODISCARD ct_status ct_mapping_open_on(const ct_mapping_ops *ops, ct_mapping *map,
                                          size_t bytes, bool watched, ct_error *err);

/* From now on every byte of what is released is 0xFF: NaN in float32, bfloat16 and
 * float16. In the host's memory; nothing on a device. */
void ct_mapping_poison(ct_mapping *map);

/* From now on ct_mapping_touched() tells, where the system can say it: in the host's
 * memory that is neither watched nor poisoned. Before the first touch. */
void ct_mapping_detect(ct_mapping *map);

/* Whether any of it has been read or written since the release. */
bool ct_mapping_touched(const ct_mapping *map);

/* Takes the memory away, into the cache, or to the system if that is NULL. On a device
 * that comes behind what is on the stream. */
void ct_mapping_release(ct_mapping *map, ct_block_cache *cache);

/* Makes the first `bytes` usable after a release, with cached pages if there are; in
 * the host's memory no call is needed before the first use. What is in it is whatever
 * was. CT_ENOMEM and CT_EDEVICE, on a device alone. */
CT_NODISCARD ct_status ct_mapping_obtain(ct_mapping *map, size_t bytes,
                                         ct_block_cache *cache, ct_error *err);

void ct_mapping_close(ct_mapping *map);

/* Gives what lies ready back to the system. */
void ct_block_cache_discard(ct_block_cache *cache);
void ct_block_cache_close(ct_block_cache *cache);

/* What the C library keeps of memory that was freed. glibc's; elsewhere nothing is set
 * and nothing given back. All of it holds for the whole process. */

/* Blocks of more bytes than `longest` go back to the system when they are freed, if
 * they did not fit among what was free; so does the end of the heap from `end` bytes
 * on. Where the user has set MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ nothing
 * is changed. Returns whether it is so now. */
bool ct_malloc_keep(size_t longest, size_t end);

/* Gives back whole pages of what is free, unless that is little. */
void ct_malloc_trim(void);

#ifdef __cplusplus
}
#endif

#endif
