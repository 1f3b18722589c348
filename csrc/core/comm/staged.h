/* A group for spans in a device's memory over a group for the host's: each collective
 * copies its operands to the host and its result back, and waits for both. */
#ifndef CT_STAGED_H
#define CT_STAGED_H

#include "core/comm/comm.h"
#include "core/device/device.h"

CT_BEGIN_DECLS

typedef struct ct_staged {
    ct_comm base;            /* what callers take for a group */
    ct_comm *inner;          /* borrowed */
    const ct_device *device; /* of the spans, and of the calling thread */
    void *stream;            /* that the operands come from, and the result goes to */
    char *host;              /* operands and result; kept between collectives */
    size_t bytes;
} ct_staged;

/* Nothing is allocated yet. */
void ct_staged_init(ct_staged *staged, ct_comm *inner, const ct_device *device,
                    void *stream);
void ct_staged_fini(ct_staged *staged);

/* The group for spans in the host's memory: the group below a staged group, the
 * owner of a group for a GPU's memory, else comm. */
ct_comm *ct_comm_of_host(ct_comm *comm);

CT_END_DECLS

#endif
