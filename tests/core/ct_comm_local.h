/* A group of ranks that are threads of one process.
 *
 * For tests of what is written against core/comm/comm.h. Spans are memory that every
 * thread can read and write. All reductions are those of core/comm/reduce.h, so a
 * result depends on nothing but the values.
 *
 * No collective waits for ever. One fails with CT_ECOMM, whose text names this rank,
 * the collective and the rank that it waited for, when a rank has left the group (its
 * communicator was freed) or has not come within the time-out; from then on the group
 * is broken and every collective of every rank fails so. Ranks that meet in different
 * collectives, or with different arguments, all fail with CT_EINVAL; the group stays
 * whole. */
#ifndef CT_COMM_LOCAL_H
#define CT_COMM_LOCAL_H

#include "core/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the communicators of ranks 0..world_size - 1 of one group, for a thread each.
 *
 * world_size >= 1; timeout_seconds is finite, > 0. Each is released with its
 * ops->free, by its own thread or when that thread has ended: that is how a rank
 * leaves. CT_EINVAL or CT_ENOMEM, comms untouched. */
CT_NODISCARD ct_status ct_comm_local_new(ct_comm **comms, int world_size,
                                         double timeout_seconds, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
