/* A group of ranks that are processes of one machine, through shared memory.
 *
 * An operand is copied into the rank's slots of the segment, a piece at a time, while
 * the other ranks read the piece before; memory of ct_comm_memory is read in place.
 * Reductions are ct_reduce's: ranks are taken in order, so a result depends on the
 * values alone and is the same on every rank.
 *
 * No collective waits for ever. When a rank has died or left the group (its
 * communicator was freed), collectives of the others fail with CT_ECOMM within a
 * fraction of a second; when a rank does not come, after the time-out. The message
 * names the collective, this rank and the culprit. From then on the group is broken,
 * and every collective of every rank fails so. When ranks call different collectives,
 * or one with different arguments, all fail with CT_EINVAL and the group stays whole.
 * One thread of a rank at a time. */
#ifndef CORE_COMM_SHM_H
#define CORE_COMM_SHM_H

#include "core/comm/comm.h"

/* Makes the communicator of `rank`, in a process for each rank, all with the same key
 * (ct_segment_join). Blocks until all ranks have joined.
 *
 * world_size is in [1, 1024]; key has at most 255 bytes; timeout_seconds is finite, >
 * 0. Released with ops->free, by which a rank leaves. CT_EINVAL, CT_ENOMEM, CT_EIO or
 * CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_shm_new(ct_comm **comm, const char *key, int rank,
                                       int world_size, double timeout_seconds,
                                       ct_error *err);

#endif
