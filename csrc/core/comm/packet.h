/* Messages between ranks: records of any length, one behind the other.
 *
 * Writer and reader agree on the order and the lengths of the records, nothing else is
 * in the message. Every record begins at a multiple of 16 bytes, so that arrays can be
 * used where they lie. */
#ifndef CT_PACKET_H
#define CT_PACKET_H

#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

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
