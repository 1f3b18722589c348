/* What a device's plugin hands over, in a capsule named CT_PLUGIN_CAPSULE: its kernels
 * and the communicators that work on its memory. */
#ifndef CT_PLUGIN_H
#define CT_PLUGIN_H

#include "core/comm/comm.h"
#include "core/device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CT_PLUGIN_CAPSULE "ctrainer._cuda.plugin"

enum {
    CT_COMM_ID_BYTES = 128
};

/* A new group's id: one rank asks for it and sends it to the others by any means. */
typedef ct_status ct_comm_id_fn(char id[CT_COMM_ID_BYTES], ct_error *err);

/* Joins the group and waits until every rank has. Its collectives are enqueued on
 * `stream` of the current device, behind what is there already; spans may be in the
 * device's memory, or in the host's, from which they are copied. What does not end
 * within timeout_seconds > 0, here and in each collective, fails with CT_ECOMM and
 * breaks the group. *comm is released by comm->ops->free. */
typedef ct_status
ct_comm_join_fn(const char id[CT_COMM_ID_BYTES], int rank, int world_size, void *stream,
                double timeout_seconds, ct_comm **comm, ct_error *err);

typedef struct ct_plugin {
    int version; /* CT_DEVICE_VERSION of its build: to be compared before the rest */
    const ct_device *device;
    ct_comm_id_fn *comm_id;
    ct_comm_join_fn *comm_join;
} ct_plugin;

#ifdef __cplusplus
}
#endif

#endif
