/* An all_gather of parts of different lengths, over any backend. */
#ifndef CT_COMM_PADDED_H
#define CT_COMM_PADDED_H

#include "core/comm/comm.h"

CT_BEGIN_DECLS

/* Fills part r of out, out->n / world_size elements, with in of rank r, padded with
 * zeros; lengths[r] becomes the length of in. out and in do not overlap. On failure out
 * is undefined. CT_EINVAL on every rank if the operands of any do not fit, CT_ENOMEM,
 * CT_EIO or CT_ECOMM. */
CT_NODISCARD ct_status ct_comm_gather_padded(ct_comm *comm, const ct_span *out,
                                             const ct_span *in, int64_t *lengths,
                                             ct_error *err);

CT_END_DECLS

#endif
