/* The history of a group's collectives, for backends that do not compare requests.
 *
 * A rank records the collectives that have a label. A hash of the record since the last
 * comparison is added to the numbers of the next ct_comm_reduce_numbers, so there is no
 * extra message. Ranks with different hashes search for and name the first difference.
 */
#ifndef CT_HISTORY_H
#define CT_HISTORY_H

#include "core/comm/comm.h"

CT_BEGIN_DECLS

typedef struct ct_history ct_history;

/* NULL when out of memory. The caller sets comm->history. */
ct_history *ct_history_new(void);
void ct_history_free(ct_history *history); /* NULL is fine */

/* Labels the next collectives, up to ct_comm_unlabel; the label stays the caller's. The
 * label is sent with the requests, and recorded if the group has a history. */
void ct_comm_label(ct_comm *comm, const ct_label *label, ct_collective what);
void ct_comm_unlabel(ct_comm *comm);

/* all_reduce (sum, max or min) of numbers in host memory; with a history, CT_EINVAL on
 * all ranks if the histories since the last call differ, naming the first difference.
 */
CT_NODISCARD ct_status ct_comm_reduce_numbers(ct_comm *comm, double *numbers, size_t n,
                                              ct_reduce_op op, ct_error *err);

CT_END_DECLS

#endif
