#include "core/comm/packet.h"

#include "core/base/alloc.h"

#include <stdint.h>
#include <string.h>

static size_t
padded(size_t n)
{
    return (n + CT_PACKET_ALIGNMENT - 1) / CT_PACKET_ALIGNMENT * CT_PACKET_ALIGNMENT;
}

ct_status
ct_packet_put(ct_packet *packet, const void *record, size_t n, ct_error *err)
{
    if (n > SIZE_MAX / 2 - packet->n) {
        return ct_fail(err, CT_ENOMEM, "no memory for a message of more than %zu bytes",
                       n);
    }
    const size_t end = packet->n + padded(n);
    const ct_status status = ct_grow(&packet->data, &packet->capacity, end, 1, err);
    if (status != CT_OK || n == 0) {
        return status;
    }
    unsigned char *to = (unsigned char *)packet->data + packet->n;
    memcpy(to, record, n);
    memset(to + n, 0, end - packet->n - n);
    packet->n = end;
    return CT_OK;
}

void
ct_packet_fini(ct_packet *packet)
{
    ct_free(packet->data);
    *packet = (ct_packet){0};
}

const void *
ct_packet_take(ct_packet_reader *reader, size_t n)
{
    const size_t left = reader->n - reader->at;
    if (n > left || padded(n) > left) {
        return NULL;
    }
    const void *record = (const unsigned char *)reader->data + reader->at;
    reader->at += padded(n);
    return record;
}
