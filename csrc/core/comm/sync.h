/* Making ranks alike: one rank's spans for all, and a check that all have the same. */
#ifndef CT_COMM_SYNC_H
#define CT_COMM_SYNC_H

#include "core/comm/comm.h"

/* Replaces the bytes of every span, of any dtype and host memory, by the root's: packed
 * together, so that many short spans cost a few collectives. */
CT_NODISCARD ct_status ct_comm_broadcast_spans(ct_comm *comm, const ct_span *spans,
                                               size_t n_spans, int root, ct_error *err);

/* CT_EINVAL, on every rank and with the same text, unless all ranks have the same
 * n bytes of lines, each ended by '\n'. `what` is the subject of a line: "parameter".
 * The text names the first different line and the rank. */
CT_NODISCARD ct_status ct_comm_check_lines(ct_comm *comm, const char *what,
                                           const char *lines, size_t n, ct_error *err);

#endif
