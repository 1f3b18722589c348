/* Copies of the content of files, made while the caller waits and written later.
 *
 * A snapshot takes hundreds of megabytes, and faulting in fresh pages costs as much as
 * the copy: memory is kept between saves, and the same requests in the same order find
 * the same memory again. Data on a device is copied to pinned memory behind the work on
 * the caller's stream, and later work on the stream follows the copies: the caller
 * waits for nothing, and may let the stream change the data at once. */
#ifndef CT_SNAPSHOT_H
#define CT_SNAPSHOT_H

#include "core/base/status.h"
#include "core/checkpoint/plan.h"
#include "core/device/device.h"

#include <stddef.h>

CT_BEGIN_DECLS

typedef struct ct_snapshot_chunk {
    unsigned char *data; /* mapped */
    size_t bytes, used;
    const ct_device *device; /* for which memory is pinned; NULL: ordinary memory */
} ct_snapshot_chunk;

typedef struct ct_snapshot_fetch {
    ct_place place;
    void *copied; /* of fetch_begin */
} ct_snapshot_fetch;

typedef struct ct_snapshot_shared {
    unsigned char *data; /* a mapping of our own */
    const unsigned char *theirs;
    size_t n;
} ct_snapshot_shared;

/* Starts as {0}. */
typedef struct ct_snapshot {
    ct_snapshot_chunk *chunks;
    size_t n_chunks, chunks_capacity;
    ct_snapshot_fetch *fetches; /* copies from devices under way, into the chunks */
    size_t n_fetches, fetches_capacity;
    ct_snapshot_shared *shared;
    size_t n_shared, shared_capacity;
} ct_snapshot;

/* Replaces the plan's borrowed bytes by copies, and shared ones by those of our own
 * mapping. A failure leaves the plan alone. */
CT_NODISCARD ct_status ct_snapshot_copy(ct_snapshot *snapshot, ct_plan *plan,
                                        ct_error *err);

/* Lets data at theirs[0..n), a shared mapping of the whole file `fd`, be read from the
 * file in place of a copy, up to ct_snapshot_clear(). CT_EIO or CT_ENOMEM. */
CT_NODISCARD ct_status ct_snapshot_share(ct_snapshot *snapshot, int fd,
                                         const void *theirs, size_t n, ct_error *err);

/* Waits for all copies from devices, also after a failure. To be called before the
 * copies are read. */
CT_NODISCARD ct_status ct_snapshot_await(ct_snapshot *snapshot, ct_error *err);

/* Maps and faults in memory for so many bytes, pinned for the device unless NULL. */
void ct_snapshot_reserve(ct_snapshot *snapshot, const ct_device *device, size_t bytes);

/* Forgets all copies and keeps the memory. */
void ct_snapshot_clear(ct_snapshot *snapshot);

/* In a forked child, which cannot use the devices. */
void ct_snapshot_leave_devices(ct_snapshot *snapshot);

void ct_snapshot_fini(ct_snapshot *snapshot);

size_t ct_snapshot_bytes(const ct_snapshot *snapshot); /* of the memory that is kept */

CT_END_DECLS

#endif
