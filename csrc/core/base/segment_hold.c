/* Who lives among the processes of a segment. */
#include "core/base/io.h"
#include "core/base/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Locks of fcntl belong to the process: a forked child has none of them, and the kernel
 * lets go of them when the process ends, whether or not anybody has waited for it. */
static struct flock
place_of(int rank)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

ct_status
ct_segment_hold(const ct_segment *segment, int rank, ct_error *err)
{
    struct flock place = place_of(rank);
    if (fcntl(segment->fd, F_SETLK, &place) != 0) {
        return ct_fail_io(err, errno, "hold this rank's place in", "shared memory");
    }
    return CT_OK;
}

bool
ct_segment_is_held(const ct_segment *segment, int rank)
{
    struct flock place = place_of(rank);
    return fcntl(segment->fd, F_GETLK, &place) != 0 || place.l_type != F_UNLCK;
}
