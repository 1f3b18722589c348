/* Bytes of different lengths between the ranks of a group, over any backend. */
#ifndef CORE_COMM_BYTES_H
#define CORE_COMM_BYTES_H

#include "core/base/status.h"
#include "core/comm/comm.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

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

CT_END_DECLS

#endif
