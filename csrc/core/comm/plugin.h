/* The tables of a device's plugin, in a capsule named CT_PLUGIN_CAPSULE: kernels, and
 * communicators on the device's memory. */
#ifndef CT_PLUGIN_H
#define CT_PLUGIN_H

#include "core/comm/comm.h"
#include "core/device/device.h"

CT_BEGIN_DECLS

#define CT_PLUGIN_CAPSULE "ctrainer._cuda.plugin"

enum {
    CT_COMM_ID_BYTES = 128
};

/* The id of a new group: made on one rank, and sent to the other ranks by any means. */
typedef ct_status ct_comm_id_fn(char id[CT_COMM_ID_BYTES], ct_error *err);

/* Joins the group and waits for all ranks. Collectives are enqueued on `stream` of the
 * current device, after the work that is already there; spans may be in the device's
 * memory or in the host's, which is copied. A join or a collective that takes longer
 * than timeout_seconds > 0 fails with CT_ECOMM and breaks the group. *comm is released
 * by comm->ops->free. */
typedef ct_status
ct_comm_join_fn(const char id[CT_COMM_ID_BYTES], int rank, int world_size, void *stream,
                double timeout_seconds, ct_comm **comm, ct_error *err);

typedef struct ct_plugin {
    int version; /* CT_DEVICE_VERSION of the plugin's build: compare it before using the
                    rest */
    const ct_device *device;
    ct_comm_id_fn *comm_id;
    ct_comm_join_fn *comm_join;
} ct_plugin;

CT_END_DECLS

#endif
