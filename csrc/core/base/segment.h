/* Memory that the ranks of one machine share, each a process.
 *
 * Rank 0 makes an anonymous file (memfd) and sends its descriptor to the others through
 * a socket of Linux' abstract name space. Neither has a name in the file system, so the
 * kernel frees both with the last process, even after a crash. */
#ifndef CORE_BASE_SEGMENT_H
#define CORE_BASE_SEGMENT_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    CT_SEGMENT_MOST_RANKS = 1024
};

typedef struct ct_segment {
    void *base; /* the mapping, page-aligned; zeroed when made */
    size_t bytes;
    int fd;
} ct_segment;

/* Joins rank `rank` of `world_size` (at most CT_SEGMENT_MOST_RANKS) in the segment that
 * all who give the same key share.
 *
 * The key is any text that nothing else on the machine uses at the time: the job's name
 * and a counter. Only processes of the same user and network name space meet. Blocks
 * until rank 0 has sent the segment (rank 0: until all others have it).
 *
 * CT_ECOMM when that does not happen within timeout_seconds, naming who is missing, or
 * when a process of another kind answers; CT_EINVAL when ranks disagree about their
 * number or size, or two have one rank; CT_EIO when the system fails. */
CT_NODISCARD ct_status ct_segment_join(ct_segment *segment, const char *key, int rank,
                                       int world_size, size_t bytes,
                                       double timeout_seconds, ct_error *err);

/* Says that this process holds place `rank`, until it ends or leaves; and asks whether
 * the process of another place still does. */
CT_NODISCARD ct_status ct_segment_hold(const ct_segment *segment, int rank,
                                       ct_error *err);
bool ct_segment_is_held(const ct_segment *segment, int rank);

/* Unmaps. One that was never joined, all zeros, is fine. */
void ct_segment_leave(ct_segment *segment);

#endif
