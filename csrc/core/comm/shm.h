/* A group of ranks that are processes of one machine, through shared memory.
 *
 * What a rank gives is copied into its slots of the segment, a piece at a time, while
 * the others read the piece before; memory of ct_comm_memory is read where it is.
 * All reductions are those of core/comm/reduce.h: ranks are taken in order, so a result
 * depends on nothing but the values, and is the same on every rank.
 *
 * No collective waits for ever. One fails with CT_ECOMM, whose text names the
 * collective, this rank and the culprit, within a fraction of a second when a rank has
 * died or left the group (its communicator was freed), and after the time-out when one
 * does not come; from then on the group is broken and every collective of every rank
 * fails so. Ranks that meet in different collectives, or with different arguments, all
 * fail with CT_EINVAL; the group stays whole. One thread of a rank at a time. */
#ifndef CORE_COMM_SHM_H
#define CORE_COMM_SHM_H

#include "core/comm/comm.h"

/* Makes the communicator of `rank`, by a process each, all with the same key: see
 * ct_segment_join. Blocks until all ranks have come.
 *
 * world_size is in [1, 1024]; key has at most 255 bytes; timeout_seconds is finite, >
 * 0. Released with ops->free, which is how a rank leaves. CT_EINVAL, CT_ENOMEM, CT_EIO
 * or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_shm_new(ct_comm **comm, const char *key, int rank,
                                       int world_size, double timeout_seconds,
                                       ct_error *err);

#endif
