/* What ranks have done with a group, for backends that cannot compare every request.
 *
 * A rank notes the collectives that have a label. Where numbers of all ranks are
 * reduced anyway, a hash of what it has noted since the last time goes with them: no
 * message is added. Ranks whose hashes differ then look for the first difference and
 * name it. */
#ifndef CT_HISTORY_H
#define CT_HISTORY_H

#include "core/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_history ct_history;

/* NULL when out of memory. To be set in the group's comm->history. */
ct_history *ct_history_new(void);
void ct_history_free(ct_history *history); /* NULL is fine */

/* The next collectives, up to ct_comm_unlabel, are for `label`, the caller's: that is
 * sent with them, and noted where the group has a history. */
void ct_comm_label(ct_comm *comm, const ct_label *label, ct_collective what);
void ct_comm_unlabel(ct_comm *comm);

/* all_reduce (sum, max or min) of numbers in host memory; with a history, CT_EINVAL on
 * all ranks where they have differed since the last call, naming who did what first. */
CT_NODISCARD ct_status ct_comm_reduce_numbers(ct_comm *comm, double *numbers, size_t n,
                                              ct_reduce_op op, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
