/* Bytes of different lengths between the ranks of a group, over any backend. */
#ifndef CT_COMM_BYTES_H
#define CT_COMM_BYTES_H

#include "core/comm/comm.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the ranks gave: rank r's n[r] bytes begin at data + r * stride. */
typedef struct ct_gathered {
    unsigned char *data;
    int64_t *n; /* world_size lengths */
    size_t stride;
} ct_gathered;

/* Collects n bytes of each rank, n its own on each, on every rank: their lengths first,
 * then all padded to the longest. Release with ct_gathered_fini. On failure *out is
 * {0}. */
CT_NODISCARD ct_status ct_comm_gather_bytes(ct_comm *comm, const void *data, size_t n,
                                            ct_gathered *out, ct_error *err);

void ct_gathered_fini(ct_gathered *gathered); /* {0} is fine */

#ifdef __cplusplus
}
#endif

#endif
