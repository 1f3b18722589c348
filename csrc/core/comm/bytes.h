/* Bytes of different lengths between the ranks of a group, over any backend. */
#ifndef CORE_COMM_BYTES_H
#define CORE_COMM_BYTES_H

#include "core/base/status.h"
#include "core/comm/comm.h"

#include <stddef.h>
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

/* Messages between ranks: records of any length, one behind the other.
 *
 * Writer and reader agree on the order and the lengths of the records, nothing else is
 * in the message. Every record begins at a multiple of 16 bytes, so that arrays can be
 * used where they lie. */

#define CT_PACKET_ALIGNMENT 16

/* A message in the making. {0} is empty. */
typedef struct ct_packet {
    void *data;
    size_t n; /* bytes */
    size_t capacity;
} ct_packet;

/* Appends a copy of n bytes. On CT_ENOMEM the message is as it was. */
CT_NODISCARD ct_status ct_packet_put(ct_packet *packet, const void *record, size_t n,
                                     ct_error *err);

void ct_packet_fini(ct_packet *packet);

/* A message that is being read; `data` is kept alive by whoever made it. */
typedef struct ct_packet_reader {
    const void *data;
    size_t n;  /* bytes */
    size_t at; /* of the next record */
} ct_packet_reader;

/* The next record, of n bytes; NULL where the message has no such record any more. */
const void *ct_packet_take(ct_packet_reader *reader, size_t n);

#ifdef __cplusplus
}
#endif

#endif
