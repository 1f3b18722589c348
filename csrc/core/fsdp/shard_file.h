/* The shards of a unit in a file, and a copy of them that a thread reads beside other
 * work. */
#ifndef CORE_FSDP_SHARD_FILE_H
#define CORE_FSDP_SHARD_FILE_H

#include "core/base/disk_memory.h"
#include "core/base/mapping.h"
#include "core/base/span.h"

#include <pthread.h>

CT_BEGIN_DECLS

/* {0}: the shards are in memory. */
typedef struct ct_shard_file {
    const ct_disk_memory *disk; /* the caller's, or NULL */
    ct_mapping *copy;           /* of disk->bytes in host memory; the caller's */
    bool held;                  /* the copy has memory */
    bool begun;                 /* a thread reads */
    pthread_t thread;
    ct_status status; /* of the thread */
    ct_error error;
} ct_shard_file;

/* Begins to read the file, unless the copy is held. The copy's memory comes from the
 * cache, or with NULL from the system. CT_ECOMM in a forked child, CT_EIO for a file
 * that has been cut, CT_ENOMEM. */
CT_NODISCARD ct_status ct_shard_file_begin(ct_shard_file *file, ct_block_cache *cache,
                                           ct_error *err);

/* Waits for the copy, or reads it without a thread. CT_EIO. */
CT_NODISCARD ct_status ct_shard_file_read(ct_shard_file *file, ct_block_cache *cache,
                                          ct_error *err);

/* The shard in the copy that is held; a shard outside of the file as it is. */
ct_span ct_shard_file_find(const ct_shard_file *file, const ct_span *shard);

/* Waits for the thread and releases the copy, if it is held. */
void ct_shard_file_drop(ct_shard_file *file, ct_block_cache *cache);

CT_END_DECLS

#endif
