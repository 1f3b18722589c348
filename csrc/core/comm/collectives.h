/* Collectives that are made of others, over any backend, and the histories by which
 * ranks find out that they call different ones. */
#ifndef CORE_COMM_COLLECTIVES_H
#define CORE_COMM_COLLECTIVES_H

#include "core/comm/comm.h"

CT_BEGIN_DECLS

/* Fills part r of out, out->n / world_size elements, with in of rank r, padded with
 * zeros; lengths[r] becomes the length of in. out and in do not overlap. On failure out
 * is undefined. CT_EINVAL on every rank if the operands of any do not fit, CT_ENOMEM,
 * CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_gather_padded(ct_comm *comm, const ct_span *out,
                                             const ct_span *in, int64_t *lengths,
                                             ct_error *err);

/* The ranks' data: rank r's n[r] bytes begin at data + r * stride. */
typedef struct ct_gathered {
    unsigned char *data;
    int64_t *n; /* world_size lengths */
    size_t stride;
} ct_gathered;

/* Collects n bytes of each rank, n may differ, on every rank: the lengths first,
 * then all padded to the longest. Release with ct_gathered_fini. On failure *out is
 * {0}. */
CT_NODISCARD ct_status ct_comm_gather_bytes(ct_comm *comm, const void *data, size_t n,
                                            ct_gathered *out, ct_error *err);

void ct_gathered_fini(ct_gathered *gathered); /* {0} is fine */

/* Replaces the bytes of every span, of any dtype and host memory, by the root's: packed
 * together, so that many short spans cost a few collectives. */
CT_NODISCARD ct_status ct_comm_broadcast_spans(ct_comm *comm, const ct_span *spans,
                                               size_t n_spans, int root, ct_error *err);

/* CT_EINVAL, on every rank and with the same text, unless all ranks have the same
 * n bytes of lines, each ended by '\n'. `what` is the subject of a line: "parameter".
 * The text names the first different line and the rank. */
CT_NODISCARD ct_status ct_comm_check_lines(ct_comm *comm, const char *what,
                                           const char *lines, size_t n, ct_error *err);

/* ---- the history of a group's collectives ---------------------------------------- */

/* For backends that do not compare requests. A rank records the collectives that have a
 * label. A hash of the record since the last comparison is added to the numbers of the
 * next ct_comm_reduce_numbers, so there is no extra message. Ranks with different
 * hashes search for and name the first difference. */

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
